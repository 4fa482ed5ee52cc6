"""Run: what the cache did for one run of a job.

Each process reports its part some time after its last program, and when it ends. A repeated
report replaces the earlier one. A run is either all processes that one `graphstash run` started, or
a single process that installed the cache.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, NamedTuple

from pydantic import AwareDatetime, Field

from graphstash_schema.errors import ErrorCode
from graphstash_schema.explanation import MAX_LABEL_CHARACTERS
from graphstash_schema.key import ArtifactKey, ArtifactKind, DeviceType
from graphstash_schema.model import Items, RequestModel, WireModel
from graphstash_schema.names import LINE, ManifestName, Word
from graphstash_schema.stats import Count

__all__ = [
    "MAX_LISTED_RUNS",
    "MAX_RUN_AHEAD",
    "MAX_RUN_BYTES",
    "MAX_RUN_COUNTS",
    "MAX_RUN_MISSES",
    "MAX_RUN_SECONDS",
    "RUNS_KEPT",
    "Run",
    "RunCounts",
    "RunList",
    "RunMiss",
    "RunName",
    "RunQuery",
    "RunReport",
    "RunSums",
    "RunTimes",
]

MAX_RUN_COUNTS: Final = 32
"""Maximum pairs of kind and device type in one report."""

MAX_RUN_MISSES: Final = 64
"""Maximum misses in one report: the misses that took longest to compile."""

MAX_RUN_BYTES: Final = 64 * 1024
"""Maximum size of a report. A process with more to report names fewer misses."""

MAX_LISTED_RUNS: Final = 100
"""Maximum runs in one `RunList`."""

RUNS_KEPT: Final = timedelta(days=90)
"""How long a server keeps a report, unless other reports need the space."""

MAX_RUN_AHEAD: Final = timedelta(days=1)
"""How far a run's start may lie after the server's time, because clocks differ."""

MAX_RUN_SECONDS: Final = 1e9
"""Maximum duration in a report. The server caps sums of reports at it."""

Seconds = Annotated[float, Field(ge=0, le=MAX_RUN_SECONDS)]
Start = Annotated[
    AwareDatetime,
    Field(ge=datetime(2000, 1, 1, tzinfo=UTC), lt=datetime(9999, 1, 1, tzinfo=UTC)),
]
Line = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS, pattern=LINE)]


class RunName(Word):
    """Name of a run, or of a process in a run: 1 to 64 characters, safe in a path."""

    __slots__ = ()
    form = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
    what = "run name"
    code = ErrorCode.INVALID_NAME


class RunCounts(RequestModel):
    """What the cache did for one kind on one device type.

    Every hit counts once, by the source of its bytes.
    """

    kind: ArtifactKind
    device_type: DeviceType
    hits_server: Count = Field(
        default=0, description="fetched when they were needed, from the server or another rank"
    )
    hits_prefetched: Count = Field(default=0, description="fetched before they were needed")
    hits_host: Count = Field(default=0, description="were on this host before the run began")
    misses: Count = Field(default=0, description="compiled because the cache did not have them")
    fallbacks: Count = Field(default=0, description="compiled because the cache could not help")
    compile_seconds: Seconds = Field(default=0.0, description="spent on misses and fallbacks")
    saved_compile_seconds: Seconds = Field(
        default=0.0, description="sum of the compile times that the publishers of the hits measured"
    )


class RunMiss(RequestModel):
    """One program that was compiled."""

    key: ArtifactKey
    label: Line = Field(default="", description="what its user calls it; shown, never trusted")
    seconds: Seconds = Field(description="compile time")
    cause: Line = Field(default="", description="why it missed, in words; empty when unknown")


class RunReport(RequestModel):
    """Report of one process so far."""

    job: ManifestName | None = Field(default=None, description="the job that this is a run of")
    program: Line = Field(default="", description="the script's name, without its arguments")
    producer: Line = Field(default="", description="user@host:process")
    started_at: Start = Field(description="by the clock of its host")
    seconds: Seconds = Field(description="from the start of the process to its end")
    saved_wall_seconds: Seconds = Field(
        default=0.0,
        description="estimate of how much earlier the process ended: the union of the intervals "
        "in which it would have compiled without the hits, less the time of the look-ups",
    )
    counts: Items[RunCounts] = Field(default=(), max_length=MAX_RUN_COUNTS)
    misses: Items[RunMiss] = Field(default=(), max_length=MAX_RUN_MISSES)


class RunTimes(WireModel):
    """When a process was ready, in seconds since its start.

    These are query parameters of a report, because servers of earlier releases refuse unknown
    fields of the body and ignore unknown parameters. None if the process does not report the time.
    """

    first_step_seconds: Seconds | None = Field(
        default=None,
        description="until the training loop of graphstash (`train`) had made its first step: all "
        "programs of the step were there, and the device may still have computed it",
    )
    last_program_seconds: Seconds | None = Field(
        default=None,
        description="until the process had found or compiled the last program that it needed; "
        "this may be long after its first step",
    )


class RunSums(NamedTuple):
    """What the cache did in a run, summed over all kinds and device types. See `RunCounts`."""

    hits_server: int
    hits_prefetched: int
    hits_host: int
    misses: int
    fallbacks: int
    compile_seconds: float
    saved_compile_seconds: float

    @property
    def hits(self) -> int:
        """Hits from all sources."""
        return self.hits_server + self.hits_prefetched + self.hits_host

    @property
    def compiled(self) -> int:
        """Misses and fallbacks."""
        return self.misses + self.fallbacks


class Run(WireModel):
    """One run: the sums of its processes' counts, and the maximum of their times.

    Job, program and producer are those of the process that started first.
    """

    run: RunName
    job: ManifestName | None = None
    program: str = ""
    producer: str = ""
    started_at: AwareDatetime
    seconds: float
    processes: Count
    saved_wall_seconds: float = Field(description="maximum over the processes")
    first_step_seconds: float | None = Field(
        default=None,
        description="maximum over the processes that report it, see `RunTimes`; null: none does",
    )
    last_program_seconds: float | None = Field(
        default=None,
        description="maximum over the processes that report it, see `RunTimes`; null: none does",
    )
    counts: Items[RunCounts] = Field(
        default=(),
        description="pairs with the most hits, misses and fallbacks, `MAX_RUN_COUNTS` at most",
    )
    misses: Items[RunMiss] = Field(
        default=(),
        description="the longest first, each key once, `MAX_RUN_MISSES` at most; only in the "
        "response for a single run",
    )

    @property
    def sums(self) -> RunSums:
        """Sums over all counts."""
        return RunSums(
            *(sum(getattr(each, name) for each in self.counts) for name in RunSums._fields)
        )


class RunQuery(WireModel):
    """Which runs to list."""

    job: ManifestName | None = Field(default=None, description="only runs of this job")
    limit: int = Field(default=20, ge=1, le=MAX_LISTED_RUNS, description="maximum number of runs")
    since: AwareDatetime | None = Field(
        default=None, description="only runs that started at this time or later"
    )
    until: AwareDatetime | None = Field(
        default=None, description="only runs that started before this time"
    )
    after: str = Field(
        default="", max_length=256, description="`next` of the page before; empty for the first"
    )


class RunList(WireModel):
    """Runs, the latest report first."""

    runs: Items[Run]
    next: str | None = Field(
        default=None, description="`after` of the next page; null on the last page"
    )
