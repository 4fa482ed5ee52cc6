"""Maintenance: periodic work of a server.

All servers of a database share the work. Evictions take turns with a lock, a server claims marked
blobs before it deletes them, and one server claims each chore that is due. Chores compare stored
times with the clock, so none is due while the clock is doubtful (`services.plausible_clock`).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from typing import NamedTuple, Protocol

from graphstash_server.actor import Actor
from graphstash_server.clock import jitter
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.eviction import (
    Candidate,
    list_of_toolchain,
    list_toolchains,
    list_unused,
    renew_uses,
)
from graphstash_server.db.queries.locks import claim_chore
from graphstash_server.errors import CorruptDatabaseError, ServerError
from graphstash_server.services.artifacts.blobs import BlobCollector
from graphstash_server.services.artifacts.eviction import Evictor
from graphstash_server.services.artifacts.explanations import ExplanationService
from graphstash_server.services.artifacts.withdrawals import WithdrawalService
from graphstash_server.services.history import HistoryService
from graphstash_server.services.identity.audit import AuditService
from graphstash_server.services.identity.tokens import TokenService
from graphstash_server.services.jobs.manifests import ManifestService
from graphstash_server.services.jobs.runs import RunService
from graphstash_server.services.maintenance.reconciler import Reconciler
from graphstash_server.services.plausible_clock import PlausibleClock

__all__ = ["Candidate", "Maintenance", "RetentionService"]

_LOGGER = logging.getLogger(__name__)

_PAGE = 200

_ORPHAN_AGE = timedelta(hours=1)
"""Minimum age of an orphan to delete. An upload stores its blob and commits its row much faster."""

_FAILED_SECONDS = 1.0
"""Seconds to wait after a failed round. A corrupt database fails each call at once, so without a
pause, uploads that need evictions would make the rounds block the event loop."""

_HOURLY = timedelta(hours=1)
_DAILY = timedelta(days=1)
_RETRY = timedelta(minutes=5)
"""Time before a retry of a failed chore. Some chores read all rows and blobs before they fail."""


@dataclass(kw_only=True, eq=False)
class RetentionService:
    """Find artifacts to evict by age or toolchain, among those that may be evicted now."""

    database: Database
    clock: PlausibleClock

    async def unused(
        self, longer_than: timedelta, *, namespace: str | None = None
    ) -> AsyncIterator[list[Candidate]]:
        """Yield pages of artifacts that were unused for longer, longest unused first."""
        find = partial(list_unused, before=self.clock.ago(longer_than), namespace=namespace)
        async for page in self._pages(find):
            yield page

    async def outdated(self, keep: int) -> AsyncIterator[list[Candidate]]:
        """Yield pages of artifacts of all but the `keep` most recently used toolchains of each
        namespace and kind. Artifacts without a toolchain stay.
        """
        async with self.database.reading() as connection:
            toolchains = await list_toolchains(connection)
        for _, group in groupby(toolchains, key=lambda each: (each.namespace, each.kind)):
            known = [toolchain for toolchain in group if toolchain.toolchain]
            for toolchain in known[keep:]:
                async for page in self._pages(partial(list_of_toolchain, wanted=toolchain)):
                    yield page

    async def of_toolchains(
        self, pattern: str, *, namespace: str | None = None
    ) -> AsyncIterator[list[Candidate]]:
        """Yield pages of artifacts whose toolchain matches a pattern (`*torch 2.6*`)."""
        async with self.database.reading() as connection:
            toolchains = await list_toolchains(connection)
        for toolchain in toolchains:
            is_included = namespace is None or toolchain.namespace == namespace
            if is_included and fnmatchcase(toolchain.toolchain, pattern):
                async for page in self._pages(partial(list_of_toolchain, wanted=toolchain)):
                    yield page

    async def _pages(
        self, find: "Callable[..., Awaitable[list[Candidate]]]"
    ) -> AsyncIterator[list[Candidate]]:
        after = None
        while True:
            async with self.database.reading() as connection:
                page = await find(connection, now=self.clock(), limit=_PAGE, after=after)
            if page:
                yield page
            if len(page) < _PAGE:
                return
            after = page[-1]


class _Failed(NamedTuple):
    """A chore that failed on this server: the end of its claim, and when to try again."""

    held_until: datetime
    retry_at: datetime


class RegionalChores(Protocol):
    """What a server with an upstream does in addition (`upstream.region`)."""

    async def evict_set_aside(self) -> None: ...

    async def drop_differing(self) -> None: ...


@dataclass(kw_only=True, eq=False)
class Maintenance:
    """Run in the background. Cancelling it loses nothing."""

    database: Database
    collector: BlobCollector
    evictor: Evictor
    retention: RetentionService
    reconciler: Reconciler
    withdrawals: WithdrawalService
    manifests: ManifestService
    explanations: ExplanationService
    history: HistoryService
    runs: RunService
    audit: AuditService
    tokens: TokenService
    clock: PlausibleClock
    unused_longer_than: timedelta | None
    toolchains_kept: int | None
    audit_kept_for: timedelta
    region: RegionalChores | None

    def __post_init__(self) -> None:
        self._failed: dict[str, _Failed] = {}

    async def run(self, *, every_seconds: float, started_at: datetime, was_alone: bool) -> None:
        """Run a round every `every_seconds` on average, or when an upload exceeds a soft limit,
        until cancelled. Log a failed round.

        With `was_alone`, no other server used the data directory at `started_at`, so a crash left
        each older blob without an artifact. They are deleted first.
        """
        if was_alone:
            await self._try("cleaning up", self.reconciler.reconcile(blobs_before=started_at))
        while True:
            if not await self._try("maintenance", self.run_once()):
                await asyncio.sleep(_FAILED_SECONDS)
            pause = every_seconds * (0.5 + jitter())
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self.evictor.is_needed.wait()
            self.evictor.is_needed.clear()

    async def run_once(self) -> None:
        """Run one round. Log a step or chore that fails, and run the others."""
        is_plausible = await self.clock.observe()
        await self._renew_uses()
        await self._try("eviction", self.evictor.run(actor=Actor.server()))
        await self._try("deleting blobs", self.collector.collect_marked())
        if not is_plausible:
            return
        await self._do("drop old leases", _HOURLY, self.reconciler.drop_old_leases)
        await self._do("drop old withdrawals", _HOURLY, self.withdrawals.prune)
        await self._do("drop unused manifests", _HOURLY, self.manifests.drop_unused)
        await self._do("drop unused environments", _HOURLY, self.explanations.drop_unused)
        await self._do("drop old history and runs", _HOURLY, self._drop_old)
        await self._do("retention", _HOURLY, self.retain)
        if self.region is not None:
            await self._do("evict copies set aside", _HOURLY, self.region.evict_set_aside)
            await self._do("drop copies that differ", _DAILY, self.region.drop_differing)
        await self._do("prune the audit log", _HOURLY, self._prune)
        await self._do("look for absent blobs again", _HOURLY, self.reconciler.look_again)
        await self._do("compare rows and blobs", _DAILY, self._compare)

    async def retain(self) -> int:
        """Evict the artifacts that retention chooses. Return their number."""
        evicted = 0
        async for page in self.find_retired():
            evicted += await self.evictor.evict(page, actor=Actor.server(), reason="retention")
        if evicted:
            _LOGGER.info("evicted %d artifacts by age or toolchain", evicted)
            await self.collector.collect_marked()
        return evicted

    async def find_retired(self) -> AsyncIterator[list[Candidate]]:
        """Yield pages of the artifacts that retention chooses."""
        if self.unused_longer_than is not None:
            async for page in self.retention.unused(self.unused_longer_than):
                yield page
        if self.toolchains_kept is not None:
            async for page in self.retention.outdated(self.toolchains_kept):
                yield page

    async def _renew_uses(self) -> None:
        """Set uses during the clock's last suspension to its end. Retention does so when it reads
        them (`PlausibleClock.ago`), but the order of eviction needs stored times.
        """
        gap = self.clock.last_gap
        renewed = _PAGE
        while gap is not None and renewed == _PAGE:
            since, until = gap
            async with self.database.writing() as connection:
                renewed = await renew_uses(connection, since=since, until=until, limit=_PAGE)

    async def _drop_old(self) -> None:
        await self.history.drop_old(ago=self.clock.ago)
        await self.runs.drop_old(ago=self.clock.ago)

    async def _prune(self) -> None:
        await self.audit.prune(older_than=self.clock.ago(self.audit_kept_for))
        await self.tokens.forget_ended(ago=self.clock.ago, kept_for=self.audit_kept_for)

    async def _compare(self) -> None:
        await self.reconciler.reconcile(blobs_before=self.clock.ago(_ORPHAN_AGE))
        await self.database.update_statistics()

    async def _do(
        self, chore: str, every: timedelta, work: Callable[[], Awaitable[object]]
    ) -> None:
        """Do a chore if it is due and no other server does it. After a failure, this server tries
        again in a round after `_RETRY`.
        """
        now = self.clock()
        failed = self._failed.get(chore)
        if failed is not None and now < failed.retry_at:
            return
        async with self.database.writing() as connection:
            is_due = await claim_chore(
                connection, chore, now=now, every=every, held_until=failed and failed.held_until
            )
        self._failed.pop(chore, None)
        if is_due and not await self._try(chore, work()):
            self._failed[chore] = _Failed(now + every, self.clock() + _RETRY)

    async def _try(self, what: str, work: Awaitable[object]) -> bool:
        """Await work and log its failure, because the server can still serve. Return whether it
        succeeded.
        """
        try:
            await work
        except CorruptDatabaseError:
            _LOGGER.debug("%s: the database is corrupt", what)  # already logged
        except ServerError as error:
            _LOGGER.warning("%s stopped and will be retried: %s", what, error)
        except Exception:
            _LOGGER.exception("%s failed and will be retried", what)
        else:
            return True
        return False
