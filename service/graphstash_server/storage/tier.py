"""TieredBlobStore: a cache on the local disk in front of a slower store (the back).

Only the back is durable, so `put`, `stat` and `list` use it. The tier holds copies of blobs that
were read. Losing a copy costs another read from the back. Processes on the same host may share the
tier directory. If the tier fails, the store reads blobs from the back.

A deletion removes the copy in this directory only. Copies on other hosts are never read again. Each
host evicts them as least recently used.
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
from graphstash_server.storage.read_through import Place, ReadThroughFill, TierError
from graphstash_server.storage.upload import SpaceGuard, remove_abandoned

__all__ = ["TierBudget", "TieredBlobStore"]

_AFTER = 0.9
"""Share of the limit to which an eviction shrinks the tier, so that the next fill does not
evict."""

_SCAN_SHARE = 16
"""Scan the directory after each fill of 1/16 of the limit, because other processes also fill it."""


class TierBudget:
    """Keep a directory of blobs below a size limit, and evict the least recently used ones.

    An evicted blob stays readable to readers that have it open. Blocks. Safe for concurrent
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

    def added(self, size_bytes: int) -> None:
        """Count a new blob, and evict blobs if the limit may be exceeded."""
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
        """Remove the oldest files if the limit is exceeded. Return the number of bytes left."""
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
                if used <= self._limit_bytes * _AFTER:
                    break
                Path(path).unlink(missing_ok=True)
                used -= size
        return used


T = TypeVar("T")

_THREADS = 16

_TOUCH_SECONDS = 60.0
"""Minimum seconds between two updates of a copy's last use. Hits are far more frequent."""

_TOLD_SECONDS = 5.0
"""Seconds for which a damaged blob is reported absent. The service looks more than once before it
drops the artifact."""


class TieredBlobStore(BlobStore):
    """A `BlobStore` that caches the blobs of another store on disk.

    Attributes:
        bypassed_count: how often the tier failed and the back was used instead.
    """

    def __init__(
        self, back: BlobStore, directory: Path, *, limit_bytes: int, min_free_bytes: int = 0
    ) -> None:
        """Create the directories and remove the files of crashed fills. Blocks.

        The caller closes `back`. A blob larger than `limit_bytes` is always read from `back`.

        Raises:
            OSError: the directory cannot be created or written.
        """
        self.bypassed_count = 0
        self._back = back
        self._blobs = directory / "sha256"
        self._temporary = directory / "tmp"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._temporary.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self._temporary)
        self._limit_bytes = limit_bytes
        self._budget = TierBudget(directory, limit_bytes=limit_bytes)
        self._space = SpaceGuard(directory, min_free_bytes=min_free_bytes)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tier")
        self._fills: dict[str, ReadThroughFill] = {}
        self._suspects: set[str] = set()
        self._looks: dict[str, asyncio.Task[bool]] = {}
        self._damaged: dict[str, float] = {}
        self._log = ThrottledLog(logging.getLogger(__name__))

    async def put(self, digest: Digest, chunks: AsyncIterator[bytes]) -> None:
        """Store the bytes in the back, see `BlobStore.put`, and drop the copy. A client may put a
        blob again because the copy is damaged.
        """
        await self._back.put(digest, chunks)
        await self._drop(digest)

    async def full(self, size_bytes: int) -> NoSpaceError | None:
        """Ask the back, see `BlobStore.full`."""
        return await self._back.full(size_bytes)

    async def open(self, digest: Digest) -> BlobReader | None:
        """Open the copy, or create one while it is read, see `BlobStore.open`.

        If a fill received wrong bytes, the tier asks the back whether its blob is damaged. A blob
        that is damaged in the back is reported absent for a moment, so that the service drops its
        artifact.

        Raises:
            ServerError: 503, also if the bytes may have been damaged on the way.
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
        """Ask the back, see `BlobStore.stat`."""
        return await self._back.stat(digest, is_newest=is_newest)

    async def delete(self, digest: Digest, *, generation: int = 0) -> None:
        """Remove the blob and its copy, see `BlobStore.delete`."""
        await self._back.delete(digest, generation=generation)
        await self._drop(digest)

    def use_generation(self, digest: Digest, generation: int) -> bool:
        """Pass the generation to the back, see `BlobStore.use_generation`."""
        return self._back.use_generation(digest, generation)

    async def is_whole(self, digest: Digest) -> bool | None:
        """Read the blob in the back, see `BlobStore.is_whole`. The copy may be the damaged one."""
        await self._drop(digest)
        return await self._back.is_whole(digest)

    async def link(self, digest: Digest) -> str | None:
        """Return the back's URL unless the tier has a copy, see `BlobStore.link`."""
        url = await self._back.link(digest)  # first: mostly returns None, without a thread
        if url is None or await self._on_thread(partial(self._has_copy, digest)):
            return None
        return url

    async def list(self, *, before: datetime | None = None) -> AsyncIterator[Digest]:
        """Yield the blobs of the back, see `BlobStore.list`."""
        async for digest in self._back.list(before=before):
            yield digest

    async def close(self) -> None:
        """Cancel running fills and checks, and wait for the threads. Make no further call."""
        for look in list(self._looks.values()):
            look.cancel()
        for fill in list(self._fills.values()):
            await fill.cancel()
        await asyncio.to_thread(self._threads.shutdown)

    def _fill_of(self, digest: Digest) -> ReadThroughFill:
        fill = self._fills.get(digest.sha256)
        if fill is None or fill.is_given_up:
            place = Place(self._temporary, self._path(digest), self._space, self._threads)
            fill = ReadThroughFill(digest, back=self._back, place=place, ended=self._ended)
            self._fills[digest.sha256] = fill
        return fill

    def _ended(self, fill: ReadThroughFill) -> None:
        if self._fills.get(fill.digest.sha256) is fill:
            del self._fills[fill.digest.sha256]
        if fill.is_damaged:
            self._suspects.add(fill.digest.sha256)
            self._log.warning(f"damaged on its way or in the store: {fill.failure}")
        elif fill.failure is None and fill.is_wanted:
            self._threads.submit(self._count, fill.digest.size_bytes)

    def _count(self, size_bytes: int) -> None:
        """Count a filled blob. It runs in a thread of the tier, so it handles its errors."""
        try:
            self._budget.added(size_bytes)
        except OSError as error:
            self._log_error(error)

    async def _is_damaged(self, digest: Digest) -> bool:
        """Return whether the back holds wrong bytes. Concurrent callers share one check."""
        sha256 = digest.sha256
        if sha256 in self._damaged:
            if time.monotonic() - self._damaged[sha256] <= _TOLD_SECONDS:
                return True
            del self._damaged[sha256]
        if sha256 not in self._suspects:
            return False
        look = self._looks.get(sha256)
        if look is None:
            look = self._looks[sha256] = in_background(self._look_again(digest))
            look.add_done_callback(lambda _: self._looks.pop(sha256))
        return await asyncio.shield(look)

    async def _look_again(self, digest: Digest) -> bool:
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
        if (
            not 0 <= time.time() - status.st_mtime <= _TOUCH_SECONDS
        ):  # ahead: the clock was set back
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
        self.bypassed_count += 1
        self._log.warning(f"the disk tier failed, reading from the store behind it: {error}")

    async def _on_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
