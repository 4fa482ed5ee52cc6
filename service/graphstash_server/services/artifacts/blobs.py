"""BlobCollector: deletes a blob if and only if no artifact needs it, under any concurrency.

Two artifacts may share a blob. A client may upload a blob while the last artifact with that blob is
deleted. Other servers may do the same at any time. The rules are:

- Removing an artifact has three phases. One transaction deletes its row and marks its blob (table
  `deletions`). Then the blob is deleted. Then the mark is removed. If a server dies in between, the
  mark stays and any server continues.
- A server deletes a blob only after claiming it, in a transaction that holds the blob's lock
  exclusively and finds no row with the blob. The claim is a row, so it survives a lost connection.
  It lasts longer than any request to the store. One transaction claims a page of blobs.
- A row is committed only in a transaction that shares the blob's lock, finds no claim, and finds
  the blob in the store (`services.artifacts.uploads`).
- An upload first removes the mark of its blob, and waits for the end of a claim. A process never
  claims a blob that it is uploading, even if room for the upload evicts an artifact with this blob.
- If a claim ends without confirmation that the blob is deleted, or the store answered only a
  repeated request, a request may still be under way, for an unlimited time. The blob's name in the
  store is then never used again: the next upload or final deletion of the blob increments its
  generation. A deletion names the generation that was valid when the blob was claimed, so it never
  hits a newer one.

A committed row therefore always has its blob. The only possible failure is that another process
deleted the blob that an upload stored. That upload is refused with 503, and nothing was
acknowledged.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Digest, ErrorCode
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import find_used
from graphstash_server.db.queries.deletions import (
    abandon_deletion,
    claim_blobs,
    claim_deletions,
    count_deletions,
    drop_deletions,
    end_deletions,
    find_claimed,
    find_generations,
    find_marked,
    find_state,
    pending_bytes,
    release_deletions,
    renew_claims,
)
from graphstash_server.db.queries.locks import lock_blobs
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
        self._collections = 0

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

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        """Let `wait_for_deletions` know that this process deletes blobs."""
        self._collections += 1
        try:
            yield
        finally:
            self._collections -= 1

    async def settle(self, digest: Digest) -> bool:
        """Remove the mark of a blob before it is uploaded. Wait while a server deletes it.

        If the mark stayed, a later deletion would delete the new blob.

        Returns:
            Whether the blob was marked. If so, call `collect_all` if the upload fails.

        Raises:
            ServerError: 503 after five seconds, for example because the deleting server died.
        """
        for _ in range(_SETTLE_TIMES):
            is_marked, generation = await find_state(self.database, digest)
            if not is_marked:
                self.blobs.use_generation(digest, generation)
                return False
            async with self.database.writing() as connection:
                await lock_blobs(connection, [digest])
                is_free = not await find_claimed(
                    connection, [digest], now=self.clock(), duration=_CLAIM
                )
                if is_free and await find_used(connection, [digest]):
                    # A server died before it sent a request. The artifacts keep the blob's name.
                    await drop_deletions(connection, [digest])
                elif is_free:
                    await abandon_deletion(connection, digest)
            if is_free:
                await self.learn_generations([digest])
                return True
            await asyncio.sleep(_SETTLE_SECONDS)
        raise ServerError(
            ErrorCode.UNAVAILABLE, "the same bytes are being deleted: retry the upload"
        )

    async def collect_all(
        self, digests: Collection[Digest], *, only_marked: bool = False
    ) -> set[Digest]:
        """Delete the blobs that are unused and unclaimed. Return those that were deleted.

        A blob stays if an artifact has it, this process is uploading it, or a server has claimed
        it. With `only_marked`, it also stays if it has no mark.

        Raises:
            ServerError: 503 if the store did not delete all of them.
        """
        with self._collecting():
            deleted: set[Digest] = set()
            failure: ServerError | None = None
            chosen = sorted(set(digests), key=str)
            for start in range(0, len(chosen), _CLAIMED):
                page = chosen[start : start + _CLAIMED]
                async with self.database.writing() as connection:
                    await lock_blobs(connection, page)
                    if only_marked:
                        page = _only(page, await find_marked(connection, page))
                    now = self.clock()
                    until = now + _CLAIM
                    page = _without(
                        page, await find_claimed(connection, page, now=now, duration=_CLAIM)
                    )
                    page = _without(page, await self._find_kept(connection, page))
                    await claim_blobs(connection, page, until=until)
                    generations = await find_generations(connection, page)
                gone, failed = await self._delete_all(page, generations, held_until=until)
                deleted.update(gone)
                failure = failed or failure
            if failure is not None:
                raise failure
            return deleted

    async def collect_marked(self) -> int:
        """Delete every marked blob that is unused and unclaimed. Return their number.

        Raises:
            ServerError: 503 if the store did not delete all of them. They stay marked.
        """
        with self._collecting():
            deleted = 0
            failure: ServerError | None = None
            patience = self.clock() + _CLAIM  # then the claims of failed blobs end
            while True:
                now = self.clock()
                until = now + _CLAIM
                async with self.database.writing() as connection:
                    claimed = await claim_deletions(
                        connection, now=now, duration=_CLAIM, limit=_CLAIMED, spared=self._uploading
                    )
                gone, failed = await self._collect_claimed(claimed, held_until=until)
                deleted += len(gone)
                failure = failed or failure
                if len(claimed) == _CLAIMED and (gone or self.clock() < patience):
                    continue  # with the other blobs, unless the store deletes none for long
                if failure is not None:
                    raise failure
                return deleted

    async def collect_abandoned(self) -> int:
        """Delete marked blobs until none is left. Return their number.

        The claim of a server that died lasts up to 90 seconds. Give up after 180.
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

    async def wait_for_deletions(self, seconds: float) -> int:
        """Wait until no blob is marked. Return the total size of the marked blobs that are left.

        Wait for at most `seconds`, or 15 seconds while this process deletes blobs, if that is
        longer: another server may have died, but this process has not.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        while True:
            async with self.database.reading() as connection:
                pending = await pending_bytes(connection)
            patience = max(seconds, _DELETE_SECONDS) if self._collections else seconds
            if not pending or loop.time() - start >= patience:
                return pending
            await asyncio.sleep(_SETTLE_SECONDS)

    async def _find_kept(self, connection: AsyncConnection, digests: Sequence[Digest]) -> set[str]:
        """Return the SHA-256 of blobs that must stay; unmark used ones. The caller locked all."""
        uploading = {each.sha256 for each in digests if each.sha256 in self._uploading}
        others = _without(digests, uploading)  # `settle` removes the marks of uploads
        used = await find_used(connection, others)
        await drop_deletions(connection, _only(others, used))
        return uploading | used

    async def _collect_claimed(
        self, digests: Sequence[Digest], *, held_until: datetime
    ) -> "_Deleted":
        """Delete the blobs of a page that was claimed together.

        A blob stays if its claim has ended, an artifact has it, or this process is uploading it.
        """
        async with self.database.writing() as connection:
            await lock_blobs(connection, digests)
            until = self.clock() + _CLAIM
            held = _only(
                digests,
                await renew_claims(connection, digests, held_until=held_until, until=until),
            )
            kept = await self._find_kept(connection, held)
            await release_deletions(connection, _only(held, kept), held_until=until)
            unneeded = _without(held, kept)
            generations = await find_generations(connection, unneeded)
        return await self._delete_all(unneeded, generations, held_until=until)

    async def learn_generations(self, digests: Sequence[Digest]) -> set[Digest]:
        """Read the generations of blobs, which any server may increment. Return the blobs whose
        generation was new here.
        """
        known = await find_generations(self.database, digests)
        return {
            each for each in digests if self.blobs.use_generation(each, known.get(each.sha256, 0))
        }

    async def _delete_all(
        self, digests: Sequence[Digest], generations: Mapping[str, int], *, held_until: datetime
    ) -> "_Deleted":
        """Delete blobs that this server has just claimed, and remove their marks.

        If the store fails for a blob, the claim stays, because the store may still delete the blob.
        The timeout ends each call before the claim ends, even if the call waits for a thread of the
        store. If this process was frozen and its claims ended, the marks stay.
        """
        deleted: list[Digest] = []
        retried: list[Digest] = []  # deleted, but an earlier request may still delete that name
        failure: ServerError | None = None
        late: Sequence[Digest] = ()
        for number, digest in enumerate(digests):
            if self.clock() + timedelta(seconds=_DELETE_SECONDS) > held_until:
                late = digests[number:]
                break
            generation = generations.get(digest.sha256, 0)
            try:
                async with asyncio.timeout(_DELETE_SECONDS):
                    is_final = await self.blobs.delete(digest, generation=generation)
            except TimeoutError:
                failure = _not_deleted(digest, f" within {_DELETE_SECONDS:g} s")
            except ServerError as error:
                failure = error
            else:
                deleted.append(digest)
                retried += [] if is_final else [digest]
        if deleted:
            async with self.database.writing() as connection:
                await end_deletions(connection, deleted, retried=retried, held_until=held_until)
        if not late:
            return _Deleted(deleted, failure)
        if late == digests:
            return _Deleted((), _not_deleted(late[0], ": its claim ended before"))
        # The store was slow. Renew the remaining claims.
        others = await self._collect_claimed(late, held_until=held_until)
        return _Deleted([*deleted, *others.digests], others.failure or failure)


class _Deleted(NamedTuple):
    """The deleted blobs, and the last failure for the other blobs."""

    digests: Sequence[Digest]
    failure: ServerError | None


def _not_deleted(digest: Digest, why: str) -> ServerError:
    return ServerError(ErrorCode.UNAVAILABLE, f"blob {digest} was not deleted{why}")


def _only(digests: Sequence[Digest], names: Collection[str]) -> list[Digest]:
    return [digest for digest in digests if digest.sha256 in names]


def _without(digests: Sequence[Digest], names: Collection[str]) -> list[Digest]:
    return [digest for digest in digests if digest.sha256 not in names]
