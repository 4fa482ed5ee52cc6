"""Allocator: decides whether new bytes fit within the limits, and evicts artifacts to make room.

An announced size evicts nothing. Before the first byte, `check` refuses only an upload that would
not fit even after evicting everything evictable. Room is taken as bytes arrive, up to 16 MiB ahead.

Eviction starts in the writer's own namespace. For the limit of the store or for a full disk, it
continues in the other namespaces. Artifacts that a look-up found recently go last. Pinned and
withheld artifacts stay.

Each process counts the room of its own uploads. Uploads of other processes count once committed, so
concurrent uploads may exceed a limit by their size.
"""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from graphstash_schema import Namespace
from graphstash_server.actor import Actor
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.deletions import pending_bytes
from graphstash_server.db.queries.eviction import kept_bytes
from graphstash_server.db.queries.usage import stored_bytes
from graphstash_server.errors import NoSpaceError
from graphstash_server.services.artifacts.blobs import BlobCollector
from graphstash_server.services.artifacts.doubts import LimitDoubts
from graphstash_server.services.artifacts.eviction import Evictor
from graphstash_server.services.namespaces import Budgets, PolicyService
from graphstash_server.storage.base import CHUNK_BYTES, BlobStore

__all__ = ["Allocation", "Allocator"]

_LOGGER = logging.getLogger(__name__)

_ATTEMPTS = 4
"""Attempts to make room. Other writers, and a database on the same disk, may take it first."""

_PATIENCE_SECONDS = 5.0
"""Seconds to wait for other servers to delete blobs, before this server evicts more artifacts."""

_MAX_STEP_BYTES = 16 * CHUNK_BYTES


@dataclass(slots=True)
class Allocation:
    """Room that one upload or one manifest needs, and has taken so far.

    Attributes:
        namespace: namespace of the artifact or manifest.
        blob_bytes: size of the blob.
        row_bytes: bytes of database rows that count against the limits.
        actor: caller that stores it, and that the audit log names for evictions.
        taken_bytes: bytes taken so far, of blob and rows.
        step_bytes: bytes taken last, which may not be on the disk yet.
    """

    namespace: Namespace
    blob_bytes: int
    row_bytes: int
    actor: Actor
    taken_bytes: int = 0
    step_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Total bytes that count against the limits."""
        return self.blob_bytes + self.row_bytes


class _Excess(NamedTuple):
    """An exceeded limit of a namespace or, if `namespace` is None, of the store or its disk.

    `size_bytes` is the excess that evictions must remove. It is negative if the blobs being deleted
    already make enough room. `reason` is for the audit log.
    """

    namespace: Namespace | None
    size_bytes: int
    refusal: NoSpaceError
    reason: str


@dataclass(kw_only=True, eq=False)
class Allocator:
    """Track the room that uploads of this process have taken, and evict to make room."""

    database: Database
    blobs: BlobStore
    collector: BlobCollector
    evictor: Evictor
    budgets: Budgets
    limit_doubts: LimitDoubts
    policies: PolicyService
    clock: Clock

    def __post_init__(self) -> None:
        self._taken: Counter[Namespace] = Counter()
        self._unwritten_bytes = 0

    async def check(self, allocation: Allocation) -> None:
        """Raise if an upload would not fit even after evicting everything evictable. Evict nothing.

        Raises:
            NoSpaceError: too much cannot be evicted, or a hard limit is doubtful (`LimitDoubts`).
        """
        for excess in await self._excesses(
            allocation, ahead_bytes=allocation.size_bytes - allocation.taken_bytes
        ):
            async with self.database.reading() as connection:
                stored = await stored_bytes(connection, excess.namespace)
                kept = await kept_bytes(connection, namespace=excess.namespace, now=self.clock())
            if excess.size_bytes > stored - kept:
                raise excess.refusal

    @contextmanager
    def releasing(self, allocation: Allocation) -> Iterator[None]:
        """Release the taken room: the database counts the artifact, or the upload failed."""
        try:
            yield
        finally:
            self._taken[allocation.namespace] -= allocation.taken_bytes
            if not self._taken[allocation.namespace]:
                del self._taken[allocation.namespace]
            self._unwritten_bytes -= allocation.step_bytes

    async def admit_chunks(
        self, allocation: Allocation, chunks: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """Pass on the bytes of a blob once they have room.

        A query for every chunk would cost more than its bytes. So chunks wait until more than 1 MiB
        has no room. Then room is taken for all arrived bytes and as many again, up to 16 MiB ahead.

        Raises:
            NoSpaceError: see `check`. Evictions are not undone.
        """
        waiting: list[bytes] = []
        arrived = passable = 0
        async for chunk in chunks:
            arrived += len(chunk)
            waiting.append(chunk)
            if passable < arrived <= passable + CHUNK_BYTES:
                continue
            if arrived > passable:
                ahead = min(arrived, _MAX_STEP_BYTES)
                passable = min(arrived + ahead, max(allocation.blob_bytes, arrived))
                await self.take(allocation, allocation.row_bytes + passable)
            for each in waiting:
                yield each
            waiting = []
        await self.take(allocation, allocation.row_bytes + arrived)
        for each in waiting:
            yield each

    async def take(self, allocation: Allocation, size_bytes: int) -> None:
        """Raise the room taken to `size_bytes` in total. Evict artifacts if necessary.

        Raises:
            NoSpaceError: see `check`.
        """
        more_bytes = size_bytes - allocation.taken_bytes
        if more_bytes <= 0:
            return
        self._taken[allocation.namespace] += more_bytes
        self._unwritten_bytes += more_bytes - allocation.step_bytes
        allocation.taken_bytes, allocation.step_bytes = size_bytes, more_bytes
        excesses = await self._excesses(allocation)
        for _ in range(_ATTEMPTS):
            if not excesses:
                return
            await self.check(allocation)
            for excess in excesses:
                await self._make_room(allocation, excess)
            excesses = await self._excesses(allocation)
        if excesses:
            raise excesses[0].refusal

    async def _excesses(self, allocation: Allocation, *, ahead_bytes: int = 0) -> list[_Excess]:
        """Return the limits that stored and taken bytes, and `ahead_bytes` more, would exceed. Set
        the evictor's `is_needed` if stored and taken bytes exceed a soft limit.
        """
        namespace, store = allocation.namespace, self.budgets.store
        limits = await self.policies.limits()
        budget = self.budgets.of(namespace, limits)
        full = await self.blobs.full(self._unwritten_bytes + ahead_bytes)
        if budget.is_none and store.is_none and full is None:
            return []
        # Read these before the query: an upload that commits in between is counted twice, but never
        # missed. A writer that takes room later counts the room of this upload.
        taken, own_taken = self._taken.total(), self._taken[namespace]
        async with self.database.reading() as connection:
            stored = await stored_bytes(connection) + taken
            own = await stored_bytes(connection, namespace) + own_taken
            pending = await pending_bytes(connection)
        doubts = await self.limit_doubts.about(
            {namespace: own - own_taken, None: stored - taken}, limits
        )
        for name, doubt in doubts.items():
            if (store if name is None else budget).hard_bytes is not None:
                raise NoSpaceError(f"{doubt}. Until then, uploads are refused")
        if not doubts and (store.exceeds_soft_limit(stored) or budget.exceeds_soft_limit(own)):
            self.evictor.is_needed.set()
        found = []
        if budget.hard_bytes is not None and own + ahead_bytes > budget.hard_bytes:
            refusal = _refusal(allocation, f"the namespace {namespace}", budget.hard_bytes)
            excess_bytes = own + ahead_bytes - budget.hard_bytes
            found.append(_Excess(namespace, excess_bytes, refusal, "over the namespace's limit"))
        if store.hard_bytes is not None and stored + pending + ahead_bytes > store.hard_bytes:
            refusal = _refusal(allocation, "the store", store.hard_bytes)
            excess_bytes = stored + ahead_bytes - store.hard_bytes
            found.append(_Excess(None, excess_bytes, refusal, "over the store's limit"))
        if full is not None and full.missing_bytes is not None:
            found.append(_Excess(None, full.missing_bytes - pending, full, "the disk is full"))
        return found

    async def _make_room(self, allocation: Allocation, excess: _Excess) -> None:
        """Evict until one exceeded limit is met, or nothing more can be evicted."""
        async with self.database.reading() as connection:
            goal_bytes = max(
                await stored_bytes(connection, excess.namespace) - excess.size_bytes, 0
            )
        evicted = await self._evict(allocation, excess, goal_bytes)
        if excess.namespace is not None:
            return
        await self.collector.collect_marked()
        # Blobs that others are deleting still take room. If they stay, because their server died,
        # evict more artifacts.
        pending = await self.collector.wait_for_deletions(_PATIENCE_SECONDS)
        if pending:
            evicted += await self._evict(allocation, excess, max(goal_bytes - pending, 0))
            await self.collector.collect_marked()
        if evicted:
            _LOGGER.info("the store is full: evicted %d artifacts for an upload", evicted)

    async def _evict(self, allocation: Allocation, excess: _Excess, goal_bytes: int) -> int:
        evicted = 0
        own = allocation.namespace
        for evicted_from in (own,) if excess.namespace is not None else (own, None):
            for spares_looked_up in (True, False):
                evicted += await self.evictor.shrink(
                    excess.namespace,
                    goal_bytes=goal_bytes,
                    actor=allocation.actor,
                    reason=excess.reason,
                    evicted_from=evicted_from,
                    spares_looked_up=spares_looked_up,
                )
        return evicted


def _refusal(allocation: Allocation, where: str, limit_bytes: int) -> NoSpaceError:
    """Return the error, without the size of the store: callers of one namespace must not get it."""
    return NoSpaceError(
        f"{allocation.size_bytes} bytes are to be stored, {where} takes at most {limit_bytes}, and "
        "not enough can be evicted: unpin or delete artifacts, or raise the limit "
        "(GRAPHSTASH_STORE_LIMIT_BYTES, GRAPHSTASH_NAMESPACE_LIMIT_BYTES, graphstash namespace set "
        "--limit)",
        limit=limit_bytes,
    )
