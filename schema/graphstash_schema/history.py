"""History: what a server did, by hour or by day, as `GET /v1/stats/history` gives it."""

from enum import StrEnum

from pydantic import AwareDatetime, Field

from graphstash_schema.model import Items, WireModel
from graphstash_schema.stats import Count

__all__ = ["Grouping", "History", "HistoryPoint", "Step"]


class Step(StrEnum):
    """How long one point lasts."""

    HOUR = "hour"
    DAY = "day"


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
    group: str = Field(default="", description="the namespace, kind, device type or job")
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
