"""The overview page: savings, misses and causes, running compilations, space and health."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from graphstash_schema import ErrorCode, Namespace, NamespaceStats, Scope, Withheld
from graphstash_schema.history import Grouping, HistoryPoint, HistoryQuery, HistorySums, Step
from graphstash_schema.run import Run, RunMiss, RunQuery
from graphstash_server.errors import ServerError
from graphstash_server.pages import charts, words
from graphstash_server.pages.visitor import Visitor
from graphstash_server.services.jobs.leases import HeldLease
from graphstash_server.services.metrics import Readiness
from graphstash_server.services.namespaces import Budget

__all__ = ["overview_of"]

_DAYS: Final = 30
_HOURS: Final = 48
_PERIODS: Final = {Step.DAY: timedelta(days=_DAYS - 1), Step.HOUR: timedelta(hours=_HOURS - 1)}

_MAX_LINES: Final = 5
"""Maximum number of lines in a chart: a reader could not tell more apart. The table beside it has
all groups."""

_MAX_ROWS: Final = 10
_MAX_NAMESPACES_SHOWN: Final = 50
_MAX_CHOICES: Final = 500
_NAMESPACES_WITH_RUNS: Final = 8
_RUNS_READ: Final = 10
"""Number of latest runs whose misses are read."""

_HEALTH_SECONDS: Final = 0.1
"""Seconds that the page waits for the probes of database and store. The page must appear at once,
even if a probe hangs."""

C = TypeVar("C", bound=StrEnum)


class NamedRun(NamedTuple):
    """A run and its namespace."""

    namespace: Namespace
    run: Run


@dataclass(slots=True)
class MissGroup:
    """A program that the latest runs compiled for one cause. `last` is the latest such run."""

    last: NamedRun
    miss: RunMiss
    times: int = 0
    seconds: float = 0.0


class SpaceRow(NamedTuple):
    """The space that a namespace uses."""

    stats: NamespaceStats
    used_bytes: int
    budget: Budget


async def overview_of(visitor: Visitor) -> dict[str, Any]:
    """Return the content of the page that its visitor may see."""
    query = visitor.request.query_params
    step = _choice(Step, query.get("step"), default=Step.DAY)
    by = _choice(Grouping, query.get("by"), default=Grouping.NONE)
    chosen = await visitor.enter(query["namespace"]) if query.get("namespace") else None
    everything = await visitor.statistics()
    stats = [each for each in everything.namespaces if chosen is None or each.namespace == chosen]
    listed = visitor.listed(stats)
    names = (
        None if chosen is None and visitor.may_see_server else [each.namespace for each in stats]
    )
    (saved, rates, runs, space), (herds, recent, withheld, readiness) = await asyncio.gather(
        asyncio.gather(
            _saved(visitor, names, stats),
            _rates(visitor, names, step, by),
            _runs(visitor, listed),
            _space(visitor, stats, is_whole=chosen is None),
        ),
        asyncio.gather(
            _herds(visitor, listed),
            visitor.context.catalog.latest(listed, limit=_MAX_ROWS),
            _withheld(visitor, chosen),
            _health(visitor),
        ),
    )
    return {
        "namespace": chosen or "",
        "choices": [each.namespace for each in everything.namespaces[:_MAX_CHOICES]],
        "step": step,
        "by": by,
        **saved,
        **rates,
        **runs,
        "herds": herds,
        "recent": recent,
        "withheld": withheld,
        "readiness": readiness,
        **space,
        "totals": everything if visitor.may_see_server else None,
    }


def _choice(choices: type[C], given: str | None, *, default: C) -> C:
    if not given:
        return default
    if given not in set(choices):
        raise ServerError(
            ErrorCode.INVALID_REQUEST, f"{given!r} is not one of {', '.join(choices)}"
        )
    return choices(given)


async def _saved(
    visitor: Visitor, names: Sequence[str] | None, stats: Sequence[NamespaceStats]
) -> dict[str, Any]:
    """Return what hits saved today, this month and ever, and on each of the last days."""
    now = visitor.now
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    days = [today - timedelta(days=number) for number in reversed(range(_DAYS))]
    since = min(days[0], today.replace(day=1))
    query = HistoryQuery(since=since, until=now, step=Step.DAY)
    history = await visitor.context.history.read(query, namespaces=names)
    of_day = {day: HistorySums(f"{day:%-d %b}") for day in days}
    of_today, of_month = HistorySums("today"), HistorySums("this month")
    for point in history.points:
        if point.at in of_day:
            of_day[point.at].add(point)
        if point.at >= today:
            of_today.add(point)
        if point.at >= today.replace(day=1):
            of_month.add(point)
    ever = HistorySums(
        "ever",
        hits=sum(each.hits for each in stats),
        misses=sum(each.misses for each in stats),
        served_bytes=sum(each.served_bytes for each in stats),
        saved_compile_seconds=sum(each.saved_seconds for each in stats),
    )
    shown = list(of_day.values())
    seconds = [each.saved_compile_seconds for each in shown]
    unit, written = _unit(max(seconds))
    chart = partial(
        charts.bars,
        f"Compile time saved on each of the last {_DAYS} days",
        [each.group for each in shown],
        [each / unit for each in seconds],
        written=written,
    )
    return {
        "periods": (of_today, of_month, ever),
        "days": shown,
        "saved_chart": chart if any(seconds) else None,
    }


def _unit(most_seconds: float) -> tuple[float, Callable[[float], str]]:
    """Return the unit in seconds and the format of marks for an axis of this length."""
    seconds, name = next(
        (seconds, name)
        for seconds, name in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
        if most_seconds >= 2 * seconds or name == "s"
    )
    return seconds, lambda value: f"{value:g} {name}"


async def _rates(
    visitor: Visitor, names: Sequence[str] | None, step: Step, by: Grouping
) -> dict[str, Any]:
    """Return the hit rate by group, over time and in total."""
    begin = visitor.now.replace(minute=0, second=0, microsecond=0)
    begin = begin.replace(hour=0) if step is Step.DAY else begin
    since = begin - _PERIODS[step]
    query = HistoryQuery(since=since, until=visitor.now, step=step, by=by)
    history = await visitor.context.history.read(query, namespaces=names)
    groups: dict[str, HistorySums] = {}
    points: dict[tuple[str, datetime], HistoryPoint] = {}
    for point in history.points:
        groups.setdefault(point.group, HistorySums(point.group)).add(point)
        points[point.group, point.at] = point
    ranked = sorted(groups.values(), key=lambda each: -each.lookups)
    one = timedelta(days=1) if step is Step.DAY else timedelta(hours=1)
    times = [since + number * one for number in range(_PERIODS[step] // one + 1)]
    form = "%-d %b" if step is Step.DAY else "%H:%M"
    series = {
        each.group: [_rate(points.get((each.group, at))) for at in times]
        for each in ranked[:_MAX_LINES]
    }
    chart = partial(
        charts.lines,
        "Hit rate over time" + (f" by {_word(by)}" if by is not Grouping.NONE else ""),
        [f"{at:{form}}" for at in times],
        series,
    )
    return {
        "groups": ranked,
        "max_lines": _MAX_LINES,
        "rate_chart": chart if any(each.lookups for each in ranked) else None,
        "times": [(at, [values[n] for values in series.values()]) for n, at in enumerate(times)],
        "lines": list(series),
        "by_word": _word(by),
        "by_choices": [(each, _word(each)) for each in Grouping],
        "step_choices": [(Step.DAY, f"{_DAYS} days"), (Step.HOUR, f"{_HOURS} hours")],
    }


def _word(by: Grouping) -> str:
    return "everything" if by is Grouping.NONE else by.value.replace("_", " ")


def _rate(point: HistoryPoint | None) -> float | None:
    if point is None or not point.hits + point.misses:
        return None
    return 100 * point.hits / (point.hits + point.misses)


async def _runs(visitor: Visitor, listed: Sequence[Namespace]) -> dict[str, Any]:
    """Return the latest runs, and what they compiled despite the cache."""
    context = visitor.context
    found = await asyncio.gather(
        *(
            context.runs.list_latest(where, RunQuery(limit=_RUNS_READ))
            for where in listed[:_NAMESPACES_WITH_RUNS]
        )
    )
    runs = [
        NamedRun(where, run)
        for where, list_ in zip(listed, found, strict=False)
        for run in list_.runs
    ]
    runs.sort(key=lambda each: each.run.started_at, reverse=True)
    runs = runs[:_RUNS_READ]
    compiled = [each for each in runs if each.run.sums.compiled]
    with_misses = await asyncio.gather(
        *(context.runs.find(each.namespace, each.run.run) for each in compiled)
    )
    missed = [
        (NamedRun(each.namespace, run), miss)
        for each, run in zip(compiled, with_misses, strict=True)
        if run is not None
        for miss in run.misses
    ]
    slowest = sorted(missed, key=lambda each: -each[1].seconds)[:_MAX_ROWS]
    return {"runs": runs, "misses": _hottest(missed), "slowest": slowest, "runs_read": _RUNS_READ}


def _hottest(missed: Iterable[tuple[NamedRun, RunMiss]]) -> list[MissGroup]:
    """Return the programs compiled most often. Among equals, the longest compile time is first."""
    groups: dict[tuple[str, ...], MissGroup] = {}
    for run, miss in missed:
        name = miss.label or miss.key.fingerprint
        group = groups.setdefault(
            (run.namespace, name, miss.key.kind, miss.cause), MissGroup(run, miss)
        )
        group.times += 1
        group.seconds += miss.seconds
    return sorted(groups.values(), key=lambda each: (-each.times, -each.seconds))[:_MAX_ROWS]


async def _herds(visitor: Visitor, listed: Sequence[Namespace]) -> list[HeldLease]:
    """Return the running compilations in namespaces that the visitor may write to."""
    writable = [where for where in listed if await visitor.may(Scope.WRITE, where)]
    if not writable:
        return []
    return await visitor.context.leases.list_held(writable, limit=_MAX_ROWS)


async def _withheld(visitor: Visitor, chosen: Namespace | None) -> Sequence[Withheld] | None:
    """Return the withheld artifacts, or None if the visitor does not administer them."""
    is_admin = (
        visitor.principal.is_administrator
        if chosen is None
        else await visitor.may(Scope.ADMIN, chosen)
    )
    if not is_admin:
        return None
    return (await visitor.context.quarantine.list_withheld(chosen)).artifacts


async def _health(visitor: Visitor) -> Readiness | None:
    """Return the result of the probes. If they take too long, return the last result or None."""
    try:
        async with asyncio.timeout(_HEALTH_SECONDS):
            return await visitor.context.health.check()
    except TimeoutError:
        return visitor.context.health.last


async def _space(
    visitor: Visitor, stats: Sequence[NamespaceStats], *, is_whole: bool
) -> dict[str, Any]:
    """Return used bytes and limits of namespaces, and of the store for permitted visitors."""
    used = [each.stored_bytes for each in stats]
    budgets = await visitor.context.space.of_namespaces([each.namespace for each in stats])
    rows = sorted(map(SpaceRow, stats, used, budgets), key=lambda row: -row.used_bytes)
    is_store = is_whole and visitor.may_see_server
    store = await visitor.context.space.of_store() if is_store else None
    most = None
    if store is not None:
        free = None if store.free_bytes is None else sum(used) + store.free_bytes
        limits = [each for each in (store.budget.hard_bytes, free) if each is not None]
        most = min(limits, default=None)
    elif len(rows) == 1:
        most = rows[0].budget.hard_bytes
    return {
        "used_bytes": sum(used),
        "artifact_count": sum(each.artifacts for each in stats),
        "store": store,
        "most_bytes": most,
        "fullness": _fullness(sum(used), most),
        "spaces": rows[:_MAX_NAMESPACES_SHOWN],
        "more_spaces": max(0, len(rows) - _MAX_NAMESPACES_SHOWN),
        "evictions": sum(each.evictions for each in stats),
        "evicted_bytes": sum(each.evicted_bytes for each in stats),
    }


def _fullness(used_bytes: int, most_bytes: int | None) -> str:
    if most_bytes is None:
        return "There is no limit."
    share = words.share(used_bytes, most_bytes)
    if used_bytes >= most_bytes:
        return f"Yes, it is full: {share}."
    return f"Nearly: {share}." if used_bytes >= 0.9 * most_bytes else f"No: {share}."
