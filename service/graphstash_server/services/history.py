"""HistoryService: what the server did by hour and by day."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from graphstash_schema import ErrorCode
from graphstash_schema.history import HISTORY_KEPT, MAX_HISTORY_GROUPS, Grouping, History, Step
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.history import (
    Asked,
    begin_of,
    drop_history,
    list_points,
    rank_groups,
)
from graphstash_server.db.queries.usage import list_namespaces
from graphstash_server.errors import ServerError

__all__ = ["HistoryService"]

_USUAL: Final = {Step.HOUR: timedelta(days=1), Step.DAY: timedelta(days=30)}


class HistoryService:
    """Reads what `Accounting` writes. Safe for concurrent calls."""

    def __init__(self, *, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def read(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        step: Step = Step.HOUR,
        by: Grouping = Grouping.NONE,
        namespaces: Sequence[str] | None = None,
    ) -> History:
        """The points from the step in which `since` is to the last one that begins before `until`.

        Args:
            since: aware; None for a day of hours, or 30 days, before `until`.
            until: aware; None for now.
            step: hours or days.
            by: what points are told apart by. With more than `MAX_HISTORY_GROUPS` groups, the
                smaller ones are summed as `OTHERS`.
            namespaces: only what happened in these; None for all.

        Raises:
            ServerError: 400 when that is nothing, or longer than `HISTORY_KEPT`.
        """
        until = (until or self._clock()).astimezone(UTC)
        since = (since or until - _USUAL[step]).astimezone(UTC)
        _check(since, until, step)
        asked = Asked(step, begin_of(step, since), until, namespaces)
        async with self._database.reading() as connection:
            shown: list[str] = []
            if by is not Grouping.NONE:
                ranked = await rank_groups(connection, asked, by, limit=MAX_HISTORY_GROUPS + 1)
                shown = ranked[:MAX_HISTORY_GROUPS] if len(ranked) > MAX_HISTORY_GROUPS else []
            points = await list_points(connection, asked, by, shown=shown)
        return History(step=step, by=by, points=tuple(points))

    async def namespaces(self) -> Sequence[str]:
        """Where anything was ever stored."""
        async with self._database.reading() as connection:
            return await list_namespaces(connection)

    async def drop_old(self) -> None:
        """Deletes hours and days that are older than `HISTORY_KEPT`."""
        for step, kept in HISTORY_KEPT.items():
            async with self._database.writing() as connection:
                await drop_history(connection, step, before=self._clock() - kept)


def _check(since: datetime, until: datetime, step: Step) -> None:
    longest = HISTORY_KEPT[step]
    if since < until and until - since <= longest:
        return
    way_out = "begin before the end" if since >= until else f"ask for {longest.days} days at a time"
    if step is Step.HOUR and since < until:
        way_out += ", or for days with step=day"
    raise ServerError(
        ErrorCode.INVALID_REQUEST,
        f"an answer with step={step} covers at most {longest.days} days, and not those from "
        f"{since:%Y-%m-%dT%H:%M:%SZ} to {until:%Y-%m-%dT%H:%M:%SZ}: {way_out}",
        limit=longest.days,
    )
