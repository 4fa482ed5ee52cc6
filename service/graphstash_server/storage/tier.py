"""TieredBlobStore: a cache on the local disk in front of a slower store (the back).

Only the back is durable, so `put`, `stat` and `list` use it. The tier holds copies of blobs that
were read; a lost copy costs another read from the back. Processes on the same host may share the
tier directory. If the tier fails, the store reads blobs from the back.

A deletion removes only the copy in this directory. Other hosts no longer read their copies, because
no artifact has the blob, and evict them as least recently used.
"""

import asyncio
import fcntl
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from graphstash_schema import Digest
from graphstash_server.errors import NoSpaceError
from graphstash_server.logs import in_background
from graphstash_server.storage.base import BlobReader, BlobStore, ThrottledLog
from graphstash_server.storage.files import FileReader, open_file
from graphstash_server.storage.read_through import ReadThroughFill, TierError
from graphstash_server.storage.upload import (
    DirectorySyncs,
    DiskUpload,
    SpaceGuard,
    remove_abandoned,
)

__all__ = ["TierBudget", "TieredBlobStore"]

_SHRINK_TO = 0.9
"""An eviction shrinks the tier to this share of the limit, so that the next fill does not evict."""

_SCAN_SHARE = 16
"""Scan the directory each time 1/16 of the limit was added, because other processes also add."""


class TierBudget:
    """Keeps a directory of blobs within a size limit: evicts the least recently used blobs.

    An evicted blob stays readable to readers that have it open. Methods block. Safe for concurrent
    threads, and for processes that share the directory.
    """

    def __init__(self, directory: Path, *, limit_bytes: int) -> None:
        """Limit the total size of the files under `directory`/sha256."""
        self._blobs = directory / "sha256"
        self._lock_path = directory / "evict.lock"
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()  # guards the fields below
        self._filled_bytes = 0
        self._used_bytes: int | None = None

    def count_added(self, size_bytes: int) -> None:
        """Count a new blob. If the total may exceed the limit, scan the directory and evict."""
        with self._lock:
            self._filled_bytes += size_bytes
            used = None if self._used_bytes is None else self._used_bytes + self._filled_bytes
            is_small = self._filled_bytes * _SCAN_SHARE < self._limit_bytes
            if used is not None and used <= self._limit_bytes and is_small:
                return
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._used_bytes = self._shrink()
                self._filled_bytes = 0
            except BlockingIOError:
                return  # another process evicts
            finally:
                os.close(fd)

    def _shrink(self) -> int:
        """Remove the least recently used files if necessary, and return the bytes that remain."""
        files = []
        for shard in os.scandir(self._blobs):
            with os.scandir(shard) as entries:
                for entry in entries:
                    try:
                        status = entry.stat()
                    except FileNotFoundError:
                        continue
                    files.append((status.st_mtime_ns, status.st_size, entry.path))
        used = sum(size for _, size, _ in files)
        if used > self._limit_bytes:
            for _, size, path in sorted(files):
                if used <= self._limit_bytes * _SHRINK_TO:
                    break
                Path(path).unlink(missing_ok=True)
                used -= size
        return used


T = TypeVar("T")

_THREADS = 16

_TOUCH_SECONDS = 60.0
"""Minimum seconds between two updates of a copy's mtime, the time of its last use."""

_DAMAGED_SECONDS = 5.0
"""Seconds during which a damaged blob is reported absent, because the service looks several times
before it drops the artifact."""


class TieredBlobStore(BlobStore):
    """A `BlobStore` that caches the blobs of another store on disk.

    If the disk fails, the store reads from the other store and logs a warning.
    """

    def __init__(
        self, back: BlobStore, directory: Path, *, limit_bytes: int, min_free_bytes: int = 0
    ) -> None:
        """Create the directories and remove the files of crashed fills. Blocks.

        The caller closes `back`. Blobs larger than `limit_bytes` get no copy.

        Raises:
            OSError: the directory cannot be created or written.
        """
        self._back = back
        self._blobs = directory / "sha256"
        self._temporary = directory / "tmp"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._temporary.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self._temporary)
        self._limit_bytes = limit_bytes
        self._budget = TierBudget(directory, limit_bytes=limit_bytes)
        self._space = SpaceGuard(directory, min_free_bytes=min_free_bytes)
        self._syncs = DirectorySyncs()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tier")
        self._fills: dict[str, ReadThroughFill] = {}
        self._suspects: set[str] = set()
        self._checks: dict[str, asyncio.Task[bool]] = {}
        self._damaged: dict[str, float] = {}
        self._log = ThrottledLog(logging.getLogger(__name__))

    async def put(self, digest: Digest, chunks: AsyncIterator[bytes]) -> None:
        """Store the bytes in the back, see `BlobStore.put`. Drop the copy, because a client may put
        a blob again after it read damaged bytes.
        """
        await self._back.put(digest, chunks)
        await self._drop(digest)

    async def full(self, size_bytes: int) -> NoSpaceError | None:
        """Check the back, see `BlobStore.full`."""
        return await self._back.full(size_bytes)

    async def open(self, digest: Digest) -> BlobReader | None:
        """Open the copy, or read from the back and create a copy, see `BlobStore.open`.

        If an earlier fill received wrong bytes, first verify the blob in the back. If it is damaged
        there, return None for `_DAMAGED_SECONDS`, so that the service drops the artifact.

        Raises:
            ServerError: 503 if the back does not respond, or its reads differ.
        """
        if await self._is_damaged(digest):
            return None
        try:
            hit = await self._on_thread(partial(self._open_copy, digest))
            if hit is not None:
                return hit
            if digest.size_bytes <= self._limit_bytes:
                return await self._fill_of(digest).follow()
        except (OSError, TierError) as error:
            self._log_error(error)
        return await self._back.open(digest)

    async def stat(self, digest: Digest, *, is_newest: bool = False) -> int | None:
        """Check the back, see `BlobStore.stat`."""
        return await self._back.stat(digest, is_newest=is_newest)

    async def delete(self, digest: Digest, *, generation: int = 0) -> bool:
        """Remove the blob and its copy, see `BlobStore.delete`."""
        is_final = await self._back.delete(digest, generation=generation)
        await self._drop(digest)
        return is_final

    def use_generation(self, digest: Digest, generation: int) -> bool:
        """Pass the generation to the back, see `BlobStore.use_generation`."""
        return self._back.use_generation(digest, generation)

    async def is_whole(self, digest: Digest) -> bool | None:
        """Drop the copy, which may be damaged, and verify the back, see `BlobStore.is_whole`."""
        await self._drop(digest)
        return await self._back.is_whole(digest)

    async def link(self, digest: Digest) -> str | None:
        """Return the back's URL unless the tier has a copy, see `BlobStore.link`."""
        url = await self._back.link(digest)  # mostly None, which saves the thread
        if url is None or await self._on_thread(partial(self._has_copy, digest)):
            return None
        return url

    async def list(self, *, before: datetime | None = None) -> AsyncIterator[Digest]:
        """Yield the digests in the back, see `BlobStore.list`."""
        async for digest in self._back.list(before=before):
            yield digest

    async def close(self) -> None:
        """Cancel fills and checks, and wait for the threads. No call may follow."""
        for check in list(self._checks.values()):
            check.cancel()
        for fill in list(self._fills.values()):
            await fill.cancel()
        await asyncio.to_thread(self._threads.shutdown)

    def _fill_of(self, digest: Digest) -> ReadThroughFill:
        fill = self._fills.get(digest.sha256)
        if fill is None or fill.is_given_up:
            file = DiskUpload(
                digest, directory=str(self._temporary), space=self._space, syncs=self._syncs
            )
            fill = ReadThroughFill(
                digest,
                back=self._back,
                file=file,
                destination=str(self._path(digest)),
                threads=self._threads,
                on_end=self._on_fill_end,
            )
            self._fills[digest.sha256] = fill
        return fill

    def _on_fill_end(self, fill: ReadThroughFill) -> None:
        if self._fills.get(fill.digest.sha256) is fill:
            del self._fills[fill.digest.sha256]
        if fill.is_damaged:
            self._suspects.add(fill.digest.sha256)
            self._log.warning(f"damaged on its way or in the store: {fill.failure}")
        elif fill.failure is None and fill.is_wanted:
            self._threads.submit(self._count, fill.digest.size_bytes)

    def _count(self, size_bytes: int) -> None:
        """Count a new copy. Handles its errors, because the executor would drop them."""
        try:
            self._budget.count_added(size_bytes)
        except OSError as error:
            self._log_error(error)

    async def _is_damaged(self, digest: Digest) -> bool:
        """Return whether the back stores wrong bytes. Check once, and only after a bad fill."""
        sha256 = digest.sha256
        if sha256 in self._damaged:
            if time.monotonic() - self._damaged[sha256] <= _DAMAGED_SECONDS:
                return True
            del self._damaged[sha256]
        if sha256 not in self._suspects:
            return False
        check = self._checks.get(sha256)
        if check is None:
            check = self._checks[sha256] = in_background(self._check_back(digest))
            check.add_done_callback(lambda _: self._checks.pop(sha256))
        return await asyncio.shield(check)

    async def _check_back(self, digest: Digest) -> bool:
        is_damaged = await self._back.is_whole(digest) is False
        self._suspects.discard(digest.sha256)
        if is_damaged:
            self._damaged[digest.sha256] = time.monotonic()
        return is_damaged

    async def _drop(self, digest: Digest) -> None:
        self._suspects.discard(digest.sha256)
        self._damaged.pop(digest.sha256, None)
        fill = self._fills.get(digest.sha256)
        if fill is not None:
            fill.is_wanted = False
        try:
            await self._on_thread(partial(self._path(digest).unlink, missing_ok=True))
        except OSError as error:
            self._log_error(error)

    def _open_copy(self, digest: Digest) -> FileReader | None:
        path = self._path(digest)
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        if status.st_size != digest.size_bytes:
            path.unlink(missing_ok=True)
            return None
        # An mtime in the future means that the clock was set back.
        if not 0 <= time.time() - status.st_mtime <= _TOUCH_SECONDS:
            with suppress(FileNotFoundError):
                os.utime(path)
        return open_file(path, self._threads)

    def _has_copy(self, digest: Digest) -> bool:
        with suppress(OSError):
            return self._path(digest).stat().st_size == digest.size_bytes
        return False

    def _path(self, digest: Digest) -> Path:
        return self._blobs / digest.sha256[:2] / digest.sha256

    def _log_error(self, error: Exception) -> None:
        self._log.warning(f"the disk tier failed, reading from the store behind it: {error}")

    async def _on_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
