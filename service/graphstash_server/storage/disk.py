"""DiskBlobStore: blobs as files, `sha256/ab/<hex>`, in one directory of a local file system.

A path depends on the digest only. Reads and writes have separate threads: sixteen uploads that wait
for the disk must not delay a hit.
"""

import asyncio
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from graphstash_schema import Digest, ErrorCode, InvalidValueError
from graphstash_server.errors import NoSpaceError, ServerError
from graphstash_server.storage.base import BlobReader, BlobStore
from graphstash_server.storage.files import FileReader, open_cached, open_file, read_cached
from graphstash_server.storage.upload import (
    DirectorySyncs,
    DiskUpload,
    SpaceGuard,
    feed,
    remove_abandoned,
    sync_directory,
)
from graphstash_server.storage.whole import read_whole

__all__ = ["DiskBlobStore", "ServerLock"]

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

_READ_THREADS = 8
_WRITE_THREADS = 16
"""Threads that wait for fsync cost nothing, and the disk joins the flushes of all of them."""


class DiskBlobStore(BlobStore):
    """A `BlobStore` in a directory; several processes may share it."""

    def __init__(self, directory: Path, *, min_free_bytes: int = 0) -> None:
        """Makes the directories and removes what crashed uploads left behind.

        Raises:
            OSError: when the directory cannot be made or written.
        """
        self._blobs = directory / "sha256"
        self._directory = os.fsencode(self._blobs)
        self._temporary = directory / "tmp"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._temporary.mkdir(parents=True, exist_ok=True)
        sync_directory(directory)
        remove_abandoned(self._temporary)
        self._space = SpaceGuard(directory, min_free_bytes=min_free_bytes)
        self._syncs = DirectorySyncs()
        self._readers = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="blob-read")
        self._writers = ThreadPoolExecutor(_WRITE_THREADS, thread_name_prefix="blob-write")

    async def put(self, digest: Digest, chunks: AsyncIterator[bytes]) -> None:
        """Stores the bytes, see `BlobStore.put`."""
        upload = DiskUpload(digest, directory=self._temporary, space=self._space, syncs=self._syncs)
        try:
            rest = await feed(chunks, lambda taken: self._write(partial(upload.write, taken)))
            await self._write(partial(upload.commit, rest, destination=self._path(digest)))
        except BaseException:
            await asyncio.shield(self._write(upload.abort))
            raise

    async def full(self, size_bytes: int) -> NoSpaceError | None:
        """Asks the file system, see `BlobStore.full`; not where it had plenty of room a moment ago,
        for every write asks again.
        """
        if self._space.is_ample(size_bytes):
            return None
        try:
            await self._write(partial(self._space.check, size_bytes))
        except NoSpaceError as error:
            return error
        return None

    async def open(self, digest: Digest) -> BlobReader | None:
        """Opens a blob, see `BlobStore.open`; without a thread when its name is in memory."""
        if (reader := self.open_now(digest)) is not None:
            return reader
        return await self._read(lambda: self._present(open_file(self._path(digest), self._readers)))

    def read_now(self, digest: Digest) -> bytearray | None:
        """Reads a small file that is in memory, see `BlobStore.read_now`."""
        return read_cached(self._name(digest), digest.size_bytes)

    def open_now(self, digest: Digest) -> FileReader | None:
        """Opens a file whose name is in memory, see `BlobStore.open_now`."""
        name = self._name(digest)
        fd = open_cached(name)
        return None if fd is None else FileReader(fd, name, self._readers)

    async def stat(self, digest: Digest, *, is_newest: bool = False) -> int | None:  # noqa: ARG002
        """The size of the file, see `BlobStore.stat`; without a thread where `open` needs none."""
        if (file := self.open_now(digest)) is not None:
            file.close_now()
            return file.size_bytes
        return await self._read(lambda: self._present(_size(self._path(digest))))

    async def delete(self, digest: Digest, *, generation: int = 0) -> None:  # noqa: ARG002
        """Removes the file, see `BlobStore.delete`."""
        await self._write(lambda: self._path(digest).unlink(missing_ok=True))

    async def is_whole(self, digest: Digest) -> bool | None:
        """Reads the blob, see `BlobStore.is_whole`."""
        return await read_whole(self, digest)

    async def list(self, *, before: datetime | None = None) -> AsyncIterator[Digest]:
        """Lists one directory of 256 at a time, see `BlobStore.list`."""
        for shard in await self._read(lambda: _names(self._blobs)):
            for digest in await self._read(partial(_digests, self._blobs / shard, before)):
                yield digest

    async def close(self) -> None:
        """Waits for the threads; no call may follow."""
        await asyncio.to_thread(self._writers.shutdown)
        await asyncio.to_thread(self._readers.shutdown)

    def _present(self, found: T | None) -> T | None:
        """Returns what was found. None means absent only while the store is there: an unmounted
        disk must not look like a store that lost every blob.
        """
        if found is None:
            self._blobs.stat()
        return found

    def _name(self, digest: Digest) -> bytes:
        """The path again, as a system call takes it: making a `Path` takes longer than a read."""
        sha256 = digest.sha256
        return b"%b/%b/%b" % (self._directory, sha256[:2].encode(), sha256.encode())

    def _path(self, digest: Digest) -> Path:
        return self._blobs / digest.sha256[:2] / digest.sha256

    async def _read(self, call: Callable[[], T]) -> T:
        with _failures_named():
            return await asyncio.get_running_loop().run_in_executor(self._readers, call)

    async def _write(self, call: Callable[[], T]) -> T:
        with _failures_named():
            return await asyncio.get_running_loop().run_in_executor(self._writers, call)


@contextmanager
def _failures_named() -> Iterator[None]:
    """Logs an error of the operating system and turns it into a `ServerError`."""
    try:
        yield
    except OSError as error:
        _LOGGER.exception("the blob store does not answer")
        raise ServerError(
            ErrorCode.UNAVAILABLE,
            f"the blob store does not answer ({error.strerror}): retry later",
        ) from error


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def _digests(shard: Path, before: datetime | None) -> list[Digest]:
    """The blobs of one directory; other files in it are left alone."""
    limit = before.timestamp() if before is not None else float("inf")
    found = []
    for name in _names(shard):
        try:
            status = (shard / name).stat()
            digest = Digest(name, status.st_size)
        except (FileNotFoundError, InvalidValueError):
            continue
        if name.startswith(shard.name) and status.st_mtime < limit:
            found.append(digest)
    return found


class ServerLock:
    """Tells whether other servers use the same data directory: each holds its lock, shared, while
    it runs. The kernel releases the lock when the process dies.
    """

    def __init__(self, path: Path) -> None:
        """Takes the lock; waits while another server is just starting. Blocks.

        Raises:
            OSError: when the file cannot be made.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.was_alone = True
        except BlockingIOError:
            self.was_alone = False

    def share(self) -> None:
        """Lets other servers start, which wait until then. Blocks."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._fd)
