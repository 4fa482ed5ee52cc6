"""Merge the reports of a run's processes."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from graphstash_schema import ArtifactKey
from graphstash_schema.run import (
    MAX_RUN_COUNTS,
    MAX_RUN_MISSES,
    Run,
    RunCounts,
    RunMiss,
    RunName,
    RunReport,
)

__all__ = ["sum_of"]


def sum_of(run: RunName, reports: Mapping[RunName, RunReport]) -> Run:
    """Merge the reports of a run's processes into one `Run`."""
    _, first = min(reports.items(), key=lambda each: (each[1].started_at, each[0]))
    every = tuple(reports.values())
    sums: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for counts in (counts for each in every for counts in each.counts):
        sums[counts.kind, counts.device_type].update(
            counts.model_dump(exclude={"kind", "device_type"})
        )
    longest: dict[ArtifactKey, RunMiss] = {}
    for miss in sorted((miss for each in every for miss in each.misses), key=_seconds):
        longest[miss.key] = miss
    return Run(
        run=run,
        job=first.job,
        program=first.program,
        producer=first.producer,
        started_at=first.started_at,
        seconds=max(each.seconds for each in every),
        processes=len(every),
        saved_wall_seconds=max(each.saved_wall_seconds for each in every),
        counts=tuple(
            RunCounts.model_validate({"kind": kind, "device_type": device_type, **counts})
            for (kind, device_type), counts in sums.items()
        )[:MAX_RUN_COUNTS],
        misses=tuple(sorted(longest.values(), key=_seconds, reverse=True))[:MAX_RUN_MISSES],
    )


def _seconds(miss: RunMiss) -> float:
    return miss.seconds
