"""What a server reports about itself: whether it is ready, and the counters of `GET /v1/stats`."""

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
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.locks import find_waiting
from graphstash_server.db.queries.reports import count_withheld
from graphstash_server.db.queries.usage import UsageChange, list_usage, stored_bytes
from graphstash_server.errors import NoSpaceError, ServerError
from graphstash_server.logs import in_background
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.jobs.leases import LeaseService
from graphstash_server.services.namespaces import Budget, Budgets, PolicyService
from graphstash_server.services.wait_queue import WaitQueue
from graphstash_server.storage import BlobStore

__all__ = ["HealthService", "Readiness", "SpaceService", "StatisticsService", "StoreSpace"]

_LOGGER = logging.getLogger(__name__)

_DATABASE_SECONDS = 2.0
_STORE_SECONDS = 5.0
"""A probe that takes longer has failed: requests would wait as long."""

_FRESH_SECONDS = 1.0
"""A tenth of the time between two health checks of `docker/compose.yaml`."""

_AT_ONCE = 200
"""Namespaces of one turn of the event loop: a millisecond or two."""

_OK = "ok"
_READ_ONLY = "read only: no space left"


class Readiness(NamedTuple):
    """The state of each part: `ok`, or what is wrong with it.

    Attributes:
        database: whether it answers.
        blob_store: whether it takes and gives back a blob.
        locks: what waits in the database, for this server and all others; that leaves a server
            ready, because what does not wait goes on.
    """

    database: str
    blob_store: str
    locks: str

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served; a full store still serves hits."""
        return self.database == _OK and self.blob_store in (_OK, _READ_ONLY)


@dataclass(kw_only=True, eq=False)
class HealthService:
    """Safe for concurrent calls; `last` is what the last finished check found."""

    database: Database
    blobs: BlobStore
    new_probe: Callable[[], bytes] = lambda: b"graphstash probe " + secrets.token_bytes(16)

    def __post_init__(self) -> None:
        self._checking: asyncio.Task[Readiness] | None = None
        self._probing: dict[str, asyncio.Task[str]] = {}
        self._ready_at = float("-inf")
        self.last: Readiness | None = None

    async def check(self) -> Readiness:
        """What all parts answer, or answered less than a second ago. Anybody may ask, and each
        probe writes to the store, so whoever asks during a probe shares it.
        """
        age_seconds = asyncio.get_running_loop().time() - self._ready_at
        if self._checking is None or (self._checking.done() and age_seconds >= _FRESH_SECONDS):
            self._checking = in_background(self._check())
        return await asyncio.shield(self._checking)

    async def _check(self) -> Readiness:
        """Asks all parts at the same time."""
        readiness = Readiness(
            *await asyncio.gather(
                self._verdict("database", self._ask_database, _DATABASE_SECONDS),
                self._verdict("blob store", self._use_store, _STORE_SECONDS),
                self._verdict("locks", self._ask_for_waiting, _DATABASE_SECONDS),
            )
        )
        self.last = readiness
        if readiness.is_ready:
            self._ready_at = asyncio.get_running_loop().time()
        return readiness

    async def _verdict(
        self, what: str, probe: Callable[[], Coroutine[Any, Any, str]], seconds: float
    ) -> str:
        """What a probe found. One that takes too long is left alone, for a disk that hangs does not
        let it end; it cleans up when it does, and until then no other one is begun.
        """
        if what not in self._probing:
            probing = self._probing[what] = in_background(_found_by(what, probe()))
            probing.add_done_callback(lambda _: self._probing.pop(what))
            await asyncio.wait([probing], timeout=seconds)
            if probing.done():
                return probing.result()
        return f"failed: no answer within {seconds:g} seconds"

    async def _ask_database(self) -> str:
        async with self.database.reading() as connection:
            await stored_bytes(connection)  # unlike SELECT 1, it needs the file and the tables
        return _OK

    async def _ask_for_waiting(self) -> str:
        async with self.database.reading() as connection:
            waiting = await find_waiting(connection)
        if waiting is None:
            return _OK
        said = (
            f"{waiting.transactions} transactions wait, the first one for {waiting.seconds:.1f} s"
        )
        if not waiting.idle_seconds:
            return said
        return (
            f"{said}, for another one that has done nothing for {waiting.idle_seconds:.1f} s: a "
            "server may be frozen or cut off"
        )

    async def _use_store(self) -> str:
        """Writes, reads and deletes a blob of its own."""
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


async def _found_by(what: str, probe: Awaitable[str]) -> str:
    """What a probe found; an outermost frame, so that one part never hides the other."""
    try:
        return await probe
    except ServerError as error:
        return f"failed: {error.detail}"
    except Exception as error:
        _LOGGER.exception("the %s failed its probe", what)
        return f"failed: {type(error).__name__}"


@dataclass(kw_only=True, eq=False)
class StatisticsService:
    """Safe for concurrent calls."""

    database: Database
    accounting: Accounting
    leases: LeaseService
    wait_queue: WaitQueue
    clock: Clock

    def __post_init__(self) -> None:
        self._started_at = self.clock()

    async def read(
        self, *, may_read: Callable[[Namespace], Awaitable[bool]] | None = None
    ) -> ServerStats:
        """The counters of the database and of this process, of every namespace or of those that
        somebody may read.
        """
        rows = await list_usage(self.database)
        async with self.database.reading() as connection:
            withheld = await count_withheld(connection)
        namespaces = []
        for number, (name, *counters) in enumerate(rows):
            if number % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)  # there may be ten thousand: others have their turn
            if may_read is None or await may_read(Namespace(name)):
                counted = dict(zip(UsageChange._fields, counters, strict=True))
                namespaces.append(
                    NamespaceStats(namespace=name, withheld=withheld.get(name, 0), **counted)
                )
        return ServerStats(
            version=__version__,
            uptime_seconds=max((self.clock() - self._started_at).total_seconds(), 0.0),
            leases_held=await self.leases.count_held(),
            waiters=self.wait_queue.count,
            healed=self.accounting.healed,
            reported=self.accounting.reported,
            refused=dict(sorted(self.accounting.refused.items())),
            reads=dict(sorted(self.accounting.reads.items())),
            namespaces=tuple(namespaces),
        )


class StoreSpace(NamedTuple):
    """How much the store may take.

    Attributes:
        budget: of everything in it.
        free_bytes: what uploads may still take of its disk; None in a bucket, and when the disk
            does not answer.
    """

    budget: Budget
    free_bytes: int | None


@dataclass(kw_only=True, eq=False)
class SpaceService:
    """What limits the store and its namespaces; safe for concurrent calls."""

    budgets: Budgets
    policies: PolicyService
    disk: Path | None
    min_free_bytes: int

    async def of_store(self) -> StoreSpace:
        """The limits of the whole store."""
        free_bytes = None
        if self.disk is not None:
            free_bytes = await asyncio.to_thread(self._free_bytes, self.disk)
        return StoreSpace(self.budgets.store, free_bytes)

    async def of_namespaces(self, namespaces: Sequence[str]) -> list[Budget]:
        """The limits of each of some namespaces, which may be none."""
        limits = await self.policies.limits()
        return [self.budgets.of(namespace, limits) for namespace in namespaces]

    def _free_bytes(self, disk: Path) -> int | None:
        try:
            found = os.statvfs(disk)
        except OSError:
            return None
        return max(0, found.f_bavail * found.f_frsize - self.min_free_bytes)
