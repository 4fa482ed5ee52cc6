"""Evictor: keeps the store and the namespaces within their limits, least valuable artifacts first.

One transaction chooses, counts and removes a page. It locks the exceeded limit, so that two servers
never evict for the same excess. It removes artifacts of one namespace only, so that a server that
freezes in it blocks no writes to other namespaces of a PostgreSQL database.

The audit log has the reason of each eviction, and the caller that needed the space. The servers
delete the blobs later (`BlobCollector.collect_marked`).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import AuditAction
from graphstash_server.actor import Actor
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.audit import AuditRecord, add_audit
from graphstash_server.db.queries.eviction import (
    Candidate,
    evict_artifacts,
    list_least_valuable,
)
from graphstash_server.db.queries.locks import lock_name
from graphstash_server.db.queries.usage import list_stored, stored_bytes
from graphstash_server.services.artifacts.doubts import NOTHING_FREED, LimitDoubts
from graphstash_server.services.artifacts.service import ArtifactService
from graphstash_server.services.namespaces import Budgets, PolicyService

__all__ = ["OVER_SOFT_LIMIT", "Evictor", "Planned"]

_LOGGER = logging.getLogger(__name__)

OVER_SOFT_LIMIT: Final = "over the soft limit"
"""Reason that `Evictor.run` gives in the audit log."""

_PAGE = 200
"""Artifacts per transaction. It blocks SQLite's other writers for a few milliseconds."""


class Planned:
    """The artifacts of a dry run, as hashes, because there may be a million. `freed_bytes` has the
    bytes that their eviction frees in each namespace and in the store (None).
    """

    def __init__(self) -> None:
        self.freed_bytes: Counter[str | None] = Counter()
        self._hashes: set[int] = set()

    def add(self, candidate: Candidate) -> bool:
        """Add an artifact. Return False if it was added before."""
        if (number := hash(candidate.key.columns)) in self._hashes:
            return False
        self._hashes.add(number)
        for where in (candidate.key.namespace, None):
            self.freed_bytes[where] += candidate.cost_bytes
        return True


@dataclass(kw_only=True, eq=False)
class Evictor:
    """Evict artifacts. An upload that exceeds a soft limit sets `is_needed`, and the maintenance
    clears it.
    """

    database: Database
    budgets: Budgets
    policies: PolicyService
    artifacts: ArtifactService
    limit_doubts: LimitDoubts
    clock: Clock
    plausible_clock: Clock

    def __post_init__(self) -> None:
        self.is_needed = asyncio.Event()

    async def run(self, *, actor: Actor, is_confirmed: bool = False) -> int:
        """Evict until no soft limit is exceeded. Return the number of artifacts. Ignore doubtful
        limits (`LimitDoubts`) unless an operator has confirmed them.
        """
        evicted = 0
        for namespace, goal_bytes in await self.find_exceeded(is_confirmed=is_confirmed):
            evicted += await self.shrink(
                namespace, goal_bytes=goal_bytes, actor=actor, reason=OVER_SOFT_LIMIT
            )
        if evicted:
            _LOGGER.info("evicted %d artifacts", evicted)
        return evicted

    async def plan(
        self, *, is_confirmed: bool = False, planned: "Planned | None" = None
    ) -> AsyncIterator[Candidate]:
        """Yield what `run` would evict now: first for the namespaces, then for the store. Treat the
        artifacts in `planned` as evicted, and add the yielded ones to it.
        """
        planned = planned or Planned()
        for namespace, goal_bytes in await self.find_exceeded(
            is_confirmed=is_confirmed, freed_bytes=planned.freed_bytes
        ):
            async with self.database.reading() as connection:
                excess = await stored_bytes(connection, namespace) - goal_bytes
            excess -= planned.freed_bytes[namespace]
            after = None
            while excess > 0:
                async with self.database.reading() as connection:
                    page = await list_least_valuable(
                        connection,
                        namespace=namespace,
                        now=self.plausible_clock(),
                        limit=_PAGE,
                        after=after,
                    )
                for candidate in page:
                    if excess > 0 and planned.add(candidate):
                        excess -= candidate.cost_bytes
                        yield candidate
                if len(page) < _PAGE:
                    break
                after = page[-1]

    async def evict(self, chosen: Sequence[Candidate], *, actor: Actor, reason: str) -> int:
        """Evict artifacts that were chosen for a reason other than space. Return their number."""
        evicted = 0
        for page in _by_namespace(chosen):
            async with self.database.writing() as connection:
                gone = await evict_artifacts(connection, page, now=self.plausible_clock())
                await self._log(connection, gone, actor=actor, reason=reason)
            self._forget(gone)
            evicted += len(gone)
        return evicted

    async def find_exceeded(
        self, *, is_confirmed: bool, freed_bytes: Mapping[str | None, int] = NOTHING_FREED
    ) -> list[tuple[str | None, int]]:
        """Return each namespace (None: the store) that exceeds its soft limit even without the
        `freed_bytes`, and the size to reach.
        """
        limits = await self.policies.limits()
        stored = await list_stored(self.database)
        sizes: dict[str | None, int] = dict(map(tuple, stored))
        budgets = {name: self.budgets.of(name or "", limits) for name in sizes}
        budgets[None] = self.budgets.store  # last, because evictions in namespaces shrink it
        sizes[None] = sum(sizes.values())
        exceeded = {
            name: of
            for name, of in budgets.items()
            if of.exceeds_soft_limit(sizes[name] - freed_bytes.get(name, 0))
        }
        doubts = {} if is_confirmed else await self.limit_doubts.about(sizes, limits, freed_bytes)
        for doubt in doubts.values():
            _LOGGER.warning("%s", doubt)
        return [(name, of.goal_bytes or 0) for name, of in exceeded.items() if name not in doubts]

    async def shrink(
        self,
        measured: str | None,
        *,
        goal_bytes: int,
        actor: Actor,
        reason: str,
        evicted_from: str | None = None,
        spares_looked_up: bool = True,
    ) -> int:
        """Evict by pages until a namespace (None: the store) has at most `goal_bytes`. Return the
        number of artifacts.

        Evict only from the namespace `evicted_from`, by default `measured`. Spare artifacts that a
        recent look-up found, or evict only these if `spares_looked_up` is False. The audit log
        stores `actor`, the caller that needs the space, and `reason`.
        """
        evicted = 0
        while True:
            async with self.database.writing() as connection:
                await lock_name(connection, f"eviction {measured or ''}")
                excess = await stored_bytes(connection, measured) - goal_bytes
                if excess <= 0:
                    return evicted
                now = self.plausible_clock()
                page = await list_least_valuable(
                    connection,
                    namespace=evicted_from or measured,
                    now=now,
                    limit=_PAGE,
                    spares_looked_up=spares_looked_up,
                )
                chosen = next(iter(_by_namespace(_enough(page, excess))), [])
                gone = await evict_artifacts(
                    connection, chosen, now=now, spares_looked_up=spares_looked_up
                )
                await self._log(connection, gone, actor=actor, reason=reason)
            self._forget(gone)
            evicted += len(gone)
            if not gone:
                return evicted

    def _forget(self, gone: Sequence[Candidate]) -> None:
        """Stop serving evicted artifacts from memory."""
        for candidate in gone:
            self.artifacts.forget(candidate.key)

    async def _log(
        self,
        connection: AsyncConnection,
        gone: Sequence[Candidate],
        *,
        actor: Actor,
        reason: str,
    ) -> None:
        now = self.clock()
        await add_audit(
            connection,
            [
                AuditRecord.of_artifact(
                    now, actor, AuditAction.EVICT, each.key, f"{reason} {each.digest}"
                )
                for each in gone
            ],
        )


def _enough(page: Sequence[Candidate], excess_bytes: int) -> list[Candidate]:
    chosen = []
    for candidate in page:
        if excess_bytes <= 0:
            break
        chosen.append(candidate)
        excess_bytes -= candidate.cost_bytes
    return chosen


def _by_namespace(chosen: Sequence[Candidate]) -> list[list[Candidate]]:
    found: dict[str, list[Candidate]] = {}
    for candidate in chosen:
        found.setdefault(candidate.key.namespace, []).append(candidate)
    return list(found.values())
