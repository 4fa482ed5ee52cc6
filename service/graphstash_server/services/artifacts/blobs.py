"""BlobCollector: deletes a blob exactly when no artifact needs it, under any concurrency.

Two artifacts may share a blob. An upload may bring a blob while the last artifact with that blob is
being deleted. Another server may do any of this at the same time. The rules are:

- Removing an artifact has three phases. One transaction deletes its row and marks its blob (table
  `deletions`). Then the blob is deleted. Then the mark is removed. If a server dies in between, the
  mark stays and any server continues.
- A server deletes a blob only after claiming it, in a transaction that holds the blob's lock
  exclusively and finds no row with the blob. The claim is a row, so it survives a lost connection.
  It lasts longer than any request to the store.
- A row is committed only in a transaction that shares the blob's lock, finds no claim, and finds
  the blob in the store (`services.artifacts.uploads`).
- An upload first removes the mark of its blob, and waits for the end of a claim. A process never
  claims a blob that it is uploading, even if room for the upload evicts an artifact with this blob.
- If a claim ends without confirmation that the blob is deleted, the request to the store may still
  be under way, for an unlimited time. The blob's name in the store is then never used again: the
  next upload or final deletion of the blob increments its generation. A deletion names the
  generation that was valid when the blob was claimed, so it never hits a newer one.

A committed row therefore always has its blob. The only possible failure is that another process
deleted the blob that an upload stored. That upload is refused with 503, and nothing was
acknowledged.
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
"""Duration of a claim. Longer than `_DELETE_SECONDS` and a request to the store with all its
attempts (40 s). If a server dies with a claim, its blob waits this long."""

_DELETE_SECONDS = 15.0

_CLAIMED = 50
_SETTLE_SECONDS = 0.1
_SETTLE_TIMES = 50


@dataclass(kw_only=True, eq=False)
class BlobCollector:
    """Delete blobs that no artifact needs."""

    database: Database
    blobs: BlobStore
    clock: Clock

    def __post_init__(self) -> None:
        self._uploading: Counter[str] = Counter()

    @contextmanager
    def uploading(self, digest: Digest) -> Iterator[None]:
        """Protect a blob from collection by this process while it is uploaded."""
        self._uploading[digest.sha256] += 1
        try:
            yield
        finally:
            self._uploading[digest.sha256] -= 1
            if not self._uploading[digest.sha256]:
                del self._uploading[digest.sha256]

    async def settle(self, digest: Digest) -> bool:
        """Remove the mark of a blob before it is uploaded. Wait for a deletion that is under way.

        If the mark stayed, a deletion on behalf of an earlier artifact would delete the new blob.

        Returns:
            Whether the blob was marked. If so, call `collect` if the upload fails.

        Raises:
            ServerError: 503 if the wait is too long, for example because the deleting server died.
        """
        for _ in range(_SETTLE_TIMES):
            is_marked, generation = await find_state(self.database, digest)
            if not is_marked:
                self.blobs.use_generation(digest, generation)
                return False
            async with self.database.writing() as connection:
                await lock_blob(connection, digest)
                is_free = not await is_claimed(
                    connection, digest, now=self.clock(), duration=_CLAIM
                )
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
        """Delete a blob if it is unused and unclaimed. Return whether it was deleted.

        The blob stays if an artifact has it, an upload of this process brings it, or another server
        has claimed it. With `only_marked`, it also stays if it has no mark.
        """
        async with self.database.writing() as connection:
            await lock_blob(connection, digest)
            if only_marked and not await has_deletion(connection, digest):
                return False
            now = self.clock()
            if await is_claimed(connection, digest, now=now, duration=_CLAIM):
                return False
            if await self._is_kept(connection, digest):
                return False
            until = now + _CLAIM
            await claim_deletion(connection, digest, until=until)
            generation = await self._generation(connection, digest)
        await self._delete(digest, generation=generation, held_until=until)
        return True

    async def collect_marked(self) -> int:
        """Delete every marked blob that no other server has claimed. Return their number. After a
        failure of the store (503), the blobs that are left stay marked.
        """
        deleted = 0
        failure: ServerError | None = None
        while True:
            now = self.clock()
            until = now + _CLAIM
            async with self.database.writing() as connection:
                claimed = await claim_deletions(
                    connection, now=now, duration=_CLAIM, limit=_CLAIMED, spared=self._uploading
                )
            for digest in claimed:
                try:
                    deleted += await self._collect_claimed(digest, held_until=until)
                except ServerError as error:
                    failure = error  # continue with the other blobs
            if len(claimed) == _CLAIMED:
                continue
            if failure is not None:
                raise failure
            return deleted

    async def collect_abandoned(self) -> int:
        """Delete the blobs that are left, and wait until every claim has ended: up to ninety
        seconds if a server died with a claim. Return the number of deleted blobs.
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
        """Return the total size of marked blobs, after up to `patience_seconds` for deletions."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_seconds
        while True:
            async with self.database.reading() as connection:
                pending = await pending_bytes(connection)
            if not pending or loop.time() >= deadline:
                return pending
            await asyncio.sleep(_SETTLE_SECONDS)

    async def _is_kept(self, connection: AsyncConnection, digest: Digest) -> bool:
        """Whether a blob has to stay. The transaction holds its lock."""
        if digest.sha256 in self._uploading:
            return True  # the upload removes the mark
        if await is_blob_used(connection, digest):
            await drop_deletion(connection, digest)
            return True
        return False

    async def _collect_claimed(self, digest: Digest, *, held_until: datetime) -> bool:
        """Delete a blob of a page that was claimed together. Earlier blobs may have taken long, so
        renew the claim first. Return False if the claim was lost or the blob is needed.
        """
        async with self.database.writing() as connection:
            await lock_blob(connection, digest)
            until = self.clock() + _CLAIM
            if not await renew_claim(connection, digest, held_until=held_until, until=until):
                return False
            if await self._is_kept(connection, digest):
                await release_deletion(connection, digest)  # no delete was sent to the store
                return False
            generation = await self._generation(connection, digest)
        await self._delete(digest, generation=generation, held_until=until)
        return True

    async def learn(self, digest: Digest) -> bool:
        """Read the current generation of a blob, which another server may have raised. Return
        whether it was new to this process.
        """
        generation = await self._generation(self.database, digest)
        return self.blobs.use_generation(digest, generation)

    async def _generation(self, source: Source, digest: Digest) -> int:
        return (await find_generations(source, [digest])).get(digest.sha256, 0)

    async def _delete(self, digest: Digest, *, generation: int, held_until: datetime) -> None:
        """Delete a blob that this server has just claimed, and remove its mark.

        If that fails, the claim stays, because the store may still delete the blob. The timeout
        ends a call that waits for a thread of the store before its claim ends. A server that was
        frozen in the meantime has lost its claim.
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
