"""Region: the parts of a server with an upstream."""

import asyncio
from datetime import timedelta

from graphstash_schema import ErrorCode, Namespace, TokenExchange, TokenIssued
from graphstash_schema.protocol import ADMIN_PREFIX, API_PREFIX
from graphstash_schema.quarantine import ReportRequest
from graphstash_server.errors import ServerError
from graphstash_server.services.artifacts.quarantine import QuarantineService
from graphstash_server.services.artifacts.uploads import UploadService
from graphstash_server.services.jobs.leases import LeaseService
from graphstash_server.services.namespaces import PolicyService
from graphstash_server.services.plausible_clock import PlausibleClock
from graphstash_server.settings import Settings
from graphstash_server.upstream.access import UpstreamAccess
from graphstash_server.upstream.client import UpstreamClient, UpstreamError
from graphstash_server.upstream.fetches import Fetches
from graphstash_server.upstream.following import Follower
from graphstash_server.upstream.leases import RegionalLeases
from graphstash_server.upstream.ownership import OwnershipService
from graphstash_server.upstream.publishes import Publishes
from graphstash_server.upstream.setting_aside import SetAside

__all__ = ["Region"]


class Region:
    """What a server with an upstream does in addition."""

    def __init__(
        self,
        settings: Settings,
        *,
        leases: LeaseService,
        uploads: UploadService,
        policies: PolicyService,
        ownership: OwnershipService,
        quarantine: QuarantineService,
        plausible_clock: PlausibleClock,
    ) -> None:
        """Connect to nothing yet. `leases` are those of a server without an upstream.

        Raises:
            StartError: the CA file cannot be used.
        """
        database, clock, artifacts = leases.database, leases.clock, leases.artifacts
        self.client = client = UpstreamClient(settings, counters=leases.counters)
        self.access = UpstreamAccess(
            client=client,
            database=database,
            clock=clock,
            offline=timedelta(seconds=settings.upstream_offline_seconds),
        )
        self.set_aside = set_aside = SetAside(
            database=database,
            artifacts=artifacts,
            quarantine=quarantine,
            client=client,
            plausible_clock=plausible_clock,
        )
        self.fetches = Fetches(
            client=client,
            database=database,
            artifacts=artifacts,
            uploads=uploads,
            set_aside=set_aside,
            wait_queue=leases.wait_queue,
            clock=clock,
            is_shared=database.is_postgresql or settings.workers > 1,
        )
        self.leases = RegionalLeases(
            database=database,
            artifacts=artifacts,
            wait_queue=leases.wait_queue,
            counters=leases.counters,
            clock=clock,
            client=client,
            fetches=self.fetches,
        )
        self.publishes = Publishes(
            client=client,
            fetches=self.fetches,
            database=database,
            artifacts=artifacts,
            clock=clock,
        )
        self.follower = Follower(
            client=client,
            database=database,
            artifacts=artifacts,
            policies=policies,
            access=self.access,
            ownership=ownership,
            set_aside=set_aside,
            clock=clock,
        )

    async def run(self) -> None:
        """Follow the upstream, send queued artifacts and keep their leases, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.follower.run())
            tasks.create_task(self.publishes.run())
            tasks.create_task(self.leases.run())

    async def close(self) -> None:
        """Cancel downloads and close the connections."""
        await self.fetches.close()
        await self.client.close()

    async def evict_set_aside(self) -> None:
        """Evict old copies that are set aside, see `SetAside.evict_old`."""
        await self.set_aside.evict_old()

    async def drop_differing(self) -> None:
        """Drop each copy whose bytes differ from the upstream's, see `Follower.drop_differing`."""
        await self.follower.drop_differing()

    async def gauges(self) -> tuple[bool, int, int]:
        """Return whether the upstream answers, the length of the queue, and the number of
        namespaces with withdrawals that the region has not applied.
        """
        return (
            self.client.is_up.is_set(),
            await self.publishes.count(),
            await self.follower.count_behind(),
        )

    async def exchange(self, request: TokenExchange, *, credentials: str) -> TokenIssued:
        """Exchange a JWT at the upstream, which issues the token.

        Raises:
            ServerError: 403 if the upstream refuses, 503 if it does not answer.
        """
        try:
            answer = await self.client.call(
                "POST", f"{ADMIN_PREFIX}/tokens:exchange", body=request, credentials=credentials
            )
            if answer.status == 201:
                return answer.parse(TokenIssued)
        except UpstreamError as error:
            raise ServerError(ErrorCode.UNAVAILABLE, f"no token was issued: {error}") from None
        raise ServerError(
            ErrorCode.FORBIDDEN, f"{self.client.url} refuses the exchange with {answer.status}"
        )

    async def report(
        self, namespace: Namespace, report: ReportRequest, *, credentials: str
    ) -> None:
        """Pass on a caller's report. Best effort: this server has handled the report."""
        try:
            await self.client.call(
                "POST",
                f"{API_PREFIX}/{namespace}/artifacts:report",
                body=report,
                credentials=credentials,
            )
        except UpstreamError:
            self.client.count("report_failed")
