"""BlobCollector: deletes a blob exactly when no artifact needs it, under any concurrency.

Two artifacts may share a blob, an upload may bring a blob while the last artifact that had it is
deleted, and another server may do any of this at the same time. The rules:

- An artifact is removed in three phases: its row goes and its blob is marked (`deletions`), in one
  transaction; the blob is deleted; the mark goes. A server may die between any two of them: the
  mark stays, and any server continues.
- A blob is deleted only by a server that has claimed it: in a transaction that had the blob's lock
  for itself and saw that no row has the blob. The claim is a row too, so it stands when the lock is
  lost with its connection, and it lasts longer than any request to the store.
- A row is committed only in a transaction that shares the blob's lock, saw no claim, and saw the
  blob (`services.artifacts.uploads`).
- An upload takes the mark off its blob first, and waits for the end of a claim. A blob that this
  process is uploading is never claimed by it: an upload may drive out an artifact that has it.
- When a claim ends and nobody said that the blob is deleted, the request to the store may still be
  under way, for however long. Then the name that the blob had in the store is never used again:
  whoever brings the blob next, or deletes it at last, counts its generation up. A deletion names
  the generation that was valid when it was claimed, so it never hits a newer one.

So a committed row always has its blob. The one thing that can go wrong is that an upload finds the
blob it stored deleted by another process; it is refused with 503 then: nothing was acknowledged.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Digest, ErrorCode
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.prepared import Source
from graphstash_server.db.queries.artifacts import is_blob_used
from graphstash_server.db.queries.deletions import (
    abandon_deletion,
    claim_deletion,
    claim_deletions,
    count_deletions,
    drop_deletion,
    end_deletion,
    find_generations,
    find_state,
    has_deletion,
    is_claimed,
    pending_bytes,
    release_deletion,
    renew_claim,
)
from graphstash_server.db.queries.locks import lock_blob
from graphstash_server.errors import ServerError
from graphstash_server.storage import BlobStore

__all__ = ["BlobCollector"]

_CLAIM = timedelta(seconds=90)
"""Longer than a request to a store can take, all its attempts (40 s) and `_DELETE_SECONDS` before
it included. When a server dies with a claim, its blob waits this long."""

_DELETE_SECONDS = 15.0

_CLAIMED = 50
_SETTLE_SECONDS = 0.1
_SETTLE_TIMES = 50


@dataclass(kw_only=True, eq=False)
class BlobCollector:
    """Deletes blobs that no artifact needs."""

    database: Database
    blobs: BlobStore
    clock: Clock

    def __post_init__(self) -> None:
        self._uploading: Counter[str] = Counter()

    @contextmanager
    def uploading(self, digest: Digest) -> Iterator[None]:
        """Keeps a blob from being collected while it is uploaded."""
        self._uploading[digest.sha256] += 1
        try:
            yield
        finally:
            self._uploading[digest.sha256] -= 1
            if not self._uploading[digest.sha256]:
                del self._uploading[digest.sha256]

    async def settle(self, digest: Digest) -> bool:
        """Before an upload: takes the mark off a blob, so that what is about to be stored is not
        deleted for an artifact that had it before. Waits for a deletion that is under way.

        Returns:
            Whether there was a mark: when the upload fails, `collect` is due.

        Raises:
            ServerError: 503, when that takes too long, for example because its server died.
        """
        for _ in range(_SETTLE_TIMES):
            is_marked, generation = await find_state(self.database, digest)
            if not is_marked:
                self.blobs.use_generation(digest, generation)
                return False
            async with self.database.writing() as connection:
                await lock_blob(connection, digest)
                is_free = not await is_claimed(connection, digest, now=self.clock())
                if is_free:
                    await abandon_deletion(connection, digest)
            if is_free:
                await self.learn(digest)
                return True
            await asyncio.sleep(_SETTLE_SECONDS)
        raise ServerError(
            ErrorCode.UNAVAILABLE, "the same bytes are being deleted: retry the upload"
        )

    async def collect(self, digest: Digest, *, only_marked: bool = False) -> bool:
        """Deletes a blob if no artifact has it, no upload of this process brings it, and no other
        server has claimed it; with `only_marked`, if it is marked, too. Returns whether it did.
        """
        async with self.database.writing() as connection:
            await lock_blob(connection, digest)
            if only_marked and not await has_deletion(connection, digest):
                return False
            now = self.clock()
            if await is_claimed(connection, digest, now=now):
                return False
            if await self._is_kept(connection, digest):
                return False
            until = now + _CLAIM
            await claim_deletion(connection, digest, until=until)
            generation = await self._generation(connection, digest)
        await self._delete(digest, generation=generation, held_until=until)
        return True

    async def collect_marked(self) -> int:
        """Deletes every marked blob that no other server has claimed; returns how many.

        Raises:
            ServerError: 503; what is left stays marked.
        """
        deleted = 0
        failure: ServerError | None = None
        while True:
            now = self.clock()
            until = now + _CLAIM
            async with self.database.writing() as connection:
                claimed = await claim_deletions(
                    connection, now=now, until=until, limit=_CLAIMED, spared=self._uploading
                )
            for digest in claimed:
                try:
                    deleted += await self._collect_claimed(digest, held_until=until)
                except ServerError as error:
                    failure = error  # the others are deleted all the same
            if len(claimed) == _CLAIMED:
                continue
            if failure is not None:
                raise failure
            return deleted

    async def collect_abandoned(self) -> int:
        """Deletes what is left when every claim has ended, and waits for that: up to ninety seconds
        when a server died with a claim. Returns how many blobs.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 2 * _CLAIM.total_seconds()
        deleted = 0
        while loop.time() < deadline:
            async with self.database.reading() as connection:
                if not await count_deletions(connection):
                    break
            deleted += await self.collect_marked()
            await asyncio.sleep(_SETTLE_SECONDS)
        return deleted

    async def pending_bytes(self, *, patience_seconds: float = 0.0) -> int:
        """Total size of the marked blobs; waits a little for other servers that delete them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_seconds
        while True:
            async with self.database.reading() as connection:
                pending = await pending_bytes(connection)
            if not pending or loop.time() >= deadline:
                return pending
            await asyncio.sleep(_SETTLE_SECONDS)

    async def _is_kept(self, connection: AsyncConnection, digest: Digest) -> bool:
        """Whether a blob has to stay; the transaction has its lock."""
        if digest.sha256 in self._uploading:
            return True  # the upload takes the mark off
        if await is_blob_used(connection, digest):
            await drop_deletion(connection, digest)
            return True
        return False

    async def _collect_claimed(self, digest: Digest, *, held_until: datetime) -> bool:
        """Deletes one blob of a page that was claimed together. Others of the page may have taken
        long, so the claim is renewed first; it may have been lost.
        """
        async with self.database.writing() as connection:
            await lock_blob(connection, digest)
            until = self.clock() + _CLAIM
            if not await renew_claim(connection, digest, held_until=held_until, until=until):
                return False
            if await self._is_kept(connection, digest):
                await release_deletion(connection, digest)  # nothing was sent under this claim
                return False
            generation = await self._generation(connection, digest)
        await self._delete(digest, generation=generation, held_until=until)
        return True

    async def learn(self, digest: Digest) -> bool:
        """Learns under which name a blob is stored now; another server may have changed it. Returns
        whether that is news.
        """
        generation = await self._generation(self.database, digest)
        return self.blobs.use_generation(digest, generation)

    async def _generation(self, source: Source, digest: Digest) -> int:
        return (await find_generations(source, [digest])).get(digest.sha256, 0)

    async def _delete(self, digest: Digest, *, generation: int, held_until: datetime) -> None:
        """Deletes a blob that this server has just claimed, and takes the mark off.

        When that fails the claim stays: the store may still delete the blob. The timeout makes sure
        that a call that waits for a thread of the store ends before its claim; a server that was
        frozen since has lost its claim.
        """
        if self.clock() + timedelta(seconds=_DELETE_SECONDS) > held_until:
            raise ServerError(
                ErrorCode.UNAVAILABLE, f"blob {digest} was not deleted: its claim ended before"
            )
        try:
            async with asyncio.timeout(_DELETE_SECONDS):
                await self.blobs.delete(digest, generation=generation)
        except TimeoutError:
            raise ServerError(
                ErrorCode.UNAVAILABLE, f"blob {digest} was not deleted within {_DELETE_SECONDS:g} s"
            ) from None
        async with self.database.writing() as connection:
            await end_deletion(connection, digest, held_until=held_until)
