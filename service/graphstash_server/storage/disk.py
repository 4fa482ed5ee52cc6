"""DiskBlobStore: blobs as files `sha256/ab/<hex>` in one directory of a local file system.

Reads and writes use separate thread pools, so that uploads waiting for the disk do not delay a hit.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
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
from graphstash_server.threads import Threads

__all__ = ["DiskBlobStore"]

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

_READ_THREADS = 8
_WRITE_THREADS = 16
"""Many, because a thread that waits for fsync is cheap, and the disk merges concurrent flushes."""


class DiskBlobStore(BlobStore):
    """A `BlobStore` in a directory. Several processes may share the directory."""

    def __init__(
        self, directory: Path, *, min_free_bytes: int = 0, is_read_only: bool = False
    ) -> None:
        """Create the directories and remove the files of crashed uploads. If `is_read_only`, change
        nothing; the caller may then only read.

        Raises:
            OSError: a directory cannot be created or synced.
        """
        self._blobs = directory / "sha256"
        self._directory = os.fsencode(self._blobs)
        self._temporary = directory / "tmp"
        if not is_read_only:
            self._blobs.mkdir(parents=True, exist_ok=True)
            self._temporary.mkdir(parents=True, exist_ok=True)
            sync_directory(directory)
            # Also make the names of a new store and of its data directory durable. A parent that
            # cannot be synced, such as an automounter's, was not created by this server.
            for parent in directory.absolute().parents[:2]:
                with suppress(OSError):
                    sync_directory(parent)
            remove_abandoned(self._temporary)
        self._space = SpaceGuard(directory, min_free_bytes=min_free_bytes)
        self._syncs = DirectorySyncs()
        self._readers = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="blob-read")
        self._writers = Threads(_WRITE_THREADS, name="blob-write")

    async def put(self, digest: Digest, chunks: AsyncIterator[bytes]) -> None:
        """Store the bytes durably, see `BlobStore.put`."""
        upload = DiskUpload(
            digest, directory=str(self._temporary), space=self._space, syncs=self._syncs
        )
        try:
            rest = await feed(chunks, lambda taken: self._write(partial(upload.write, taken)))
            destination = os.fsdecode(self._name(digest))
            await self._write(partial(upload.commit, rest, destination=destination))
        except BaseException:
            await asyncio.shield(self._write(upload.abort))
            raise

    async def full(self, size_bytes: int) -> NoSpaceError | None:
        """Check free disk space unless it was ample a moment ago, see `BlobStore.full`."""
        if self._space.is_ample(size_bytes):
            return None
        try:
            await self._write(partial(self._space.check, size_bytes))
        except NoSpaceError as error:
            return error
        return None

    async def open(self, digest: Digest) -> BlobReader | None:
        """Open a blob, see `BlobStore.open`. Needs no thread if the kernel has cached the name."""
        if (reader := self.open_now(digest)) is not None:
            return reader
        return await self._read(lambda: self._present(open_file(self._path(digest), self._readers)))

    def read_now(self, digest: Digest) -> bytearray | None:
        """Read a small file if its bytes are in memory, see `BlobStore.read_now`."""
        return read_cached(self._name(digest), digest.size_bytes)

    def open_now(self, digest: Digest) -> FileReader | None:
        """Open a file whose name the kernel has cached, see `BlobStore.open_now`."""
        name = self._name(digest)
        fd = open_cached(name)
        return None if fd is None else FileReader(fd, name, self._readers)

    async def stat(self, digest: Digest, *, is_newest: bool = False) -> int | None:
        """Return the file size, see `BlobStore.stat`. Needs no thread if the name is cached."""
        if (file := self.open_now(digest)) is not None:
            file.close_now()
            return file.size_bytes
        return await self._read(lambda: self._present(_size(self._path(digest))))

    async def delete(self, digest: Digest, *, generation: int = 0) -> bool:
        """Remove the file, see `BlobStore.delete`."""
        await self._write(lambda: self._path(digest).unlink(missing_ok=True))
        return True

    async def list(self, *, before: datetime | None = None) -> AsyncIterator[Digest]:
        """Yield the digests, see `BlobStore.list`. Reads one of 256 shard directories at a time."""
        for shard in await self._read(lambda: _names(self._blobs)):
            for digest in await self._read(partial(_digests, self._blobs / shard, before)):
                yield digest

    async def close(self) -> None:
        """Wait for the threads. No call may follow."""
        await self._writers.close()
        await asyncio.to_thread(self._readers.shutdown)

    def _present(self, found: T | None) -> T | None:
        """Return `found`. If it is None, raise unless the store directory exists: an unmounted disk
        must not look like a store without blobs.
        """
        if found is None:
            self._blobs.stat()
        return found

    def _name(self, digest: Digest) -> bytes:
        """Return the path as bytes, because creating a `Path` takes longer than a read."""
        sha256 = digest.sha256
        return b"%b/%b/%b" % (self._directory, sha256[:2].encode(), sha256.encode())

    def _path(self, digest: Digest) -> Path:
        return self._blobs / digest.sha256[:2] / digest.sha256

    async def _read(self, call: Callable[[], T]) -> T:
        with _map_disk_errors():
            return await asyncio.get_running_loop().run_in_executor(self._readers, call)

    async def _write(self, call: Callable[[], T]) -> T:
        with _map_disk_errors():
            return await self._writers.call(call)


@contextmanager
def _map_disk_errors() -> Iterator[None]:
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
    """Return the digests of a shard directory's blobs; with `before`, only of older blobs."""
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
