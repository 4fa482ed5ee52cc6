"""DiskUpload: one blob on its way to disk. Every method blocks and runs in a thread.

The order is what makes a crash harmless: reserve, temporary name, hash while writing, compare,
fsync, rename, fsync the directory. Under its final name a blob is whole and durable, or not there.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Iterable
from pathlib import Path

from graphstash_schema import Digest
from graphstash_server.storage.base import CHUNK_BYTES
from graphstash_server.storage.incoming import Incoming
from graphstash_server.storage.space import SpaceGuard, no_space_refused

__all__ = ["DiskUpload", "remove_abandoned", "sync_directory"]

_CANNOT_ALLOCATE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV})
"""How file systems say that they do not allocate ahead."""


class DiskUpload:
    """Writes one temporary file and renames it.

    The file is locked (flock) for as long as it is written: that is how tidying, in this process or
    in another one, tells a live upload from one that a crash left behind.
    """

    def __init__(self, digest: Digest, *, directory: Path, space: SpaceGuard) -> None:
        """Reserves the room and makes the temporary file.

        Raises:
            NoSpaceError: when there is no room.
        """
        self._digest = digest
        self._space = space
        self._incoming = Incoming(digest)
        # Guards the file: an upload that is cancelled is aborted while a thread may still write.
        self._lock = threading.Lock()
        space.reserve(digest.size_bytes)
        self._promised_bytes = digest.size_bytes
        try:
            with no_space_refused():
                self._path, self._fd = _locked_temporary(directory)
        except BaseException:
            self._keep_promise()
            raise
        try:
            self._allocate()
        except BaseException:
            self.abort()
            raise

    def write(self, chunks: Iterable[bytes]) -> None:
        """Takes the next bytes.

        Raises:
            LengthMismatchError: when there are more than the digest says.
            NoSpaceError: when the disk is full.
        """
        with self._lock, no_space_refused():
            self._incoming.take(chunks, write=lambda view: os.write(self._fd, view))

    def commit(self, chunks: Iterable[bytes], *, destination: Path) -> None:
        """Takes the last bytes, compares the digest and gives the file its name.

        A file that is there is replaced: it can only hold the same bytes or damaged ones.

        Raises:
            LengthMismatchError: when there are too few or too many bytes.
            DigestMismatchError: when they are other bytes.
            NoSpaceError: when the disk is full.
        """
        self.write(chunks)
        with self._lock, no_space_refused():
            self._incoming.finish()
            os.fsync(self._fd)
            try:
                self._path.rename(destination)
            except FileNotFoundError:
                destination.parent.mkdir(exist_ok=True)
                sync_directory(destination.parent.parent)
                self._path.rename(destination)
            sync_directory(destination.parent)
            self._close()

    def abort(self) -> None:
        """Removes the temporary file unless it already has its final name."""
        with self._lock:
            if self._fd >= 0:
                self._path.unlink(missing_ok=True)
            self._close()

    def _allocate(self) -> None:
        """Takes the room on the disk at once, so that a large upload cannot fail half-way.

        A small one is written at once anyway, and not every file system can do it.
        """
        if self._digest.size_bytes <= CHUNK_BYTES:
            return
        with no_space_refused():
            try:
                os.posix_fallocate(self._fd, 0, self._digest.size_bytes)
            except OSError as error:
                if error.errno not in _CANNOT_ALLOCATE:
                    raise
                return  # the promise stays until the bytes are written
            self._keep_promise()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._keep_promise()

    def _keep_promise(self) -> None:
        self._space.release(self._promised_bytes)
        self._promised_bytes = 0


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory survive a crash of the host."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_abandoned(directory: Path) -> int:
    """Removes the temporary files that nobody holds a lock on; says how many."""
    removed = 0
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            fd = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
            finally:
                os.close(fd)
    return removed


def _locked_temporary(directory: Path) -> tuple[Path, int]:
    """Makes a file that no tidying removes; between its birth and its lock one could."""
    while True:
        path = directory / secrets.token_hex(16)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)
