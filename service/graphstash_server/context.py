"""ProcessContext: builds and connects the services of a server or command."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.engine import make_url

from graphstash_server.clock import (
    Clock,
    SteadyClock,
    jitter,
    steady_seconds,
    system_clock,
    without_steps,
)
from graphstash_server.db.corruption import advice_for, find_corruption
from graphstash_server.db.database_clock import DatabaseClock
from graphstash_server.db.engine import Database
from graphstash_server.db.migrate import check_revision, migrate
from graphstash_server.db.notifications import Listener
from graphstash_server.errors import ServerError, StartError
from graphstash_server.file_locks import ServerLock, hold_database
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.artifacts.allocation import Allocator
from graphstash_server.services.artifacts.blobs import BlobCollector
from graphstash_server.services.artifacts.catalog import CatalogService
from graphstash_server.services.artifacts.doubts import LimitDoubts
from graphstash_server.services.artifacts.eviction import Evictor
from graphstash_server.services.artifacts.explanations import ExplanationService
from graphstash_server.services.artifacts.listing import ListingService
from graphstash_server.services.artifacts.quarantine import QuarantineService
from graphstash_server.services.artifacts.service import ArtifactService
from graphstash_server.services.artifacts.uploads import CommitBatcher, UploadService
from graphstash_server.services.artifacts.withdrawals import WithdrawalService
from graphstash_server.services.counters import Counters
from graphstash_server.services.exposition import ExpositionService
from graphstash_server.services.history import HistoryService
from graphstash_server.services.identity.audit import AuditService
from graphstash_server.services.identity.authentication import AccessService, KnownTokens
from graphstash_server.services.identity.oidc import OidcVerifier
from graphstash_server.services.identity.sessions import SessionService
from graphstash_server.services.identity.tokens import TokenService, revoked_token_in
from graphstash_server.services.jobs.leases import LeaseService
from graphstash_server.services.jobs.manifests import ManifestService, PinService
from graphstash_server.services.jobs.runs import RunService
from graphstash_server.services.maintenance.backup import UNFINISHED
from graphstash_server.services.maintenance.reconciler import Reconciler
from graphstash_server.services.maintenance.schedule import Maintenance, RetentionService
from graphstash_server.services.metrics import HealthService, SpaceService, StatisticsService
from graphstash_server.services.namespaces import Budget, Budgets, PolicyService, Rates
from graphstash_server.services.plausible_clock import PlausibleClock
from graphstash_server.services.wait_queue import Notification, WaitQueue
from graphstash_server.settings import LimitSettings, Settings
from graphstash_server.shared_text import SharedText
from graphstash_server.storage import BlobStore, open_blob_store
from graphstash_server.upstream.ownership import OwnershipService
from graphstash_server.upstream.region import Region

if TYPE_CHECKING:
    from graphstash_server.tracing import Tracing

__all__ = [
    "ProcessContext",
    "open_context",
    "open_services",
    "prepare_database",
    "without_restore",
]

_LOGGER = logging.getLogger(__name__)

_CHECK_SECONDS = 5.0
"""Maximum seconds that a start waits for the SQLite corruption check."""

_WAKE_SPREAD_SECONDS = 0.05
"""Maximum random delay after a notification. Otherwise all servers would query at once."""


class ProcessContext:
    """The services that HTTP calls and commands use. `open_services` opens and closes it."""

    def __init__(
        self,
        settings: Settings,
        *,
        database: Database,
        blobs: BlobStore,
        counters: Counters,
        clock: Clock,
        steady: SteadyClock,
        tracing: "Tracing | None" = None,
    ) -> None:
        self.settings = settings
        self.database = database
        self.clock = clock
        steady_clock = without_steps(steady)
        # Most services that age, pin or delete rows use this clock: a wrong time would delete
        # valid rows. Sessions and the collection of blobs use `clock`.
        self.plausible_clock = plausible = PlausibleClock(
            database=database, clock=clock, steady=steady
        )
        self.wait_queue = WaitQueue(
            counters=counters, connections=settings.max_connections, tracing=tracing
        )
        self.accounting = Accounting(
            database=database, counters=counters, clock=clock, bound_time=plausible.bound
        )
        self.audit = AuditService(database=database)
        self.tokens = TokenService(database=database, clock=clock)
        self.access = AccessService(
            is_open=settings.is_open,
            tokens=KnownTokens(database=database, clock=steady_clock),
            oidc=OidcVerifier(issuers) if (issuers := settings.trusted_issuers) else None,
            accounting=self.accounting,
            clock=clock,
        )
        self.sessions = SessionService(database=database, access=self.access, clock=clock)
        self.policies = PolicyService(
            database=database, clock=clock, rates=Rates(counters.host.rates)
        )
        self.collector = BlobCollector(database=database, blobs=blobs, clock=clock)
        self.artifacts = ArtifactService(
            database=database,
            blobs=blobs,
            collector=self.collector,
            accounting=self.accounting,
            clock=clock,
            steady_clock=steady_clock,
            plausible_clock=plausible,
            has_tiers=settings.blob_store != "disk",
        )
        self.accounting.when_written = self.artifacts.forget_used
        budgets = _budgets(settings)
        limit_doubts = LimitDoubts(database=database, budgets=budgets)
        self.evictor = Evictor(
            database=database,
            budgets=budgets,
            policies=self.policies,
            artifacts=self.artifacts,
            limit_doubts=limit_doubts,
            clock=clock,
            plausible_clock=plausible,
        )
        self.allocator = Allocator(
            database=database,
            blobs=blobs,
            collector=self.collector,
            evictor=self.evictor,
            budgets=budgets,
            limit_doubts=limit_doubts,
            policies=self.policies,
            clock=plausible,
        )
        self.uploads = UploadService(
            blobs=blobs,
            collector=self.collector,
            artifacts=self.artifacts,
            accounting=self.accounting,
            committer=CommitBatcher(
                database=database, blobs=blobs, clock=clock, plausible_clock=plausible
            ),
            allocator=self.allocator,
            wait_queue=self.wait_queue,
            max_artifact_bytes=settings.max_artifact_bytes,
        )
        self.quarantine = QuarantineService(
            database=database,
            artifacts=self.artifacts,
            accounting=self.accounting,
            wait_queue=self.wait_queue,
            clock=clock,
        )
        self.ownership = OwnershipService(database=database, upstream_url=settings.upstream_url)
        self.leases = LeaseService(
            database=database,
            artifacts=self.artifacts,
            wait_queue=self.wait_queue,
            counters=counters,
            clock=clock,
        )
        self.region: Region | None = None
        if settings.upstream_url is not None:
            self.region = Region(
                settings,
                leases=self.leases,
                uploads=self.uploads,
                policies=self.policies,
                ownership=self.ownership,
                quarantine=self.quarantine,
                plausible_clock=plausible,
            )
            self.leases = self.region.leases
            self.access.upstream = self.region.access
        self.catalog = CatalogService(database=database)
        self.explanations = ExplanationService(database=database, clock=plausible)
        self.listing = ListingService(database=database)
        self.withdrawals = WithdrawalService(database=database, clock=plausible)
        self.manifests = ManifestService(
            database=database, allocator=self.allocator, clock=plausible
        )
        self.pins = PinService(database=database, clock=clock)
        self.history = HistoryService(database=database, clock=clock)
        self.runs = RunService(database=database, clock=clock)
        self.health = HealthService(
            database=database,
            blobs=blobs,
            plausible_clock=plausible,
            unknown_blobs=counters.host.unknown_blobs,
            limit_doubts=limit_doubts,
        )
        self.space = SpaceService(
            budgets=budgets,
            policies=self.policies,
            disk=settings.blob_dir if settings.blob_store == "disk" else None,
            min_free_bytes=settings.min_free_bytes,
        )
        self.statistics = StatisticsService(
            database=database,
            accounting=self.accounting,
            leases=self.leases,
            wait_queue=self.wait_queue,
            steady=steady,
        )
        self.exposition = ExpositionService(
            database=database,
            counters=counters,
            leases=self.leases,
            plausible_clock=plausible,
            store_limit_bytes=settings.store_limit_bytes,
            region=self.region.gauges if self.region is not None else None,
        )
        self.retention = RetentionService(database=database, clock=plausible)
        self.reconciler = Reconciler(
            database=database,
            blobs=blobs,
            collector=self.collector,
            artifacts=self.artifacts,
            clock=plausible,
            doubt=counters.host.unknown_blobs,
        )
        self.maintenance = Maintenance(
            database=database,
            collector=self.collector,
            evictor=self.evictor,
            retention=self.retention,
            reconciler=self.reconciler,
            withdrawals=self.withdrawals,
            manifests=self.manifests,
            explanations=self.explanations,
            history=self.history,
            runs=self.runs,
            audit=self.audit,
            tokens=self.tokens,
            clock=plausible,
            unused_longer_than=(
                timedelta(days=settings.retain_days) if settings.retain_days else None
            ),
            toolchains_kept=settings.retain_toolchains,
            audit_kept_for=timedelta(days=settings.audit_days),
            region=self.region,
        )


@asynccontextmanager
async def open_context(
    settings: Settings,
    *,
    blob_store: BlobStore | None,
    counters: Counters | None = None,
    clock: Clock,
    tracing: "Tracing | None" = None,
) -> AsyncIterator[ProcessContext]:
    """Open everything that a server needs, and run its background tasks.

    If `blob_store` is given, it replaces the store of the settings, and the caller closes it. On
    PostgreSQL, the database's clock replaces `system_clock`.

    Raises:
        OSError: the data directory cannot be created or written.
        StartError: the database or the blob store cannot be used.
    """
    async with AsyncExitStack() as stack:
        lock = await asyncio.to_thread(_lock_data_dir, settings.data_dir)
        stack.callback(lock.close)
        stack.enter_context(without_restore(settings))
        started_at = clock()
        checking = None
        if lock.was_alone:
            checking = asyncio.create_task(find_corruption(make_url(settings.database_url)))
            stack.callback(checking.cancel)
            await _wait_for_check(checking)
        await prepare_database(settings, is_migrating=settings.auto_migrate)
        try:
            context = await stack.enter_async_context(
                open_services(
                    settings, blob_store=blob_store, counters=counters, clock=clock, tracing=tracing
                )
            )
            if checking is not None:
                checking.add_done_callback(partial(_note_result, context.database))
            await context.plausible_clock.observe()
            await context.reconciler.check_store_not_empty()
            if context.region is not None:
                await context.region.follower.begin()
        except ServerError as error:
            raise StartError(error.detail) from error
        await asyncio.to_thread(lock.share)
        stack.push_async_callback(_flush_last, context.accounting)
        # With S3, servers of other data directories may use the same bucket.
        was_alone = lock.was_alone and settings.blob_store == "disk"
        tasks = [
            asyncio.create_task(context.accounting.run(every_seconds=settings.flush_seconds)),
            asyncio.create_task(_listener(context).run()),
            asyncio.create_task(
                context.maintenance.run(
                    every_seconds=settings.maintenance_seconds,
                    started_at=started_at,
                    was_alone=was_alone,
                )
            ),
        ]
        if context.region is not None:
            tasks.append(asyncio.create_task(context.region.run()))
        if isinstance(context.clock, DatabaseClock):
            tasks.append(asyncio.create_task(context.clock.run()))
        stack.push_async_callback(_cancel, tasks)
        context.accounting.counters.begin()
        yield context


@asynccontextmanager
async def open_services(
    settings: Settings,
    *,
    blob_store: BlobStore | None,
    counters: Counters | None = None,
    clock: Clock,
    steady: SteadyClock = steady_seconds,
    tracing: "Tracing | None" = None,
) -> AsyncIterator[ProcessContext]:
    """Open the database and the blob store. Starts no background task.

    Raises:
        OSError: the data directory cannot be created or written.
        ServerError: 503 if PostgreSQL does not respond.
        StartError: the blob store cannot be used.
    """
    async with AsyncExitStack() as stack:
        counters = counters or Counters.alone()
        database = _open_database(settings, tracing, corruption=counters.host.corruption)
        stack.push_async_callback(database.close)
        blobs = blob_store
        if blobs is None:
            blobs = await stack.enter_async_context(open_blob_store(settings, tracing=tracing))
        if clock is system_clock and database.is_postgresql:
            clock = await DatabaseClock.open(database, steady=steady)
        context = ProcessContext(
            settings,
            database=database,
            blobs=blobs,
            counters=counters,
            clock=clock,
            steady=steady,
            tracing=tracing,
        )
        stack.push_async_callback(context.artifacts.close)
        if context.region is not None:
            stack.push_async_callback(context.region.close)
        yield context


@contextmanager
def without_restore(settings: Settings) -> Iterator[None]:
    """Prevent a restore from replacing the database file. Enter the context before opening the
    database: writes to a replaced file are lost.

    Raises:
        OSError: the data directory does not exist or cannot be written.
        StartError: a restore is running.
    """
    with hold_database(settings.data_dir) as is_free:
        if not is_free:
            raise StartError(f"a restore in {settings.data_dir} is running: retry after its end")
        yield


async def prepare_database(settings: Settings, *, is_migrating: bool) -> None:
    """Ensure that the database is at this release's revision or a later one.

    Raises:
        StartError: the database is unreachable, or older and `is_migrating` is False, or an
            interrupted restore has to be finished.
    """
    if (settings.data_dir / UNFINISHED).is_file():
        raise StartError(
            f"a restore in {settings.data_dir} has not ended: run the same `graphstash restore` "
            "again, which continues it, or `graphstash restore --abandon` to keep what was there"
        )
    prepare = migrate if is_migrating else check_revision
    lock_path = settings.data_dir / "migrate.lock"
    await asyncio.to_thread(prepare, settings.database_url, lock_path=lock_path)


async def _wait_for_check(checking: "asyncio.Task[str | None]") -> None:
    """Wait up to `_CHECK_SECONDS` for the corruption check of an SQLite database. The check of a
    large database continues while the server serves.

    Raises:
        StartError: the database is corrupt.
    """
    await asyncio.wait([checking], timeout=_CHECK_SECONDS)
    if checking.done() and (reason := checking.result()) is not None:
        raise StartError(advice_for(reason))


def _note_result(database: Database, checking: "asyncio.Task[str | None]") -> None:
    if not checking.cancelled() and (reason := checking.result()) is not None:
        database.note_corruption(reason)


def _open_database(
    settings: Settings, tracing: "Tracing | None", *, corruption: SharedText
) -> Database:
    url, connections = settings.database_url, settings.database_connections
    if tracing is None:
        return Database(url, connections=connections, corruption=corruption)
    from graphstash_server.db.traced import TracedDatabase

    return TracedDatabase(url, connections=connections, corruption=corruption, tracing=tracing)


def _budgets(settings: LimitSettings) -> Budgets:
    return Budgets(
        Budget.of(settings.store_limit_bytes, settings.soft_limit_bytes),
        namespace_bytes=settings.namespace_limit_bytes,
        exceptions=settings.namespace_limits,
    )


def _listener(context: ProcessContext) -> Listener:
    """Return a listener that wakes waiting requests and forgets revoked tokens."""
    wait_queue = context.wait_queue

    def on_notification(payload: str) -> None:
        token_id = revoked_token_in(payload)
        if token_id is not None:
            context.access.forget_token(token_id)
        notification = Notification.parse(payload)
        if notification is not None:
            delay = jitter() * _WAKE_SPREAD_SECONDS
            asyncio.get_running_loop().call_later(delay, wait_queue.wake, notification)

    def set_listening(is_listening: bool) -> None:  # noqa: FBT001 - the listener passes it so
        wait_queue.are_informed = is_listening
        context.accounting.counters.set_listening(is_listening)
        wait_queue.look_again()

    return Listener(context.database, heard=on_notification, is_listening=set_listening)


def _lock_data_dir(data_dir: Path) -> ServerLock:
    data_dir.mkdir(parents=True, exist_ok=True)
    return ServerLock(data_dir / "server.lock")


async def _flush_last(accounting: Accounting) -> None:
    try:
        await accounting.flush()
    except ServerError as error:
        _LOGGER.warning("the last usage counters are lost: %s", error)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for failure in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(failure, Exception):
            _LOGGER.error("a background task failed", exc_info=failure)
