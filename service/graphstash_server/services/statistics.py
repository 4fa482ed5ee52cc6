"""StatisticsService: puts together what `GET /v1/stats` says."""

from graphstash_schema import ServerStats
from graphstash_server import __version__
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.reports import count_withheld
from graphstash_server.db.queries.usage import list_usage
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.leases import LeaseService
from graphstash_server.services.waiting import Waiters

__all__ = ["StatisticsService"]


class StatisticsService:
    """Safe for concurrent calls."""

    def __init__(
        self,
        *,
        database: Database,
        accounting: Accounting,
        leases: LeaseService,
        waiters: Waiters,
        clock: Clock,
    ) -> None:
        self._database = database
        self._accounting = accounting
        self._leases = leases
        self._waiters = waiters
        self._clock = clock
        self._started_at = clock()

    async def read(self) -> ServerStats:
        """The counters of the database, and those of this process."""
        async with self._database.reading() as connection:
            namespaces = await list_usage(connection)
            withheld = await count_withheld(connection)
        return ServerStats(
            version=__version__,
            uptime_seconds=max((self._clock() - self._started_at).total_seconds(), 0.0),
            leases_held=await self._leases.count_held(),
            waiters=self._waiters.count,
            healed=self._accounting.healed,
            reported=self._accounting.reported,
            refused=dict(sorted(self._accounting.refused.items())),
            namespaces=tuple(
                each.model_copy(update={"withheld": withheld[each.namespace]})
                if each.namespace in withheld
                else each
                for each in namespaces
            ),
        )
