"""ProcessContext: everything that lives as long as the process, built once, in one place."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.migrate import check_revision, migrate
from graphstash_server.db.notifications import Listener
from graphstash_server.errors import ServerError, StartError
from graphstash_server.services.access import AccessService
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.artifacts import ArtifactService
from graphstash_server.services.audit import AuditService
from graphstash_server.services.blobs import BlobKeeper
from graphstash_server.services.budget import Budget, Budgets
from graphstash_server.services.commits import Committer
from graphstash_server.services.eviction import Evictor
from graphstash_server.services.fsck import FsckService
from graphstash_server.services.health import HealthService
from graphstash_server.services.issuer_keys import IssuerKeys
from graphstash_server.services.known_tokens import KnownTokens
from graphstash_server.services.leases import LeaseService
from graphstash_server.services.maintenance import Maintenance
from graphstash_server.services.manifests import ManifestService
from graphstash_server.services.oidc import OidcVerifier
from graphstash_server.services.pins import PinService
from graphstash_server.services.policies import PolicyService
from graphstash_server.services.quarantine import QuarantineService
from graphstash_server.services.retention import RetentionService
from graphstash_server.services.statistics import StatisticsService
from graphstash_server.services.tidy import TidyService
from graphstash_server.services.tokens import TokenService, revoked_in
from graphstash_server.services.uploads import UploadService
from graphstash_server.services.waiting import Waiters, Wake
from graphstash_server.settings import Settings
from graphstash_server.storage import BlobStore, open_blob_store
from graphstash_server.storage.owner import ServerLock

__all__ = ["ProcessContext", "open_context", "open_services", "prepare_database"]

_LOGGER = logging.getLogger(__name__)

_WAKE_SPREAD_SECONDS = 0.05
"""The servers of a fleet are told at the same moment; they do not all look at the same moment."""


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """What the HTTP calls and the commands use. Opened and closed by `open_services`."""

    settings: Settings
    database: Database
    access: AccessService
    tokens: TokenService
    audit: AuditService
    artifacts: ArtifactService
    uploads: UploadService
    leases: LeaseService
    manifests: ManifestService
    pins: PinService
    policies: PolicyService
    quarantine: QuarantineService
    accounting: Accounting
    health: HealthService
    statistics: StatisticsService
    waiters: Waiters
    keeper: BlobKeeper
    evictor: Evictor
    retention: RetentionService
    tidy: TidyService
    fsck: FsckService
    maintenance: Maintenance

    def stop_waiting(self) -> None:
        """Answers every request that waits for a lease: the server is about to stop."""
        self.waiters.close()


@asynccontextmanager
async def open_context(
    settings: Settings, *, blob_store: BlobStore | None, clock: Clock
) -> AsyncIterator[ProcessContext]:
    """Opens everything that a server needs, its background tasks included.

    Args:
        settings: of this server.
        blob_store: used instead of the one that the settings name; the caller closes it.
        clock: the time.

    Raises:
        OSError: when the data directory cannot be made or written.
        StartError: when the database or the blob store cannot be used.
    """
    async with AsyncExitStack() as stack:
        lock = await asyncio.to_thread(_lock_data_dir, settings.data_dir)
        stack.callback(lock.close)
        started_at = clock()
        await prepare_database(settings, is_migrating=settings.auto_migrate)
        context = await stack.enter_async_context(
            open_services(settings, blob_store=blob_store, clock=clock)
        )
        try:
            await context.tidy.refuse_an_empty_store()
        except ServerError as error:
            raise StartError(error.detail) from error
        await asyncio.to_thread(lock.share)
        await _say_how_to_begin(context)
        stack.push_async_callback(_flush_last, context.accounting)
        # A bucket may be used by servers of other data directories.
        was_alone = lock.was_alone and settings.blob_store == "disk"
        tasks = (
            asyncio.create_task(context.accounting.run(every_seconds=settings.flush_seconds)),
            asyncio.create_task(_listener(context).run()),
            asyncio.create_task(
                context.maintenance.run(
                    every_seconds=settings.maintenance_seconds,
                    started_at=started_at,
                    was_alone=was_alone,
                )
            ),
        )
        stack.push_async_callback(_cancel, tasks)
        yield context


@asynccontextmanager
async def open_services(
    settings: Settings, *, blob_store: BlobStore | None, clock: Clock
) -> AsyncIterator[ProcessContext]:
    """Opens database and blob store, and closes them in reverse; does nothing by itself.

    Raises:
        OSError: when the data directory cannot be made or written.
        StartError: when the blob store cannot be used.
    """
    async with AsyncExitStack() as stack:
        database = Database(settings.database_url, connections=settings.database_connections)
        stack.push_async_callback(database.close)
        blobs = blob_store
        if blobs is None:
            blobs = await stack.enter_async_context(open_blob_store(settings))
        yield _build(settings, database=database, blobs=blobs, clock=clock)


async def prepare_database(settings: Settings, *, is_migrating: bool) -> None:
    """Makes sure that the database is at this release's revision, or at a later one: revisions only
    add, so a server of the release before goes on while a fleet is upgraded.

    Raises:
        StartError: when it cannot be reached, or is older and must not be migrated here.
    """
    prepare = migrate if is_migrating else check_revision
    lock_path = settings.data_dir / "migrate.lock"
    await asyncio.to_thread(prepare, settings.database_url, lock_path=lock_path)


def _build(
    settings: Settings, *, database: Database, blobs: BlobStore, clock: Clock
) -> ProcessContext:
    waiters = Waiters()
    accounting = Accounting(database=database, clock=clock)
    keeper = BlobKeeper(database=database, blobs=blobs, clock=clock)
    artifacts = ArtifactService(
        database=database, blobs=blobs, keeper=keeper, accounting=accounting, clock=clock
    )
    policies = PolicyService(database=database, clock=clock)
    evictor = Evictor(
        database=database,
        keeper=keeper,
        budgets=_budgets(settings),
        policies=policies,
        clock=clock,
    )
    uploads = UploadService(
        blobs=blobs,
        keeper=keeper,
        artifacts=artifacts,
        accounting=accounting,
        committer=Committer(database=database, blobs=blobs, clock=clock),
        evictor=evictor,
        waiters=waiters,
        max_artifact_bytes=settings.max_artifact_bytes,
        evicts_when_full=settings.blob_store == "disk",
    )
    leases = LeaseService(database=database, artifacts=artifacts, waiters=waiters, clock=clock)
    retention = RetentionService(database=database, clock=clock)
    tidy = TidyService(
        database=database, blobs=blobs, keeper=keeper, artifacts=artifacts, clock=clock
    )
    audit = AuditService(database=database)
    tokens = TokenService(database=database, clock=clock)
    return ProcessContext(
        settings=settings,
        database=database,
        access=AccessService(
            is_open=settings.auth == "none",
            tokens=KnownTokens(database=database, clock=clock),
            oidc=_oidc(settings),
            accounting=accounting,
            clock=clock,
        ),
        tokens=tokens,
        audit=audit,
        artifacts=artifacts,
        uploads=uploads,
        leases=leases,
        manifests=ManifestService(database=database, clock=clock),
        pins=PinService(database=database),
        policies=policies,
        quarantine=QuarantineService(
            database=database,
            artifacts=artifacts,
            accounting=accounting,
            waiters=waiters,
            clock=clock,
        ),
        accounting=accounting,
        health=HealthService(database=database, blobs=blobs),
        statistics=StatisticsService(
            database=database, accounting=accounting, leases=leases, waiters=waiters, clock=clock
        ),
        waiters=waiters,
        keeper=keeper,
        evictor=evictor,
        retention=retention,
        tidy=tidy,
        fsck=FsckService(database=database, keeper=keeper, artifacts=artifacts, tidy=tidy),
        maintenance=Maintenance(
            database=database,
            keeper=keeper,
            evictor=evictor,
            retention=retention,
            tidy=tidy,
            audit=audit,
            tokens=tokens,
            clock=clock,
            unused_longer_than=(
                timedelta(days=settings.retain_days) if settings.retain_days else None
            ),
            toolchains_kept=settings.retain_toolchains,
            audit_kept_for=timedelta(days=settings.audit_days),
        ),
    )


def _oidc(settings: Settings) -> OidcVerifier | None:
    if settings.oidc_issuer is None or settings.oidc_audience is None:
        return None
    return OidcVerifier(
        issuer=settings.oidc_issuer,
        audience=settings.oidc_audience,
        keys=IssuerKeys(settings.oidc_issuer, jwks_url=settings.oidc_jwks_url),
        rules=settings.oidc_rules,
    )


def _budgets(settings: Settings) -> Budgets:
    return Budgets(
        Budget.of(settings.store_limit_bytes, settings.soft_limit_bytes),
        namespace_bytes=settings.namespace_limit_bytes,
        exceptions=settings.namespace_limits,
    )


def _listener(context: ProcessContext) -> Listener:
    """Hands what other processes commit to those who wait here."""
    waiters = context.waiters

    def heard(payload: str) -> None:
        token_id = revoked_in(payload)
        if token_id is not None:
            context.access.forget_token(token_id)
        news = Wake.parse(payload)
        if news is not None:
            delay = random.random() * _WAKE_SPREAD_SECONDS  # noqa: S311 - no secret
            asyncio.get_running_loop().call_later(delay, waiters.wake, news)

    def is_listening(is_it: bool) -> None:  # noqa: FBT001 - the listener calls it
        waiters.are_informed = is_it
        waiters.look_again()

    return Listener(context.database, heard=heard, is_listening=is_listening)


def _lock_data_dir(data_dir: Path) -> ServerLock:
    data_dir.mkdir(parents=True, exist_ok=True)
    return ServerLock(data_dir / "server.lock")


async def _say_how_to_begin(context: ProcessContext) -> None:
    """A server that asks for tokens and has none serves nobody: that is told once."""
    try:
        is_new = context.settings.auth == "tokens" and not await context.tokens.has_live()
    except ServerError:
        return  # it starts without its database, too, and says so elsewhere
    if is_new:
        _LOGGER.warning(
            "there is no token yet: make the first with `graphstash token create --grant 'admin:*' "
            "--description admin`, with the settings of this server"
        )


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
