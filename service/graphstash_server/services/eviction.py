"""Evictor: keeps the store and the namespaces within their budgets, least value first.

One eviction runs at a time, whatever the number of servers: each page is chosen, counted and
removed in one transaction under one lock, so that two servers never evict for the same excess. The
blobs go afterwards (`BlobKeeper.collect_marked`), on all servers side by side.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence

from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.deletions import pending_bytes
from graphstash_server.db.queries.eviction import (
    Candidate,
    evict_artifacts,
    list_least_valuable,
)
from graphstash_server.db.queries.locks import lock_name
from graphstash_server.db.queries.usage import list_usage, stored_bytes
from graphstash_server.errors import NoSpaceError
from graphstash_server.services.blobs import BlobKeeper
from graphstash_server.services.budget import Budget, Budgets
from graphstash_server.services.policies import PolicyService

__all__ = ["Evictor"]

_LOGGER = logging.getLogger(__name__)

_ATTEMPTS = 3
"""At room for one upload, while others come and go."""

_PATIENCE_SECONDS = 1.0

_PAGE = 200
"""Artifacts of one transaction: a few milliseconds in which SQLite takes no other writer."""


class Evictor:
    """Used from the event loop only.

    Attributes:
        is_needed: set when an upload passed a soft limit.
    """

    def __init__(
        self,
        *,
        database: Database,
        keeper: BlobKeeper,
        budgets: Budgets,
        policies: PolicyService,
        clock: Clock,
    ) -> None:
        self.is_needed = asyncio.Event()
        self._database = database
        self._keeper = keeper
        self._budgets = budgets
        self._policies = policies
        self._clock = clock

    async def ensure_room(self, namespace: str, size_bytes: int) -> None:
        """Before an upload: evicts what is needed to stay below the hard limits.

        Other processes' uploads under way are not seen; the limit may be passed by these.

        Raises:
            NoSpaceError: when even that is not enough: too much is pinned, or it is too large.
        """
        budget = self._budgets.of(namespace, await self._policies.limits())
        if budget.is_none and self._budgets.store.is_none:
            return
        over = await self._over(namespace, size_bytes, budget)
        for _ in range(_ATTEMPTS):
            if over is None:
                return
            await self._make_room(namespace, size_bytes, budget)
            over = await self._over(namespace, size_bytes, budget)
        if over is not None:
            raise over

    async def free(self, size_bytes: int) -> bool:
        """Evicts artifacts of so many bytes because the disk is full; False when there are none.

        When all of them would not be enough, somebody else filled the disk, and they stay.
        """
        async with self._database.reading() as connection:
            goal = await stored_bytes(connection) - size_bytes
        if goal < 0:
            return False
        evicted = await self._shrink(None, goal_bytes=goal)
        await self._keeper.collect_marked()
        if evicted:
            _LOGGER.warning("the disk is full: %d artifacts were evicted for an upload", evicted)
        return evicted > 0

    async def run(self) -> int:
        """Evicts until every soft limit is kept; says how many artifacts.

        Raises:
            ServerError: 503.
        """
        self.is_needed.clear()
        evicted = 0
        for namespace, goal_bytes in await self._passed():
            evicted += await self._shrink(namespace, goal_bytes=goal_bytes)
        if evicted:
            _LOGGER.info("%d artifacts were evicted", evicted)
        return evicted

    async def plan(self) -> AsyncIterator[Candidate]:
        """What `run` would evict now, the namespaces' before the store's."""
        freed_bytes = 0
        last: dict[str, Candidate] = {}
        for namespace, goal_bytes in await self._passed():
            async with self._database.reading() as connection:
                excess = await stored_bytes(connection, namespace) - goal_bytes
            if namespace is None:
                excess -= freed_bytes
            after = None
            while excess > 0:
                async with self._database.reading() as connection:
                    page = await list_least_valuable(
                        connection, namespace=namespace, now=self._clock(), limit=_PAGE, after=after
                    )
                fresh = [each for each in page if not _is_planned(each, last)]
                for candidate in _enough(fresh, excess):
                    excess -= candidate.digest.size_bytes
                    if namespace is not None:
                        freed_bytes += candidate.digest.size_bytes
                        last[namespace] = candidate
                    yield candidate
                if len(page) < _PAGE:
                    break
                after = page[-1]

    async def evict(self, chosen: Sequence[Candidate]) -> int:
        """Evicts artifacts that were chosen for another reason than room; says how many."""
        async with self._database.writing() as connection:
            return len(await evict_artifacts(connection, chosen, now=self._clock()))

    async def _over(self, namespace: str, size_bytes: int, budget: Budget) -> NoSpaceError | None:
        """What an upload would pass; notes when it is time to evict."""
        keeper = self._keeper
        under_way, begun = keeper.uploading_bytes(), keeper.begun_bytes()
        own_under_way, own_begun = keeper.uploading_bytes(namespace), keeper.begun_bytes(namespace)
        async with self._database.reading() as connection:
            stored = await stored_bytes(connection) + size_bytes
            own = await stored_bytes(connection, namespace) + size_bytes
            pending = await pending_bytes(connection)
        # What was under way before the database was asked, or began since. An upload that was
        # committed in between is counted twice, and none is missed. From here to the begin of this
        # one nothing is awaited: no other can slip in.
        stored += under_way + keeper.begun_bytes() - begun
        own += own_under_way + keeper.begun_bytes(namespace) - own_begun
        if self._budgets.store.is_passed_softly(stored) or budget.is_passed_softly(own):
            self.is_needed.set()
        if self._budgets.store.is_passed(stored + pending):
            return _refusal(
                size_bytes, "the store", stored - size_bytes, self._budgets.store.hard_bytes
            )
        if budget.is_passed(own):
            where = f"the namespace {namespace}"
            return _refusal(size_bytes, where, own - size_bytes, budget.hard_bytes)
        return None

    async def _make_room(self, namespace: str, size_bytes: int, budget: Budget) -> None:
        """Evicts for one upload. One that would never fit drives nobody out."""
        own, store = budget.hard_bytes, self._budgets.store.hard_bytes
        if any(limit is not None and limit < size_bytes for limit in (own, store)):
            return
        if own is not None:
            own_room_bytes = own - self._keeper.uploading_bytes(namespace) - size_bytes
            await self._shrink(namespace, goal_bytes=max(own_room_bytes, 0))
        if store is None:
            return
        room_bytes = max(store - self._keeper.uploading_bytes() - size_bytes, 0)
        await self._shrink(None, goal_bytes=room_bytes)
        await self._keeper.collect_marked()
        # What other servers are deleting counts until it is gone. If it does not go, because they
        # died at it, something else has to.
        pending = await self._keeper.pending_bytes(patience_seconds=_PATIENCE_SECONDS)
        if pending:
            await self._shrink(None, goal_bytes=max(room_bytes - pending, 0))
            await self._keeper.collect_marked()

    async def _passed(self) -> list[tuple[str | None, int]]:
        """Namespaces, or None for the whole store, above their soft limit, and how far to go."""
        limits = await self._policies.limits()
        async with self._database.reading() as connection:
            usage = await list_usage(connection)
        sizes: dict[str | None, int] = {each.namespace: each.size_bytes for each in usage}
        budgets = {name: self._budgets.of(name or "", limits) for name in sizes}
        budgets[None] = self._budgets.store  # last: what the namespaces free counts for it
        sizes[None] = sum(sizes.values())
        return [
            (name, budget.goal_bytes or 0)
            for name, budget in budgets.items()
            if budget.is_passed_softly(sizes[name])
        ]

    async def _shrink(self, namespace: str | None, *, goal_bytes: int) -> int:
        """Evicts, a page at a time, until no more than the goal is left; says how many."""
        evicted = 0
        while True:
            async with self._database.writing() as connection:
                await lock_name(connection, "eviction")
                excess = await stored_bytes(connection, namespace) - goal_bytes
                if excess <= 0:
                    return evicted
                now = self._clock()
                page = await list_least_valuable(
                    connection, namespace=namespace, now=now, limit=_PAGE
                )
                chosen = _enough(page, excess)
                gone = await evict_artifacts(connection, chosen, now=now)
            evicted += len(gone)
            if not gone:
                return evicted


def _enough(page: Sequence[Candidate], excess_bytes: int) -> list[Candidate]:
    """The first of them that have so many bytes together."""
    chosen = []
    for candidate in page:
        if excess_bytes <= 0:
            break
        chosen.append(candidate)
        excess_bytes -= candidate.digest.size_bytes
    return chosen


def _is_planned(candidate: Candidate, last: Mapping[str, Candidate]) -> bool:
    """Whether its namespace has to evict it already: all up to the last one there."""
    end = last.get(candidate.key.namespace)
    return end is not None and (candidate.rank, candidate.key.columns) <= (
        end.rank,
        end.key.columns,
    )


def _refusal(size_bytes: int, where: str, used_bytes: int, limit_bytes: int | None) -> NoSpaceError:
    return NoSpaceError(
        f"the artifact has {size_bytes} bytes, {where} has {used_bytes} of at most {limit_bytes} "
        "and nothing more can be evicted: unpin or delete artifacts, or raise the limit "
        "(GRAPHSTASH_STORE_LIMIT_BYTES, GRAPHSTASH_NAMESPACE_LIMIT_BYTES, graphstash namespace "
        "set --limit)",
        limit=limit_bytes,
    )
