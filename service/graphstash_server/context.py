"""ProcessContext: everything that lives as long as the server process, built once, in one place."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.migrate import migrate
from graphstash_server.errors import ServerError
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.artifacts import ArtifactService
from graphstash_server.services.blobs import BlobKeeper
from graphstash_server.services.commits import Committer
from graphstash_server.services.health import HealthService
from graphstash_server.services.leases import LeaseService
from graphstash_server.services.manifests import ManifestService
from graphstash_server.services.statistics import StatisticsService
from graphstash_server.services.tidy import TidyService
from graphstash_server.services.uploads import UploadService
from graphstash_server.services.waiting import Waiters
from graphstash_server.settings import Settings
from graphstash_server.storage import BlobStore, open_blob_store
from graphstash_server.storage.owner import ServerLock

__all__ = ["ProcessContext", "open_context"]

_LOGGER = logging.getLogger(__name__)

_ORPHAN_AGE = timedelta(hours=1)
"""A blob without a row that is older belongs to no upload of another server: nothing takes so long
between the rename and the commit."""


_LEASES_EVERY_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """What the HTTP calls use. Opened and closed by `open_context`."""

    settings: Settings
    artifacts: ArtifactService
    uploads: UploadService
    leases: LeaseService
    manifests: ManifestService
    accounting: Accounting
    health: HealthService
    statistics: StatisticsService
    waiters: Waiters

    def stop_waiting(self) -> None:
        """Answers every request that waits for a lease: the server is about to stop."""
        self.waiters.close()


@asynccontextmanager
async def open_context(
    settings: Settings, *, blob_store: BlobStore | None, clock: Clock
) -> AsyncIterator[ProcessContext]:
    """Opens everything, in the order in which it depends on each other, and closes it in reverse.

    Args:
        settings: of this server.
        blob_store: used instead of the one that the settings name; the caller closes it.
        clock: the time.

    Raises:
        OSError: when the data directory cannot be made or written.
        StartError: when the database cannot be used.
    """
    async with AsyncExitStack() as stack:
        lock = await asyncio.to_thread(_lock_data_dir, settings.data_dir)
        stack.callback(lock.close)
        started_at = clock()
        await asyncio.to_thread(
            migrate, settings.database_url, lock_path=settings.data_dir / "migrate.lock"
        )
        database = Database(settings.database_url)
        stack.push_async_callback(database.close)
        blobs = blob_store
        if blobs is None:
            blobs = await stack.enter_async_context(open_blob_store(settings))
        await asyncio.to_thread(lock.share)
        context, tidy = _build(settings, database=database, blobs=blobs, clock=clock)
        stack.push_async_callback(_flush_last, context.accounting)
        blobs_before = started_at if lock.was_alone else started_at - _ORPHAN_AGE
        tasks = (
            asyncio.create_task(context.accounting.run(every_seconds=settings.flush_seconds)),
            asyncio.create_task(_tidy(tidy, blobs_before)),
        )
        stack.push_async_callback(_cancel, tasks)
        yield context


def _build(
    settings: Settings, *, database: Database, blobs: BlobStore, clock: Clock
) -> tuple[ProcessContext, TidyService]:
    waiters = Waiters()
    accounting = Accounting(database=database, clock=clock)
    keeper = BlobKeeper(database=database, blobs=blobs)
    artifacts = ArtifactService(
        database=database, blobs=blobs, keeper=keeper, accounting=accounting, clock=clock
    )
    uploads = UploadService(
        database=database,
        blobs=blobs,
        keeper=keeper,
        artifacts=artifacts,
        accounting=accounting,
        committer=Committer(database=database, blobs=blobs, clock=clock),
        waiters=waiters,
        max_artifact_bytes=settings.max_artifact_bytes,
        store_limit_bytes=settings.store_limit_bytes,
    )
    leases = LeaseService(database=database, artifacts=artifacts, waiters=waiters, clock=clock)
    statistics = StatisticsService(
        database=database, accounting=accounting, leases=leases, waiters=waiters, clock=clock
    )
    context = ProcessContext(
        settings=settings,
        artifacts=artifacts,
        uploads=uploads,
        leases=leases,
        manifests=ManifestService(database=database, clock=clock),
        accounting=accounting,
        health=HealthService(database=database, blobs=blobs),
        statistics=statistics,
        waiters=waiters,
    )
    tidy = TidyService(
        database=database, blobs=blobs, keeper=keeper, artifacts=artifacts, clock=clock
    )
    return context, tidy


def _lock_data_dir(data_dir: Path) -> ServerLock:
    data_dir.mkdir(parents=True, exist_ok=True)
    return ServerLock(data_dir / "server.lock")


async def _tidy(service: TidyService, blobs_before: datetime) -> None:
    """Runs in the background: a store that cannot be tidied can still be served."""
    try:
        await service.compare(blobs_before=blobs_before)
    except ServerError as error:
        _LOGGER.warning("tidying stopped, the next start goes on: %s", error)
    while True:
        try:
            await service.drop_old_leases()
        except ServerError as error:
            _LOGGER.warning("old leases stay for another hour: %s", error)
        await asyncio.sleep(_LEASES_EVERY_SECONDS)


async def _flush_last(accounting: Accounting) -> None:
    try:
        await accounting.flush()
    except ServerError as error:
        _LOGGER.warning("the last usage counters are lost: %s", error)


async def _cancel(tasks: tuple[asyncio.Task[None], ...]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
