"""History: a server's activity per hour or day, from `GET /v1/stats/history`."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Final

from pydantic import AwareDatetime, Field

from graphstash_schema.model import Items, WireModel
from graphstash_schema.names import Namespace
from graphstash_schema.stats import Count

__all__ = [
    "HISTORY_KEPT",
    "MAX_GROUPED_STEPS",
    "MAX_HISTORY_GROUPS",
    "OTHERS",
    "Grouping",
    "History",
    "HistoryPoint",
    "HistoryQuery",
    "HistorySums",
    "Step",
]


class Step(StrEnum):
    """Duration of one point."""

    HOUR = "hour"
    DAY = "day"


HISTORY_KEPT: Final[Mapping[Step, timedelta]] = {
    Step.HOUR: timedelta(days=31),
    Step.DAY: timedelta(days=400),
}
"""How long a server keeps points. This is also the maximum time range of one response."""

MAX_GROUPED_STEPS: Final = 400
"""Maximum hours or days in a response with groups. Each has up to 21 points."""

MAX_HISTORY_GROUPS: Final = 20
"""Maximum groups in one response besides `OTHERS`: those with the most hits and misses."""

OTHERS: Final = "(others)"
"""Group that sums the remaining groups. No namespace, kind, device type or job has this name."""


class Grouping(StrEnum):
    """How points are grouped, in addition to time."""

    NONE = "none"
    NAMESPACE = "namespace"
    KIND = "kind"
    DEVICE_TYPE = "device_type"
    JOB = "job"


_Time = Annotated[
    AwareDatetime,
    Field(ge=datetime(1900, 1, 1, tzinfo=UTC), lt=datetime(9999, 1, 1, tzinfo=UTC)),
]
"""A time from which a default period can be subtracted. Clocks that were never set show 1970."""


class HistoryQuery(WireModel):
    """Which steps to return, and how to group them."""

    since: _Time | None = Field(
        default=None,
        description="a time in the first step, such as 2026-01-31T00:00:00Z; default: a day (for "
        "hours) or 30 days (for days) before `until`",
    )
    until: _Time | None = Field(
        default=None, description="the last step begins before this time; default: now"
    )
    step: Step = Field(default=Step.HOUR, description="duration of one point")
    by: Grouping = Field(default=Grouping.NONE, description="how to group points besides by time")
    namespace: Namespace | None = Field(default=None, description="count only this namespace")


class HistoryPoint(WireModel):
    """One step of one group."""

    at: AwareDatetime = Field(description="its beginning, UTC")
    group: str = Field(
        default="",
        description="the namespace, kind, device type or job that the point counts; empty without "
        "grouping, for calls without a job, and for jobs and device types beyond the 128 "
        "combinations with a kind that a server counts separately per namespace and step; "
        "`(others)` for the sum of all but the largest groups of the response",
    )
    hits: Count = 0
    misses: Count = 0
    served_bytes: Count = 0
    puts: Count = 0
    saved_compile_seconds: float = Field(
        default=0.0, ge=0, description="compilers' time that hits avoided, summed"
    )


@dataclass
class HistorySums:
    """The sums of a group's points."""

    group: str = ""
    hits: int = 0
    misses: int = 0
    served_bytes: int = 0
    puts: int = 0
    saved_compile_seconds: float = 0.0

    def add(self, point: HistoryPoint) -> None:
        """Add a point."""
        self.hits += point.hits
        self.misses += point.misses
        self.served_bytes += point.served_bytes
        self.puts += point.puts
        self.saved_compile_seconds += point.saved_compile_seconds

    @property
    def lookups(self) -> int:
        """Number of hits and misses."""
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float | None:
        """Hit rate from 0 to 1, or None without look-ups."""
        return self.hits / self.lookups if self.lookups else None


class History(WireModel):
    """Points in order of time. A step without activity has no point."""

    step: Step
    by: Grouping
    points: Items[HistoryPoint]
