"""A job's page with its runs side by side, and a run's page with its misses and their causes."""

from collections import defaultdict
from functools import partial
from typing import Any, Final

from graphstash_schema import ErrorCode, ManifestName, Scope
from graphstash_schema.run import Run, RunName
from graphstash_server.errors import ServerError
from graphstash_server.pages import charts
from graphstash_server.pages.visitor import Visitor

__all__ = ["job_of", "run_of"]

_MAX_RUNS: Final = 20


async def job_of(visitor: Visitor) -> dict[str, Any]:
    """Return the content of a job's page."""
    where = await visitor.enter(visitor.request.path_params["namespace"])
    job = ManifestName(visitor.request.path_params["name"])
    runs = (await visitor.context.runs.list_latest(where, job=job, limit=_MAX_RUNS)).runs
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
