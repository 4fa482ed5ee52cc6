"""SpillFile: a temporary file, in memory while it is small, that survives a failing disk.

A full disk must not turn a hit into a compilation. If an artifact does not fit into the local tier,
the file continues in the directory for temporary files, or else in memory.
"""

import contextlib
import errno
import fcntl
import io
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

__all__ = ["SpillFile"]

_MAX_MEMORY_BYTES: Final = 1024**3
"""Maximum size of a file in memory: the job needs the memory."""

_SMALL_BYTES: Final = 1024**2
"""Maximum size of a file that is not on a disk yet. Creating a file takes as much CPU time as
receiving a small artifact, and a disk need not store an artifact that does not verify."""

_COPY_BYTES: Final = 1024**2


class SpillFile(io.RawIOBase, BinaryIO):
    """A file for writing and reading. It is unbuffered, so that a write detects a full disk.

    Attributes:
        trouble: why the disk does not take the file, or None.

    Args:
        root: descriptor of the directory whose folder `tmp` is the file's place on the disk.

    Raises:
        OSError: a write would exceed the limit for memory, the last resort.
    """

    def __init__(self, root: int) -> None:
        self.trouble: OSError | None = None
        self._root = root
        self._path = ""
        self._file: io.BytesIO | io.FileIO = io.BytesIO()
        self._others = [self._on_disk, _in_temporary_directory, _in_memory]

    @property
    def name(self) -> str:
        """Temporary path of the file, relative to the root. Empty while the file is in memory or in
        another directory, and after `rename`.
        """
        return self._path

    def write(self, data: Any) -> int:
        """Write all of the data, unlike other unbuffered files."""
        left = memoryview(data).cast("B")
        size = left.nbytes
        if isinstance(self._file, io.BytesIO) and self._file.tell() + size > _SMALL_BYTES:
            self._move()
        while left:
            if not self._others and self.tell() + left.nbytes > _MAX_MEMORY_BYTES:
                raise OSError(errno.EFBIG, "too large for memory", self.name)
            try:
                left = left[self._file.write(left) or 0 :]
            except OSError as error:
                self.trouble = self.trouble or error
                self._move()
        return size

    def rename(self, path: str | Path) -> None:
        """Move the file to a path, which may be relative to the root. It stays open.

        Raises:
            OSError: the disk does not take the file, or the path's directory does not exist.
        """
        self._put_on_disk()
        os.replace(self._path, path, src_dir_fd=self._root, dst_dir_fd=self._root)
        self._path = ""

    def link(self, path: Path) -> None:
        """Create a hard link to the file at an absolute path. `close` removes the temporary name.

        Raises:
            FileExistsError: the path exists.
            OSError: as for `rename`.
        """
        self._put_on_disk()
        os.link(self._path, path, src_dir_fd=self._root)

    def _put_on_disk(self) -> None:
        if isinstance(self._file, io.BytesIO):
            self._file.seek(0, os.SEEK_END)
            self._move()
        if self.trouble is not None:
            raise self.trouble

    def _move(self) -> None:
        """Continue in the next place with enough space for the data written so far."""
        written = self.tell()
        while True:
            try:
                other = self._others.pop(0)()
            except IndexError:
                raise self.trouble or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
            except OSError as error:
                self.trouble = self.trouble or error
                continue
            try:
                if not self._others and written > _MAX_MEMORY_BYTES:
                    raise OSError(errno.EFBIG, "too large for memory")  # noqa: TRY301 - handled below
                self._file.seek(0)
                _copy(self._file, other, written)
            except OSError as error:
                other.close()
                self.trouble = self.trouble or error
            else:
                break
        self._file.close()
        self._file = other
        if self.trouble:
            self._remove()

    def _on_disk(self) -> io.FileIO:
        path = f"tmp/{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600, dir_fd=self._root)
        self._path = path
        # The tier removes temporary files of dead processes, but no file that is locked.
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return io.FileIO(descriptor, "r+b")

    def _remove(self) -> None:
        """Unlink the file in its directory, unless it was renamed."""
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path, dir_fd=self._root)
            self._path = ""

    def __enter__(self) -> Self:
        return self

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        return self._file.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def truncate(self, size: int | None = None, /) -> int:
        """Truncate the file if its size differs.

        On ext4, closing a truncated file writes it to the disk at once (`auto_da_alloc`). For a
        small file, that takes ten times the CPU time of all other calls.
        """
        position = self._file.tell()
        wanted = position if size is None else size
        if self._file.seek(0, os.SEEK_END) != wanted:
            self._file.truncate(wanted)
        self._file.seek(position)
        return wanted

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Close the file, and remove it unless it was renamed."""
        self._remove()
        self._file.close()
        super().close()


def _copy(source: io.BytesIO | io.FileIO, target: io.FileIO, size: int) -> None:
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
