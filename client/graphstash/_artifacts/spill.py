"""SpillFile: a temporary file that continues elsewhere when its disk fails.

A full disk must not turn a hit into a compilation. If an artifact does not fit into the local tier,
the file continues in the directory for temporary files, or else in memory.
"""

import contextlib
import errno
import fcntl
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

__all__ = ["SpillFile"]

_MAX_MEMORY_BYTES: Final = 1024**3
"""Maximum size of a file in memory: the job needs the memory."""

_COPY_BYTES: Final = 1024**2


class SpillFile(io.RawIOBase, BinaryIO):
    """A file for writing and reading. It is unbuffered, so that a write detects a full disk.

    Attributes:
        trouble: why the file has left its directory, or None.

    Args:
        directory: first place of the file. The creator calls `remove`.

    Raises:
        OSError: a write would exceed the limit for memory, the last resort.
    """

    def __init__(self, directory: Path) -> None:
        self.trouble: OSError | None = None
        self._path: Path | None = None
        self._others = [_in_temporary_directory, _in_memory]
        try:
            descriptor, name = tempfile.mkstemp(dir=directory)
        except OSError as error:
            self.trouble = error
            self._file = self._next(error)
        else:
            self._path = Path(name)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # marks the file as in use
            self._file = os.fdopen(descriptor, "r+b", buffering=0)

    @property
    def name(self) -> str:
        """Path of the file, or "" if it has moved out of its directory."""
        return "" if self.trouble else str(self._path)

    def write(self, data: Any) -> int:
        """Write all of the data, unlike other unbuffered files."""
        left = memoryview(data).cast("B")
        size = left.nbytes
        while left:
            if not self._others and self.tell() + left.nbytes > _MAX_MEMORY_BYTES:
                raise OSError(errno.EFBIG, "too large for memory", self.name)
            try:
                left = left[self._file.write(left) or 0 :]
            except OSError as error:
                self._move(error)
        return size

    def _move(self, error: OSError) -> None:
        """Continue in the next place with enough space for the data written so far."""
        self.trouble = self.trouble or error
        written = self.tell()
        while True:
            other = self._next(error)
            try:
                if not self._others and written > _MAX_MEMORY_BYTES:
                    raise OSError(errno.EFBIG, "too large for memory")  # noqa: TRY301 - handled below
                self._file.seek(0)
                _copy(self._file, other, written)
            except OSError as failure:
                other.close()
                error = failure
            else:
                break
        self._file.close()
        self._file = other
        self.remove()

    def _next(self, error: OSError) -> io.FileIO:
        while self._others:
            with contextlib.suppress(OSError):
                return self._others.pop(0)()
        raise error

    def remove(self) -> None:
        """Unlink the file in its directory, unless it was renamed. It stays open."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        return self._file.readinto(buffer)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def truncate(self, size: int | None = None, /) -> int:
        """Truncate the file if its size differs.

        On ext4, closing a truncated file writes it to the disk at once (`auto_da_alloc`). For a
        small file, that takes ten times the CPU time of all other calls.
        """
        wanted = self.tell() if size is None else size
        if os.fstat(self.fileno()).st_size == wanted:
            return wanted
        return self._file.truncate(wanted)

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
        super().close()


def _copy(source: io.FileIO, target: io.FileIO, size: int) -> None:
    while size and (part := source.read(min(size, _COPY_BYTES))):
        size -= len(part)
        left = memoryview(part)
        while left:  # on a full disk, a write may be partial, and the next one fails
            left = left[target.write(left) or 0 :]


def _in_temporary_directory() -> io.FileIO:
    return tempfile.TemporaryFile(buffering=0)


def _in_memory() -> io.FileIO:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "no files in memory")
    return os.fdopen(os.memfd_create("graphstash"), "r+b", buffering=0)
