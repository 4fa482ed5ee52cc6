"""Maintenance: what a server does by itself beside serving.

Every server does it, and none does what another one is at: evictions queue for one lock, marked
blobs are claimed, and a chore is done by whoever claims it when it is due.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime, timedelta

from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.chores import claim_chore
from graphstash_server.db.queries.eviction import Candidate
from graphstash_server.errors import ServerError
from graphstash_server.services.audit import AuditService
from graphstash_server.services.blobs import BlobKeeper
from graphstash_server.services.eviction import Evictor
from graphstash_server.services.retention import RetentionService
from graphstash_server.services.tidy import TidyService
from graphstash_server.services.tokens import TokenService

__all__ = ["Maintenance"]

_LOGGER = logging.getLogger(__name__)

_ORPHAN_AGE = timedelta(hours=1)
"""A blob without a row that is older belongs to no upload of another server: nothing takes so long
between the rename and the commit."""

_HOURLY = timedelta(hours=1)
_DAILY = timedelta(days=1)


class Maintenance:
    """Runs in the background; cancelling it loses nothing."""

    def __init__(
        self,
        *,
        database: Database,
        keeper: BlobKeeper,
        evictor: Evictor,
        retention: RetentionService,
        tidy: TidyService,
        audit: AuditService,
        tokens: TokenService,
        clock: Clock,
        unused_longer_than: timedelta | None,
        toolchains_kept: int | None,
        audit_kept_for: timedelta,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._database = database
        self._keeper = keeper
        self._evictor = evictor
        self._retention = retention
        self._tidy = tidy
        self._audit = audit
        self._tokens = tokens
        self._clock = clock
        self._unused_longer_than = unused_longer_than
        self._toolchains_kept = toolchains_kept
        self._audit_kept_for = audit_kept_for
        self._jitter = jitter

    async def run(self, *, every_seconds: float, started_at: datetime, was_alone: bool) -> None:
        """Runs until it is cancelled; what fails is tried again the next time.

        Args:
            every_seconds: time between two rounds; a passed soft limit does not wait for it.
            started_at: of this server.
            was_alone: no other server used its data directory then: what is older and belongs to
                no artifact was left by a crash.
        """
        if was_alone:
            await self._try("tidying", self._tidy.tidy(blobs_before=started_at))
        while True:
            await self._try("maintenance", self.run_once())
            pause = every_seconds * (0.5 + self._jitter())
            try:
                async with asyncio.timeout(pause):
                    await self._evictor.is_needed.wait()
            except TimeoutError:
                continue

    async def run_once(self) -> None:
        """One round.

        Raises:
            ServerError: 503.
        """
        await self._evictor.run()
        await self._keeper.collect_marked()
        if await self._is_due("drop old leases", _HOURLY):
            await self._tidy.drop_old_leases()
        if await self._is_due("retention", _HOURLY):
            await self.retain()
        if await self._is_due("prune the audit log", _HOURLY):
            oldest = self._clock() - self._audit_kept_for
            await self._audit.prune(older_than=oldest)
            await self._tokens.forget_ended(before=oldest)
        if await self._is_due("compare rows and blobs", _DAILY):
            await self._tidy.tidy(blobs_before=self._clock() - _ORPHAN_AGE)

    async def retain(self) -> int:
        """Evicts what retention chooses; says how many artifacts."""
        evicted = 0
        async for page in self.outlived():
            evicted += await self._evictor.evict(page)
        if evicted:
            _LOGGER.info("%d artifacts were evicted by age or toolchain", evicted)
            await self._keeper.collect_marked()
        return evicted

    async def outlived(self) -> AsyncIterator[list[Candidate]]:
        """What retention chooses, by page."""
        if self._unused_longer_than is not None:
            async for page in self._retention.unused(self._unused_longer_than):
                yield page
        if self._toolchains_kept is not None:
            async for page in self._retention.outdated(self._toolchains_kept):
                yield page

    async def _is_due(self, chore: str, every: timedelta) -> bool:
        async with self._database.writing() as connection:
            return await claim_chore(connection, chore, now=self._clock(), every=every)

    async def _try(self, what: str, work: Awaitable[object]) -> None:
        """The outermost frame: a store that cannot be kept tidy can still be served."""
        try:
            await work
        except ServerError as error:
            _LOGGER.warning("%s stopped, it will be tried again: %s", what, error)
        except Exception:
            _LOGGER.exception("%s failed, it will be tried again", what)
