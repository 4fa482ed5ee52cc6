"""HistoryService: returns hits, misses and other counters by hour or day."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from graphstash_schema import ErrorCode
from graphstash_schema.history import (
    HISTORY_KEPT,
    MAX_GROUPED_STEPS,
    MAX_HISTORY_GROUPS,
    Grouping,
    History,
    HistoryQuery,
    Step,
)
from graphstash_server.clock import Ago, Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.history import (
    Selection,
    begin_of,
    drop_history,
    list_points,
    rank_groups,
)
from graphstash_server.errors import ServerError

__all__ = ["HistoryService"]

_DEFAULT_PERIOD: Final = {Step.HOUR: timedelta(days=1), Step.DAY: timedelta(days=30)}
_STEP_LENGTH: Final = {Step.HOUR: timedelta(hours=1), Step.DAY: timedelta(days=1)}


@dataclass(kw_only=True, eq=False)
class HistoryService:
    """Read the history that `Accounting` writes. Safe for concurrent calls."""

    database: Database
    clock: Clock

    def __post_init__(self) -> None:
        self._reading = asyncio.Semaphore(1)  # only one call at a time holds points in memory

    async def read(
        self, query: HistoryQuery, *, namespaces: Sequence[str] | None = None
    ) -> History:
        """Return the points of all steps of a period, including steps that its ends cut.

        Counts `namespaces` instead of the query's namespace. None means all namespaces. Groups
        beyond the `MAX_HISTORY_GROUPS` largest are summed as `OTHERS`.

        Raises:
            ServerError: 400 if the period is empty, longer than `HISTORY_KEPT`, or longer than
                `MAX_GROUPED_STEPS` with grouping.
        """
        step, by = query.step, query.by
        until = (query.until or self.clock()).astimezone(UTC)
        since = (query.since or until - _DEFAULT_PERIOD[step]).astimezone(UTC)
        _check(since, until, step, by)
        selection = Selection(step, begin_of(step, since), until, namespaces)
        async with self._reading, self.database.reading() as connection:
            shown: list[str] = []
            if by is not Grouping.NONE:
                ranked = await rank_groups(connection, selection, by, limit=MAX_HISTORY_GROUPS + 1)
                shown = ranked[:MAX_HISTORY_GROUPS] if len(ranked) > MAX_HISTORY_GROUPS else []
            points = await list_points(connection, selection, by, shown=shown)
        return History(step=step, by=by, points=tuple(points))

    async def drop_old(self, *, ago: Ago) -> None:
        """Delete points of steps that ended longer ago than `HISTORY_KEPT`."""
        for step, kept in HISTORY_KEPT.items():
            async with self.database.writing() as connection:
                await drop_history(connection, step, before=ago(kept) - _STEP_LENGTH[step])


def _check(since: datetime, until: datetime, step: Step, by: Grouping) -> None:
    kept = HISTORY_KEPT[step] // _STEP_LENGTH[step]
    most = kept if by is Grouping.NONE else min(kept, MAX_GROUPED_STEPS)
    steps = max(0, -(-(until - since) // _STEP_LENGTH[step]))
    if 0 < steps <= most:
        return
    advice = f"ask for {most} at a time" if steps else "begin before the end"
    if step is Step.HOUR and steps:
        advice += ", or for days with step=day"
    raise ServerError(
        ErrorCode.INVALID_REQUEST,
        f"an answer with step={step} and by={by} covers at most {most} {step}s, and from "
        f"{since:%Y-%m-%dT%H:%M:%SZ} to {until:%Y-%m-%dT%H:%M:%SZ} it is {steps}: {advice}",
        limit=most,
    )
