"""open_regular: open a file for reading without waiting for the writer of a pipe."""

import errno
import os
import stat
from pathlib import Path
from typing import IO

__all__ = ["open_regular"]


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
