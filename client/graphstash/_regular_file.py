"""Open a file for reading, but no pipe, whose writer could block the reader."""

import errno
import os
import stat
from pathlib import Path
from typing import IO

__all__ = ["open_ours", "open_regular"]


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
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_link else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=directory)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def open_ours(path: Path | str, *, directory: int | None = None) -> IO[bytes]:
    """Open a file that no other user can change during the check. Never block.

    Args:
        path: path of the file.
        directory: descriptor of the directory that a relative path starts from.

    Raises:
        OSError: the file is absent, not a regular file, owned by a user other than this one and
            root, or writable by group or others.
    """
    file = open_regular(path, directory=directory, follow_link=False)
    status = os.fstat(file.fileno())
    if status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022:
        return file
    file.close()
    raise PermissionError(f"{path} can be changed by another user")
