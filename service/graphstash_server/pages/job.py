"""A job's page with its runs side by side, and a run's page with its misses and their causes."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, Final

from graphstash_schema import ErrorCode, ManifestName, Scope
from graphstash_schema.run import Run, RunName, RunQuery
from graphstash_server.errors import ServerError
from graphstash_server.pages import charts
from graphstash_server.pages.visitor import Visitor
from graphstash_server.pages.words import duration

__all__ = ["job_of", "run_of"]

_MAX_RUNS: Final = 20

_SLOWER_BY: Final = 0.25
_SLOWER_BY_SECONDS: Final = 1.0
"""By how much a run must exceed the median of the runs before to be called slower: by this share of
the median and by this time. Start times of equal runs vary."""

_READY: Final = {
    "first_step_seconds": ("Time to the first step", "made its first step"),
    "last_program_seconds": ("Time to the last program", "had its last program"),
}
"""Name of each time in `RunTimes`, and what a run did after it, for the page. A job's page shows
the first one that a run of the job has reported."""


async def job_of(visitor: Visitor) -> dict[str, Any]:
    """Return the content of a job's page."""
    where = await visitor.enter(visitor.request.path_params["namespace"])
    job = ManifestName(visitor.request.path_params["name"])
    query = RunQuery(job=job, limit=_MAX_RUNS)
    runs = (await visitor.context.runs.list_latest(where, query)).runs
    entries = await visitor.context.manifests.get(where, job)
    if not runs and not entries:
        raise ServerError(
            ErrorCode.NOT_FOUND,
            f"no run of a job {job} in the namespace {where} has reported, and it has no manifest",
        )
    earliest_first = sorted(runs, key=lambda run: run.started_at)
    compiled = [run.sums.compiled for run in earliest_first]
    labels = [f"{run.started_at:%-d %b %H:%M}" for run in earliest_first]
    chart = partial(
        charts.bars,
        f"Programs compiled in each of the last {len(runs)} runs, the latest on the right",
        labels,
        compiled,
        written="{:g}".format,
        marks=[0, max(compiled, default=0)],
    )
    rate_chart = partial(
        charts.lines,
        f"Hit rate of each of the last {len(runs)} runs, the latest on the right",
        labels,
        {"hit rate": [_rate(run) for run in earliest_first]},
    )
    return {
        "namespace": where,
        "job": job,
        "runs": earliest_first[::-1],
        "chart": chart if any(compiled) else None,
        "rate_chart": rate_chart if len(runs) > 1 else None,
        "ready": _ready(earliest_first, labels),
        "most_before": max(compiled[:-1], default=None),
        "entries": len(entries),
        "used_at": max((each.used_at for each in entries), default=None),
        "device_types": _device_types(runs),
        "may_administer": visitor.session is not None and await visitor.may(Scope.ADMIN, where),
    }


async def run_of(visitor: Visitor) -> dict[str, Any]:
    """Return the content of a run's page."""
    where = await visitor.enter(visitor.request.path_params["namespace"])
    name = RunName(visitor.request.path_params["run"])
    run = await visitor.context.runs.find(where, name)
    if run is None:
        raise ServerError(
            ErrorCode.NOT_FOUND, f"no run {name} in the namespace {where} has reported"
        )
    return {
        "namespace": where,
        "run": run,
        "sums": run.sums,
        "causes": _causes(run),
    }


def _ready(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, Any] | None:
    """Return when the runs, earliest first, were ready, and compare the latest with the median of
    those before. Return None if no run has reported it.
    """
    by_field = {field: [getattr(run, field) for run in runs] for field in _READY}
    field = next((each for each in _READY if any(by_field[each])), None)
    if field is None:
        return None
    name, what = _READY[field]
    *before, latest = by_field[field]
    earlier = [each for each in before if each is not None]
    usual = median(earlier) if earlier else None
    more = 0.0 if latest is None or usual is None else latest - usual
    chart = partial(
        charts.bars,
        f"{name} of each of the last {len(runs)} runs, the latest on the right",
        labels,
        [each or 0 for each in by_field[field]],
        written=duration,
        marks=[0, max(each or 0 for each in by_field[field])],
    )
    return {
        "name": name,
        "what": what,
        "latest": latest,
        "median": usual,
        "runs_before": len(earlier),
        "more": more,
        "is_slower": more > _SLOWER_BY_SECONDS and more > _SLOWER_BY * (usual or 0.0),
        "chart": chart if len(runs) > 1 else None,
    }


def _rate(run: Run) -> float | None:
    """Return the share of programs that the run found, in percent, or None if it needed none."""
    needed = run.sums.hits + run.sums.compiled
    return 100 * run.sums.hits / needed if needed else None


def _device_types(runs: tuple[Run, ...]) -> list[str]:
    return sorted({count.device_type for run in runs for count in run.counts})


def _causes(run: Run) -> list[tuple[str, int, float]]:
    """Return the causes with their number of programs and seconds, most frequent first."""
    causes: defaultdict[str, list[float]] = defaultdict(list)
    for miss in run.misses:
        causes[miss.cause].append(miss.seconds)
    found = [(cause, len(seconds), sum(seconds)) for cause, seconds in causes.items()]
    return sorted(found, key=lambda each: (-each[1], -each[2]))
