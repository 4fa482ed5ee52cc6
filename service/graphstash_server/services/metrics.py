"""Readiness of the server, the counters of `GET /v1/stats`, and free space."""

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from graphstash_schema import Digest, Namespace, NamespaceStats, ServerStats
from graphstash_server import __version__
from graphstash_server.clock import SteadyClock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.locks import find_waiting
from graphstash_server.db.queries.reports import count_withheld
from graphstash_server.db.queries.usage import UsageChange, list_usage, stored_bytes
from graphstash_server.errors import NoSpaceError, ServerError
from graphstash_server.logs import in_background
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.artifacts.doubts import LimitDoubts
from graphstash_server.services.jobs.leases import LeaseService
from graphstash_server.services.namespaces import Budget, Budgets, PolicyLimits, PolicyService
from graphstash_server.services.plausible_clock import PlausibleClock
from graphstash_server.services.wait_queue import WaitQueue
from graphstash_server.shared_text import SharedText
from graphstash_server.storage import BlobStore

__all__ = ["HealthService", "Readiness", "SpaceService", "StatisticsService", "StoreSpace"]

_LOGGER = logging.getLogger(__name__)

_DATABASE_SECONDS = 2.0
_STORE_SECONDS = 5.0

_FRESH_SECONDS = 1.0
"""Seconds for which a good result is reused, a tenth of the interval of health checks."""

_AT_ONCE = 200
"""Namespaces handled in one turn of the event loop, in one or two milliseconds."""

_OK = "ok"
_READ_ONLY = "read only: no space left"


class Readiness(NamedTuple):
    """The state of each part: `ok`, or a description of the problem.

    Attributes:
        locks: whether transactions of any server wait in the database. The server stays ready,
            because other requests continue.
        clock: whether the servers may delete by age.
        unknown_blobs: whether the servers remove blobs without an artifact and artifacts without a
            blob, as of the last comparison on this host.
        store_limit: whether the servers evict for the store's limit. If the limit is doubtful
            (`LimitDoubts`), they do not, and if there is a hard limit, they refuse uploads.
    """

    database: str
    blob_store: str
    locks: str
    clock: str
    unknown_blobs: str
    store_limit: str

    @property
    def is_ready(self) -> bool:
        """Whether the server can serve requests; a full store still serves hits."""
        return self.database == _OK and self.blob_store in (_OK, _READ_ONLY)


@dataclass(kw_only=True, eq=False)
class HealthService:
    """Probes database and store. Safe for concurrent calls. `last` is the last finished check."""

    database: Database
    blobs: BlobStore
    plausible_clock: PlausibleClock
    unknown_blobs: SharedText
    limit_doubts: LimitDoubts
    new_probe: Callable[[], bytes] = lambda: b"graphstash probe " + secrets.token_bytes(16)

    def __post_init__(self) -> None:
        self._checking: asyncio.Task[Readiness] | None = None
        self._probing: dict[str, asyncio.Task[str]] = {}
        self._ready_at = float("-inf")
        self._store_limit = _OK
        self.last: Readiness | None = None

    async def check(self) -> Readiness:
        """Return the state of all parts, or a good state that is less than a second old. Anyone may
        call this, and a check writes to the store, so concurrent calls share one check.
        """
        age_seconds = asyncio.get_running_loop().time() - self._ready_at
        is_stale = age_seconds >= _FRESH_SECONDS or self.database.corruption is not None
        if self._checking is None or (self._checking.done() and is_stale):
            self._checking = in_background(self._check())
        return await asyncio.shield(self._checking)

    async def _check(self) -> Readiness:
        readiness = Readiness(
            *await asyncio.gather(
                self._verdict("database", self._probe_database, _DATABASE_SECONDS),
                self._verdict("blob store", self._probe_store, _STORE_SECONDS),
                self._verdict("locks", self._probe_locks, _DATABASE_SECONDS),
            ),
            self.plausible_clock.state,
            self.unknown_blobs.get() or _OK,
            self._store_limit,
        )
        self.last = readiness
        if readiness.is_ready:
            self._ready_at = asyncio.get_running_loop().time()
        return readiness

    async def _verdict(
        self, part: str, probe: Callable[[], Coroutine[Any, Any, str]], seconds: float
    ) -> str:
        """Return the result of a probe. A probe that times out runs on, because nothing can stop a
        call to a hanging disk. Until it ends, its part fails without another probe.
        """
        if part not in self._probing:
            probing = self._probing[part] = in_background(_result_of(part, probe()))
            probing.add_done_callback(lambda _: self._probing.pop(part))
            await asyncio.wait([probing], timeout=seconds)
            if probing.done():
                return probing.result()
        return f"failed: no answer within {seconds:g} seconds"

    async def _probe_database(self) -> str:
        async with self.database.reading() as connection:
            # Unlike SELECT 1, this query reads a table.
            size_bytes = await stored_bytes(connection)
        doubts = await self.limit_doubts.about({None: size_bytes}, PolicyLimits())
        self._store_limit = doubts.get(None, _OK)
        return _OK

    async def _probe_locks(self) -> str:
        async with self.database.reading() as connection:
            waiting = await find_waiting(connection)
        if waiting is None:
            return _OK
        text = (
            f"{waiting.transactions} transactions wait, the first one for {waiting.seconds:.1f} s"
        )
        if not waiting.idle_seconds:
            return text
        return (
            f"{text}, for another one that has done nothing for {waiting.idle_seconds:.1f} s: a "
            "server may be frozen or cut off"
        )

    async def _probe_store(self) -> str:
        probe = self.new_probe()
        digest = Digest.of(probe)
        try:
            await self.blobs.put(digest, _one(probe))
        except NoSpaceError:
            return _READ_ONLY
        try:
            reader = await self.blobs.open(digest)
            if reader is None:
                return "failed: what was written is not there"
            try:
                read = b"".join([chunk async for chunk in reader.chunks(0, len(probe))])
            finally:
                await reader.close()
        finally:
            await self.blobs.delete(digest)
        return _OK if read == probe else "failed: other bytes were read than written"


async def _one(chunk: bytes) -> AsyncIterator[bytes]:
    yield chunk


async def _result_of(part: str, probe: Awaitable[str]) -> str:
    """Return the result of a probe. An error is a result, so that all parts are reported."""
    try:
        return await probe
    except ServerError as error:
        return f"failed: {error.detail}"
    except Exception as error:
        _LOGGER.exception("the %s failed its probe", part)
        return f"failed: {type(error).__name__}"


@dataclass(kw_only=True, eq=False)
class StatisticsService:
    """Collects the counters of `GET /v1/stats`. Safe for concurrent calls."""

    database: Database
    accounting: Accounting
    leases: LeaseService
    wait_queue: WaitQueue
    steady: SteadyClock

    def __post_init__(self) -> None:
        self._started_at = self.steady()

    async def read(
        self, *, may_read: Callable[[Namespace], Awaitable[bool]] | None = None
    ) -> ServerStats:
        """Return the counters of this process and of the namespaces that `may_read` admits."""
        rows = await list_usage(self.database)
        async with self.database.reading() as connection:
            withheld = await count_withheld(connection)
        namespaces = []
        for number, (name, *counters) in enumerate(rows):
            if number % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)  # ten thousand namespaces must not block other tasks
            if may_read is None or await may_read(Namespace(name)):
                # A wrong counter may be negative until `fsck` or the daily comparison repairs it.
                clamped = (max(each, 0) for each in counters)
                counted = dict(zip(UsageChange._fields, clamped, strict=True))
                namespaces.append(
                    NamespaceStats(namespace=name, withheld=withheld.get(name, 0), **counted)
                )
        return ServerStats(
            version=__version__,
            uptime_seconds=self.steady() - self._started_at,
            leases_held=await self.leases.count_held(),
            waiters=self.wait_queue.count,
            healed=self.accounting.healed,
            reported=self.accounting.reported,
            refused=dict(sorted(self.accounting.refused.items())),
            reads=dict(sorted(self.accounting.reads.items())),
            namespaces=tuple(namespaces),
        )


class StoreSpace(NamedTuple):
    """Limits of the store, and bytes of its disk that uploads may take. None: a bucket, or the disk
    fails.
    """

    budget: Budget
    free_bytes: int | None


@dataclass(kw_only=True, eq=False)
class SpaceService:
    """Reads the limits of the store and its namespaces. Safe for concurrent calls."""

    budgets: Budgets
    policies: PolicyService
    disk: Path | None
    min_free_bytes: int

    async def of_store(self) -> StoreSpace:
        """Return the limits and free space of the whole store."""
        free_bytes = None
        if self.disk is not None:
            free_bytes = await asyncio.to_thread(self._free_bytes, self.disk)
        return StoreSpace(self.budgets.store, free_bytes)

    async def of_namespaces(self, namespaces: Sequence[str]) -> list[Budget]:
        """Return the budget of each namespace."""
        limits = await self.policies.limits()
        return [self.budgets.of(namespace, limits) for namespace in namespaces]

    def _free_bytes(self, disk: Path) -> int | None:
        try:
            found = os.statvfs(disk)
        except OSError:
            return None
        return max(0, found.f_bavail * found.f_frsize - self.min_free_bytes)
