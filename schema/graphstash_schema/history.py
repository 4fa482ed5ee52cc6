"""History: what a server did, by hour or by day, as `GET /v1/stats/history` gives it."""

from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Final

from pydantic import AwareDatetime, Field

from graphstash_schema.model import Items, WireModel
from graphstash_schema.stats import Count

__all__ = [
    "HISTORY_KEPT",
    "MAX_GROUPED_STEPS",
    "MAX_HISTORY_GROUPS",
    "OTHERS",
    "Grouping",
    "History",
    "HistoryPoint",
    "Step",
]


class Step(StrEnum):
    """How long one point lasts."""

    HOUR = "hour"
    DAY = "day"


HISTORY_KEPT: Final[Mapping[Step, timedelta]] = {
    Step.HOUR: timedelta(days=31),
    Step.DAY: timedelta(days=400),
}
"""How long a server keeps points, and the longest time that one answer covers."""

MAX_GROUPED_STEPS: Final = 400
"""Most hours or days of an answer that tells groups apart: it has 21 points for each of them."""

MAX_HISTORY_GROUPS: Final = 20
"""Most groups that one answer tells apart: those with the most hits and misses."""

OTHERS: Final = "(others)"
"""The group of all others; no namespace, kind, device type or job has that name."""


class Grouping(StrEnum):
    """What points are told apart by, beside their time."""

    NONE = "none"
    NAMESPACE = "namespace"
    KIND = "kind"
    DEVICE_TYPE = "device_type"
    JOB = "job"


class HistoryPoint(WireModel):
    """One step of one group."""

    at: AwareDatetime = Field(description="its beginning, UTC")
    group: str = Field(
        default="",
        description="the namespace, kind, device type or job; empty for calls without a job, and "
        "for jobs and device types beyond what a server tells apart in a step; `(others)` for all "
        "but the largest groups of the answer",
    )
    hits: Count = 0
    misses: Count = 0
    served_bytes: Count = 0
    puts: Count = 0
    saved_compile_seconds: float = Field(
        default=0.0, ge=0, description="compilers' time that hits avoided, summed"
    )


class History(WireModel):
    """Points in the order of their time; a step in which nothing happened has none."""

    step: Step
    by: Grouping
    points: Items[HistoryPoint]
