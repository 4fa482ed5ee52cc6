"""How one upload comes in: room for it, the check of its digest, and the file where it waits.

The methods block and run in threads. A file in the blob store is made in an order that makes a
crash harmless: temporary name, hash while writing, compare, fsync, rename, fsync the
directory. Under its final name a blob is whole and durable, or not there. Files that get their
names in one directory at the same time share its fsync (`DirectorySyncs`).
"""

import contextlib
import errno
import fcntl
import io
import os
import secrets
import tempfile
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import BinaryIO, Final

from graphstash_schema import Digest, DigestHasher
from graphstash_server.errors import DigestMismatchError, LengthMismatchError, NoSpaceError
from graphstash_server.storage.base import CHUNK_BYTES

__all__ = [
    "DirectorySyncs",
    "DiskUpload",
    "Incoming",
    "SpaceGuard",
    "Spool",
    "feed",
    "no_space_refused",
    "remove_abandoned",
    "sync_directory",
]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Disk full, quota reached, and the process's limit on file sizes reached."""


@contextmanager
def no_space_refused() -> Iterator[None]:
    """Turns the operating system's errors for a full disk into `NoSpaceError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise NoSpaceError(
            f"the disk has no room ({error.strerror}): nothing was stored; free some space or "
            "delete artifacts, then retry"
        ) from error


_AMPLE_BYTES: Final = 1024**3
"""More than uploads write to a disk within `_AMPLE_SECONDS`."""

_AMPLE_SECONDS: Final = 1.0


class SpaceGuard:
    """Keeps some of a disk free.

    Bytes that are on their way may be reserved. Uploads reserve none, for what is announced may
    never come; nor are the reservations of other processes known. `min_free_bytes` is there for
    them.
    """

    def __init__(self, directory: Path, *, min_free_bytes: int) -> None:
        self._directory = directory
        self._min_free_bytes = min_free_bytes
        # Guards _reserved_bytes; held for arithmetic and one statvfs, never while writing.
        self._lock = threading.Lock()
        self._reserved_bytes = 0
        self._seen = (0, 0.0)  # the room at the last look, and until when it counts

    def is_ample(self, size_bytes: int) -> bool:
        """Whether there was room for these bytes and many more a moment ago; does not block."""
        room, until = self._seen
        return size_bytes + _AMPLE_BYTES <= room and monotonic() < until

    def check(self, size_bytes: int) -> None:
        """Refuses bytes for which there is no room now.

        Raises:
            NoSpaceError: when less than `min_free_bytes` would stay free.
        """
        with self._lock:
            self._check(size_bytes)

    def reserve(self, size_bytes: int) -> None:
        """Reserves bytes, until `release`; raises what `check` does."""
        with self._lock:
            self._check(size_bytes)
            self._reserved_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Ends a reservation: the bytes were written, or will not come."""
        with self._lock:
            self._reserved_bytes -= size_bytes

    def _check(self, size_bytes: int) -> None:
        disk = os.statvfs(self._directory)
        room = disk.f_bavail * disk.f_frsize - self._reserved_bytes - self._min_free_bytes
        self._seen = (room, monotonic() + _AMPLE_SECONDS)
        if size_bytes > room:
            raise NoSpaceError(
                f"{size_bytes} bytes are to be stored and the disk has room for {max(room, 0)}, "
                f"leaving {self._min_free_bytes} free: nothing was stored; free some space or "
                "delete artifacts",
                limit=max(room, 0),
                missing_bytes=size_bytes - room,
            )


class Incoming:
    """The bytes of one upload, checked against the digest that was announced for them."""

    def __init__(self, announced: Digest) -> None:
        self._announced = announced
        self._hasher = DigestHasher()

    def take(self, chunks: Iterable[bytes], *, write: Callable[[memoryview], int]) -> None:
        """Hashes the next bytes and passes them to `write`, which returns how many it took.

        Raises:
            LengthMismatchError: when there are more than the digest says.
        """
        # One after the other: to hash all of a mebibyte before all of it was written took a third
        # more CPU time (docs/benchmarks.md), perhaps as it had left the processor's cache by then.
        for chunk in chunks:
            self._hasher.update(chunk)
            if self._hasher.size_bytes > self._announced.size_bytes:
                raise self._wrong_length()
            view = memoryview(chunk)
            while view:
                view = view[write(view) :]

    def finish(self) -> None:
        """Compares the digest of all bytes.

        Raises:
            LengthMismatchError: when there are too few.
            DigestMismatchError: when they are other bytes.
        """
        if self._hasher.size_bytes != self._announced.size_bytes:
            raise self._wrong_length()
        received = self._hasher.digest()
        if received != self._announced:
            raise DigestMismatchError(announced=self._announced, received=received)

    def _wrong_length(self) -> LengthMismatchError:
        return LengthMismatchError(
            announced=self._announced, received_bytes=self._hasher.size_bytes
        )


async def feed(
    chunks: AsyncIterator[bytes], write: Callable[[list[bytes]], Awaitable[None]]
) -> list[bytes]:
    """Passes chunks to `write` in lists of about a mebibyte: each costs a thread hop.

    Returns:
        The rest, for the last step of the upload: a small blob needs no other one.
    """
    gathered: list[bytes] = []
    gathered_bytes = 0
    async for chunk in chunks:
        gathered.append(chunk)
        gathered_bytes += len(chunk)
        if gathered_bytes > CHUNK_BYTES:
            await write(gathered)
            gathered, gathered_bytes = [], 0
    return gathered


class DiskUpload:
    """Writes one temporary file and renames it.

    The file is locked (flock) while it is written: `remove_abandoned`, in this process or in
    another one, tells by the lock a live upload from one that a crash left behind.
    """

    def __init__(
        self, digest: Digest, *, directory: Path, space: SpaceGuard, syncs: "DirectorySyncs"
    ) -> None:
        """Makes no file yet: the first bytes do, in the thread that writes them."""
        self._directory = directory
        self._space = space
        self._syncs = syncs
        self._incoming = Incoming(digest)
        # Guards the file: an upload that is cancelled is aborted while a thread may still write.
        self._lock = threading.Lock()
        self._path = directory
        self._fd = -1
        self._is_aborted = False

    def write(self, chunks: Sequence[bytes]) -> None:
        """Writes the next bytes; raises what `commit` does."""
        self._space.check(sum(map(len, chunks)))
        with self._lock, no_space_refused():
            if self._fd < 0 and not self._is_aborted:
                self._path, self._fd = _locked_temporary(self._directory)
            self._incoming.take(chunks, write=lambda view: os.write(self._fd, view))

    def commit(self, chunks: Sequence[bytes], *, destination: Path) -> None:
        """Writes the last bytes, compares the digest and gives the file its name.

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
            self._syncs.sync_with_entry(destination.parent)
            self._close()

    def abort(self) -> None:
        """Removes the temporary file unless it already has its final name."""
        with self._lock:
            self._is_aborted = True
            if self._fd >= 0:
                self._path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory survive a crash of the host."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class DirectorySyncs:
    """Fsyncs of directories, each for all threads that wait for it.

    While a directory is synced, those who give names to further files in it gather for the next
    sync. One that has begun is not joined: it may have missed a name. Who is alone waits for
    nobody.
    """

    def __init__(self) -> None:
        self._durable: set[Path] = set()  # directories whose own entries are; it only grows
        self._lock = threading.Lock()  # guards _gathering; held for a moment
        self._gathering: dict[Path, Future[None]] = {}
        # One sync of a directory at a time; its thread takes `_lock` under it.
        self._turns: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)

    def sync_with_entry(self, directory: Path) -> None:
        """As `sync`; the directory's own name is durable, too. Somebody else, perhaps another
        process, may have made it and died before its parent was synced: so the first upload into it
        that this process acknowledges syncs that one as well.
        """
        if directory not in self._durable:
            self.sync(directory.parent)
            self._durable.add(directory)
        self.sync(directory)

    def sync(self, directory: Path) -> None:
        """Returns when every name that was given in a directory before this call is durable.

        Raises:
            OSError: when the disk fails; to everybody who waits for the same sync.
        """
        with self._lock:
            gathered = self._gathering.get(directory)
            if gathered is None:
                mine = self._gathering[directory] = Future()
                turn = self._turns[directory]
        if gathered is not None:
            gathered.result()
            return
        with turn:
            with self._lock:
                del self._gathering[directory]
            try:
                sync_directory(directory)
            except BaseException as error:
                mine.set_exception(error)
                raise
        mine.set_result(None)


def remove_abandoned(directory: Path) -> int:
    """Removes the temporary files that no process has locked; returns how many."""
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
    """Creates and locks a file; starts over when it was removed in between as abandoned."""
    while True:
        path = directory / secrets.token_hex(16)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)


class Spool:
    """Keeps one upload between the network, whose stream comes only once, and a store to which it
    may have to be sent twice.

    A small blob is kept in memory, a larger one in a file without a name, which the kernel removes
    when the process ends, so a crash leaves nothing behind.
    """

    def __init__(self, digest: Digest, *, directory: Path, space: SpaceGuard) -> None:
        """Makes no file yet: `open` does, and `close` must follow."""
        self._digest = digest
        self._directory = directory
        self._space = space
        self._incoming = Incoming(digest)
        # Guards the file: an upload that is cancelled is closed while a thread may still write.
        self._lock = threading.Lock()
        self._is_closed = False
        self._file: BinaryIO = io.BytesIO()

    @property
    def is_in_memory(self) -> bool:
        """Whether the blob is small."""
        return self._digest.size_bytes <= CHUNK_BYTES

    def open(self) -> None:
        """Makes the file.

        Raises:
            NoSpaceError: when there is no room for the whole blob.
        """
        with self._lock, no_space_refused():
            if not self.is_in_memory and not self._is_closed:
                self._space.check(self._digest.size_bytes)
                self._file = tempfile.TemporaryFile(  # noqa: SIM115 - closed by `close`
                    dir=self._directory, buffering=0
                )

    def write(self, chunks: Sequence[bytes]) -> None:
        """Writes the next bytes; raises what `finish` does."""
        if not self.is_in_memory:
            self._space.check(sum(map(len, chunks)))
        with self._lock, no_space_refused():
            self._incoming.take(chunks, write=self._file.write)

    def finish(self, chunks: Sequence[bytes]) -> BinaryIO:
        """Writes the last bytes and compares the digest.

        Returns:
            The blob, to be read from its beginning until `close`.

        Raises:
            LengthMismatchError: when there are too few or too many bytes.
            DigestMismatchError: when they are other bytes.
            NoSpaceError: when the disk is full.
        """
        self.write(chunks)
        self._incoming.finish()
        self._file.seek(0)
        return self._file

    def close(self) -> None:
        """Releases the bytes; calling it again does nothing."""
        with self._lock:
            self._is_closed = True
            self._file.close()
