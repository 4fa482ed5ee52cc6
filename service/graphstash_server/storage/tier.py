"""TieredBlobStore: this host's disk in front of a store that is further away.

What is durable is decided by the back alone: a put goes there, and `stat` and `list` ask there. The
tier holds copies, and only of what was read; losing one costs another read. It may be shared by the
processes of one host. Whatever goes wrong with it, the back answers.

A deletion reaches the copies of this directory only; elsewhere nobody asks for them any more, and
they leave as the least recently used.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from graphstash_schema import Digest
from graphstash_server.storage.base import BlobReader, BlobStore
from graphstash_server.storage.budget import TierBudget
from graphstash_server.storage.disk import FileReader, open_file
from graphstash_server.storage.fill import Fill, Place, TierError
from graphstash_server.storage.quiet import QuietLog
from graphstash_server.storage.space import SpaceGuard
from graphstash_server.storage.upload import remove_abandoned

__all__ = ["TieredBlobStore"]

T = TypeVar("T")

_THREADS = 16

_TOUCH_SECONDS = 60.0
"""The time of use is written at most so often: a hit is read far more often."""

_TOLD_SECONDS = 5.0
"""How long a damaged blob stays absent after somebody was told: a service looks more than once
before it drops the artifact."""


class TieredBlobStore:
    """A `BlobStore` in front of another.

    Attributes:
        bypassed_count: how often the tier could not help and the back was read.
    """

    def __init__(
        self, back: BlobStore, directory: Path, *, limit_bytes: int, min_free_bytes: int = 0
    ) -> None:
        """Makes the directories and removes what crashed fills left behind. Blocks.

        Args:
            back: has everything; the caller closes it.
            directory: of the copies.
            limit_bytes: most bytes of them; a larger blob is always read from the back.
            min_free_bytes: room that stays free on the disk.

        Raises:
            OSError: when the directory cannot be made or written.
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
        self._fills: dict[str, Fill] = {}
        self._damaged: dict[str, float | None] = {}
        self._log = QuietLog(logging.getLogger(__name__))

    async def put(self, digest: Digest, chunks: AsyncIterator[bytes]) -> None:
        """Stores the bytes in the back, see `BlobStore.put`; a copy is dropped, for a blob that is
        put again may be damaged.
        """
        await self._back.put(digest, chunks)
        await self._drop(digest)

    async def open(self, digest: Digest) -> BlobReader | None:
        """Opens the copy, or makes one while it is read, see `BlobStore.open`.

        A blob that turned out to be damaged is absent once, so that its artifact is dropped.
        """
        if self._is_absent_for_damage(digest):
            return None
        try:
            hit = await self._on_thread(partial(self._open_copy, digest))
            if hit is not None:
                return hit
            if digest.size_bytes <= self._limit_bytes:
                return await self._fill_of(digest).follow()
        except (OSError, TierError) as error:
            self._complain(error)
        return await self._back.open(digest)

    async def stat(self, digest: Digest) -> int | None:
        """What the back says, see `BlobStore.stat`."""
        return await self._back.stat(digest)

    async def delete(self, digest: Digest) -> None:
        """Removes the blob and its copy, see `BlobStore.delete`."""
        await self._back.delete(digest)
        await self._drop(digest)

    async def forget_copy(self, digest: Digest) -> None:
        """Removes the copy, see `BlobStore.forget_copy`."""
        await self._drop(digest)

    async def link(self, digest: Digest) -> str | None:
        """The back's URL, unless there is a copy here, see `BlobStore.link`."""
        url = await self._back.link(digest)  # first: it mostly says no, without a thread
        if url is None or await self._on_thread(partial(self._has_copy, digest)):
            return None
        return url

    async def list(self, *, before: datetime | None = None) -> AsyncIterator[Digest]:
        """What the back lists, see `BlobStore.list`."""
        async for digest in self._back.list(before=before):
            yield digest

    async def close(self) -> None:
        """Gives up the fills and waits for the threads; no call may follow."""
        for fill in list(self._fills.values()):
            await fill.cancel()
        await asyncio.to_thread(self._threads.shutdown)

    def _fill_of(self, digest: Digest) -> Fill:
        fill = self._fills.get(digest.sha256)
        if fill is None or fill.is_given_up:
            place = Place(self._temporary, self._path(digest), self._space, self._threads)
            fill = Fill(digest, back=self._back, place=place, ended=self._ended)
            self._fills[digest.sha256] = fill
        return fill

    def _ended(self, fill: Fill) -> None:
        if self._fills.get(fill.digest.sha256) is fill:
            del self._fills[fill.digest.sha256]
        if fill.is_damaged:
            self._damaged[fill.digest.sha256] = None
            self._log.warning(f"a damaged blob: {fill.failure}")
        elif fill.failure is None and fill.is_wanted:
            self._threads.submit(self._count, fill.digest.size_bytes)

    def _count(self, size_bytes: int) -> None:
        """Runs in a thread of the tier, where nobody else would see what fails."""
        try:
            self._budget.added(size_bytes)
        except OSError as error:
            self._complain(error)

    def _is_absent_for_damage(self, digest: Digest) -> bool:
        if digest.sha256 not in self._damaged:
            return False
        told_at = self._damaged[digest.sha256]
        now = time.monotonic()
        if told_at is None:
            self._damaged[digest.sha256] = now
        elif now - told_at > _TOLD_SECONDS:
            del self._damaged[digest.sha256]
            return False
        return True

    async def _drop(self, digest: Digest) -> None:
        self._damaged.pop(digest.sha256, None)
        fill = self._fills.get(digest.sha256)
        if fill is not None:
            fill.is_wanted = False
        try:
            await self._on_thread(partial(self._path(digest).unlink, missing_ok=True))
        except OSError as error:
            self._complain(error)

    def _open_copy(self, digest: Digest) -> FileReader | None:
        path = self._path(digest)
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        if status.st_size != digest.size_bytes:
            path.unlink(missing_ok=True)
            return None
        if time.time() - status.st_mtime > _TOUCH_SECONDS:
            with suppress(FileNotFoundError):
                os.utime(path)
        return open_file(path, self._threads)

    def _has_copy(self, digest: Digest) -> bool:
        with suppress(OSError):
            return self._path(digest).stat().st_size == digest.size_bytes
        return False

    def _path(self, digest: Digest) -> Path:
        return self._blobs / digest.sha256[:2] / digest.sha256

    def _complain(self, error: Exception) -> None:
        self.bypassed_count += 1
        self._log.warning(f"the disk tier could not help, the store behind it is read: {error}")

    async def _on_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
