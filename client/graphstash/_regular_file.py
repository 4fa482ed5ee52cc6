"""Open a file for reading, but no pipe, whose writer could block the reader."""

import errno
import io
import os
import stat
from pathlib import Path
from typing import IO, Final

__all__ = ["open_ours", "open_regular"]

_BUFFER_BYTES: Final = 16 * 1024
"""Most artifacts are small, and one read then takes them whole."""


def open_regular(
    path: Path | str, *, directory: int | None = None, follow_link: bool = True
) -> IO[bytes]:
    """Open a file.

    Args:
        path: path of the file.
        directory: descriptor of the directory that a relative path starts from.
        follow_link: whether `path` may be a symbolic link to a file.

    Raises:
        OSError: the file cannot be opened, or is a directory, device, pipe or socket.
    """
    file, _ = _opened(path, directory, 0 if follow_link else os.O_NOFOLLOW)
    return file


def open_ours(path: Path | str, *, directory: int | None = None) -> IO[bytes]:
    """Open a file that no other user can change during the check. Never block.

    Args:
        path: path of the file.
        directory: descriptor of the directory that a relative path starts from.

    Raises:
        OSError: the file is absent, not a regular file, owned by a user other than this one and
            root, or writable by group or others.
    """
    file, status = _opened(path, directory, os.O_NOFOLLOW)
    if status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022:
        return file
    file.close()
    raise PermissionError(f"{path} can be changed by another user")


def _opened(
    path: Path | str, directory: int | None, more_flags: int
) -> tuple[IO[bytes], os.stat_result]:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | more_flags
    descriptor = os.open(path, flags, dir_fd=directory)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        # `os.fdopen` makes the same objects with three more system calls.
        return io.BufferedReader(io.FileIO(descriptor), _BUFFER_BYTES), status
    os.close(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))
