"""Receive one upload: check free space, write the bytes to a file, and verify their digest.

The methods block and run in threads. A crash at any point is harmless, because the blob store
writes a file in this order: temporary name, hash while writing, compare, fsync, rename, fsync the
directory. A blob under its final name is therefore complete, and after the last step it survives a
crash of the host. Files that are renamed into one directory at the same time share its fsync
(`DirectorySyncs`).
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
    "map_disk_full",
    "remove_abandoned",
    "sync_directory",
]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Disk full, quota reached, or file size limit of the process reached."""


@contextmanager
def map_disk_full() -> Iterator[None]:
    """Turn an operating system error for a full disk into `NoSpaceError`."""
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
"""More bytes than uploads write to a disk within `_AMPLE_SECONDS`."""

_AMPLE_SECONDS: Final = 1.0


class SpaceGuard:
    """Keeps about `min_free_bytes` of a disk free.

    A writer reserves no space, because a client may send fewer bytes than it announced. So several
    writers may pass the check at once, and use a part of `min_free_bytes`.
    """

    def __init__(self, directory: Path, *, min_free_bytes: int) -> None:
        self._directory = directory
        self._min_free_bytes = min_free_bytes
        self._last_room = (0, 0.0)  # bytes that fitted at the last check, and their expiry

    def is_ample(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` and 1 GiB more fitted in a recent check. Never block."""
        room, expires_at = self._last_room
        return size_bytes + _AMPLE_BYTES <= room and monotonic() < expires_at

    def check(self, size_bytes: int) -> None:
        """Refuse bytes that do not fit now.

        Raises:
            NoSpaceError: less than `min_free_bytes` would stay free.
        """
        disk = os.statvfs(self._directory)
        room = disk.f_bavail * disk.f_frsize - self._min_free_bytes
        self._last_room = (room, monotonic() + _AMPLE_SECONDS)
        if size_bytes > room:
            raise NoSpaceError(
                f"{size_bytes} bytes are to be stored and the disk has room for {max(room, 0)}, "
                f"leaving {self._min_free_bytes} free: nothing was stored; free some space or "
                "delete artifacts",
                limit=max(room, 0),
                missing_bytes=size_bytes - room,
            )


class Incoming:
    """The bytes of one upload, checked against the announced digest."""

    def __init__(self, announced: Digest) -> None:
        self._announced = announced
        self._hasher = DigestHasher()

    def take(self, chunks: Iterable[bytes], *, write: Callable[[memoryview], int]) -> None:
        """Hash the next bytes and pass them to `write`, which returns how many it accepted.

        Raises:
            LengthMismatchError: there are more bytes than announced.
        """
        # Hash and write each chunk in turn. Hashing all chunks first took at least a third more CPU
        # time (docs/benchmarks/server.md), perhaps because bytes had left the processor's cache.
        for chunk in chunks:
            self._hasher.update(chunk)
            if self._hasher.size_bytes > self._announced.size_bytes:
                raise self._wrong_length()
            view = memoryview(chunk)
            while view:
                view = view[write(view) :]

    def finish(self) -> None:
        """Compare the digest of all bytes.

        Raises:
            LengthMismatchError: there are fewer bytes than announced.
            DigestMismatchError: the bytes have another hash.
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
    """Pass chunks to `write` in lists of about a mebibyte, because each call switches to a thread.

    Returns:
        The remaining chunks, for the last step of the upload. A small blob needs only that step.
    """
    batch: list[bytes] = []
    batch_bytes = 0
    async for chunk in chunks:
        batch.append(chunk)
        batch_bytes += len(chunk)
        if batch_bytes > CHUNK_BYTES:
            await write(batch)
            batch, batch_bytes = [], 0
    return batch


class DiskUpload:
    """Writes one temporary file and renames it. The upload holds a lock (flock) on the file.
    `remove_abandoned`, in any process, skips locked files and removes the files of crashed uploads.
    """

    def __init__(
        self, digest: Digest, *, directory: str, space: SpaceGuard, syncs: "DirectorySyncs"
    ) -> None:
        """Prepare the upload without I/O. The first write creates the file in `directory`. Paths
        are texts: building a `Path` takes longer than a system call with it.
        """
        self._digest = digest
        self._directory = directory
        self._space = space
        self._syncs = syncs
        self._incoming = Incoming(digest)
        # Guards the file: a cancelled upload is discarded while a thread may still write.
        self._lock = threading.Lock()
        self._path: str | None = None  # of the temporary file, until it is renamed or removed
        self._fd = -1
        self._is_discarded = False

    def check_space(self) -> None:
        """Refuse a blob that does not fit now. Raises `NoSpaceError`."""
        self._space.check(self._digest.size_bytes)

    def write(self, chunks: Sequence[bytes]) -> None:
        """Write the next bytes. Raises `LengthMismatchError` or `NoSpaceError`."""
        self._space.check(sum(map(len, chunks)))
        with self._lock, map_disk_full():
            if self._fd < 0 and not self._is_discarded:
                self._path, self._fd = _locked_temporary(self._directory)
            self._incoming.take(chunks, write=lambda view: os.write(self._fd, view))

    def read(self, start: int, length: int) -> bytes:
        """Return at most `length` of the bytes written so far, from `start` on."""
        return os.pread(self._fd, length, start)

    def finish(self, chunks: Sequence[bytes]) -> None:
        """Write the last bytes and compare the digest.

        Raises:
            LengthMismatchError: there are too few or too many bytes.
            DigestMismatchError: the bytes have another hash.
            NoSpaceError: the bytes do not fit.
        """
        self.write(chunks)
        self._incoming.finish()

    def keep(self, destination: str) -> None:
        """Make the finished file durable under its final name. Replace an existing file, which
        holds the same bytes or is damaged. Raises `NoSpaceError`.
        """
        with self._lock, map_disk_full():
            if self._path is None:
                return  # discarded
            os.fsync(self._fd)
            directory = destination.rpartition("/")[0]
            try:
                os.rename(self._path, destination)  # noqa: PTH104 - see `__init__`
            except FileNotFoundError:
                Path(directory).mkdir(exist_ok=True)
                sync_directory(Path(directory).parent)
                os.rename(self._path, destination)  # noqa: PTH104 - as above
            self._path = None
            self._syncs.sync_with_entry(directory)

    def commit(self, chunks: Sequence[bytes], *, destination: str) -> None:
        """`finish`, `keep` and `close` the file in one call of a thread. Raises their errors."""
        self.finish(chunks)
        self.keep(destination)
        self.close()

    def discard(self) -> None:
        """Remove the temporary file unless `keep` has renamed it. The bytes stay readable."""
        with self._lock:
            self._is_discarded = True
            if self._path is not None:
                Path(self._path).unlink(missing_ok=True)
                self._path = None

    def abort(self) -> None:
        """`discard` and `close` the file."""
        self.discard()
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def sync_directory(directory: Path) -> None:
    """Make the names in a directory survive a crash of the host."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class DirectorySyncs:
    """Fsyncs directories, once for all threads that wait for the same directory.

    A running sync may miss names that are created meanwhile. Threads with such names therefore
    share the next sync, which begins when the running sync ends.
    """

    def __init__(self) -> None:
        # Directories whose own names are durable, only grows. A `Path` is built once for each.
        self._durable: dict[str, Path] = {}
        self._lock = threading.Lock()  # guards _pending, held for a moment
        # Syncs that have not begun. Only a sync that another thread waits for needs a future.
        self._pending: dict[Path, Future[None] | None] = {}
        # One sync of a directory at a time. The syncing thread takes `_lock` while it holds a turn.
        self._turns: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)

    def sync_with_entry(self, name: str) -> None:
        """Make the names in a directory durable, and the directory's own name in its parent.

        The process that created the directory may have died before it synced the parent. Therefore
        the first call of this process for a directory syncs the parent.
        """
        directory = self._durable.get(name)
        if directory is None:
            directory = Path(name)
            self.sync(directory.parent)
            self._durable[name] = directory
        self.sync(directory)

    def sync(self, directory: Path) -> None:
        """Return once every name that was created in a directory before this call is durable.

        Raises:
            OSError: the disk failed. Every thread that waits for the same sync gets the error.
        """
        shared = None
        with self._lock:
            if directory in self._pending:
                shared = self._pending[directory] = self._pending[directory] or Future()
            else:
                self._pending[directory] = None
                turn = self._turns[directory]
        if shared is not None:
            shared.result()
            return
        with turn:
            with self._lock:
                shared = self._pending.pop(directory)
            try:
                sync_directory(directory)
            except BaseException as error:
                if shared is not None:
                    shared.set_exception(error)
                raise
        if shared is not None:
            shared.set_result(None)


def remove_abandoned(directory: Path) -> int:
    """Remove the temporary files that no process has locked. Return their number."""
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


def _locked_temporary(directory: str) -> tuple[str, int]:
    """Create and lock a file. Start over if `remove_abandoned` removed it before the lock."""
    while True:
        path = f"{directory}/{secrets.token_hex(16)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)


class Spool:
    """A buffer for one upload between the client and a remote store.

    The client sends the bytes once, and the store may need them twice. A small blob stays in
    memory. A larger blob goes to a file without a name, which the kernel removes when the process
    ends.
    """

    def __init__(self, digest: Digest, *, directory: Path, space: SpaceGuard) -> None:
        """Prepare the spool without I/O. The caller must call `open`, and `close` at the end."""
        self._digest = digest
        self._directory = directory
        self._space = space
        self._incoming = Incoming(digest)
        # Guards the file: a cancelled upload is closed while a thread may still write.
        self._lock = threading.Lock()
        self._is_closed = False
        self._file: BinaryIO = io.BytesIO()

    @property
    def is_in_memory(self) -> bool:
        """Whether the blob is small enough to stay in memory."""
        return self._digest.size_bytes <= CHUNK_BYTES

    def open(self) -> None:
        """Create the file for a large blob.

        Raises:
            NoSpaceError: there is no room for the whole blob.
        """
        with self._lock, map_disk_full():
            if not self.is_in_memory and not self._is_closed:
                self._space.check(self._digest.size_bytes)
                self._file = tempfile.TemporaryFile(  # noqa: SIM115 - closed by `close`
                    dir=self._directory, buffering=0
                )

    def write(self, chunks: Sequence[bytes]) -> None:
        """Write the next bytes. Raises `LengthMismatchError` or `NoSpaceError`."""
        if not self.is_in_memory:
            self._space.check(sum(map(len, chunks)))
        with self._lock, map_disk_full():
            self._incoming.take(chunks, write=self._file.write)

    def finish(self, chunks: Sequence[bytes]) -> BinaryIO:
        """Write the last bytes and compare the digest.

        Returns:
            The blob, positioned at its beginning and readable until `close`.

        Raises:
            LengthMismatchError: there are too few or too many bytes.
            DigestMismatchError: the bytes have another hash.
            NoSpaceError: the bytes do not fit.
        """
        self.write(chunks)
        self._incoming.finish()
        self._file.seek(0)
        return self._file

    def close(self) -> None:
        """Release the bytes. May be repeated."""
        with self._lock:
            self._is_closed = True
            self._file.close()
