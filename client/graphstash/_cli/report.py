"""`graphstash report`: what the cache saved in a month, in Markdown for a manager."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from graphstash._cli.markdown import plain, table
from graphstash._cli.output import (
    Json,
    Url,
    count_progress,
    fail,
    format_bytes,
    format_seconds,
    load_config,
    print_json,
)
from graphstash._http.client import ServerClient
from graphstash.config import ClientConfig
from graphstash_schema import Namespace
from graphstash_schema.exit_status import ExitStatus
from graphstash_schema.history import (
    OTHERS,
    Grouping,
    HistoryPoint,
    HistoryQuery,
    HistorySums,
    Step,
)
from graphstash_schema.run import MAX_LISTED_RUNS, Run, RunMiss, RunQuery

__all__ = ["report"]

_GROUPINGS: Final = (Grouping.NAMESPACE, Grouping.JOB, Grouping.KIND, Grouping.DEVICE_TYPE)
_TITLES: Final = {
    Grouping.NAMESPACE: "By namespace",
    Grouping.JOB: "By job",
    Grouping.KIND: "By kind of artifact",
    Grouping.DEVICE_TYPE: "By device type",
}
_MAX_RUNS_READ: Final = 50
"""Maximum number of runs whose misses are read: those with the longest compile time."""
_SHOWN_MISSES: Final = 10


@dataclass
class MissSums:
    """Misses of one label in a namespace."""

    label: str
    namespace: str
    cause: str = ""
    misses: int = 0
    seconds: float = 0.0


@dataclass
class MonthReport:
    """Content of a report.

    Attributes:
        month: month, such as 2026-11.
        namespace: the only namespace of the report. None means all readable namespaces.
        total: counts of the whole month.
        by: groups by kind of grouping, longest saved compile time first.
        misses: labels with the longest compile time in `runs_read` runs.
        runs: number of runs that started in the month and that the server still has.
        runs_read: number of these runs whose misses were read.
        saved_wall_seconds: estimate of how much earlier all `runs` runs ended.
    """

    month: str
    namespace: str | None
    total: HistorySums
    by: dict[str, list[HistorySums]]
    misses: list[MissSums] = field(default_factory=list)
    runs: int = 0
    runs_read: int = 0
    saved_wall_seconds: float = 0.0


def report(
    *,
    month: Annotated[
        str | None, typer.Option(help="Month in UTC, e.g. `2026-11`. [default: this month]")
    ] = None,
    url: Url = None,
    namespace: Annotated[
        str | None, typer.Option(help="Only this namespace. [default: all that you may read]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what the cache saved in a month, in Markdown.

    The report shows the compile time that was saved, hit rates by namespace, job, kind and device
    type, and the programs that compiled longest. Example:

        graphstash report --month 2026-11 > november.md
    """
    config = load_config(url=url, namespace=namespace)
    since, until = _month(month)
    with closing(ServerClient(config)) as server:
        content = _read(server, since, until, namespace)
    if as_json:
        print_json(asdict(content))
    else:
        typer.echo(_markdown(content, since))


def _month(text: str | None) -> tuple[datetime, datetime]:
    now = datetime.now(UTC)
    try:
        since = datetime.strptime(text, "%Y-%m").replace(tzinfo=UTC) if text else now
    except ValueError:
        since = datetime.min.replace(tzinfo=UTC)
    if not 2000 <= since.year < 9998:
        fail(
            f"--month={text!r}: expected a year and a month, e.g. 2026-11", status=ExitStatus.USAGE
        )
    since = since.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    years, months = divmod(since.month, 12)
    return since, since.replace(year=since.year + years, month=months + 1)


def _read(
    server: ServerClient, since: datetime, until: datetime, namespace: str | None
) -> MonthReport:
    where = None if namespace is None else Namespace(namespace)

    def sums(by: Grouping) -> list[HistorySums]:
        query = HistoryQuery(since=since, until=until, step=Step.DAY, by=by, namespace=where)
        return _sums(server.history(query).points)

    groups: dict[str, list[HistorySums]] = {}
    for by in _GROUPINGS:
        if namespace is None or by is not Grouping.NAMESPACE:
            groups[by.value] = sums(by)
    (total,) = sums(Grouping.NONE) or [HistorySums()]
    content = MonthReport(f"{since:%Y-%m}", namespace, total, groups)
    names = [each.group for each in groups.get(Grouping.NAMESPACE.value, ()) if each.lookups]
    chosen = [namespace] if namespace is not None else [each for each in names if each != OTHERS]
    _add_runs(server.config, content, [Namespace(each) for each in chosen], since, until)
    return content


def _sums(points: Iterable[HistoryPoint]) -> list[HistorySums]:
    groups: dict[str, HistorySums] = {}
    for point in points:
        groups.setdefault(point.group, HistorySums(point.group)).add(point)
    return sorted(groups.values(), key=lambda each: (-each.saved_compile_seconds, each.group))


def _add_runs(
    config: ClientConfig,
    content: MonthReport,
    namespaces: Sequence[Namespace],
    since: datetime,
    until: datetime,
) -> None:
    """Add what runs have reported: their estimated time savings and their misses."""
    found: list[tuple[float, Namespace, Run]] = []
    with count_progress() as progress:
        for where in progress.track(namespaces, description="runs"):
            with closing(ServerClient(replace(config, namespace=where))) as server:
                for run in _runs_of(server, since, until):
                    seconds = sum(each.compile_seconds for each in run.counts)
                    found.append((seconds, where, run))
        found.sort(key=lambda each: -each[0])
        content.runs = len(found)
        content.saved_wall_seconds = sum(run.saved_wall_seconds for _, _, run in found)
        read = [each for each in found[:_MAX_RUNS_READ] if each[0] > 0]
        content.runs_read = len(read)
        sums: dict[tuple[str, str], MissSums] = {}
        for _, where, run in progress.track(read, description="misses"):
            with closing(ServerClient(replace(config, namespace=where))) as server:
                for miss in server.run(run.run).misses:
                    _add_miss(sums, where, miss)
    longest = sorted(sums.values(), key=lambda each: -each.seconds)
    content.misses = longest[:_SHOWN_MISSES]


def _runs_of(server: ServerClient, since: datetime, until: datetime) -> Iterator[Run]:
    """Yield the runs that started in a month. A server of an earlier release lists only its latest
    runs, of all months.
    """
    place: str | None = ""
    while place is not None:
        query = RunQuery(limit=MAX_LISTED_RUNS, since=since, until=until, after=place)
        page = server.runs(query)
        yield from (run for run in page.runs if since <= run.started_at < until)
        place = None if page.next == place else page.next


def _add_miss(sums: dict[tuple[str, str], MissSums], where: Namespace, miss: RunMiss) -> None:
    label = miss.label or miss.key.short
    each = sums.setdefault((where, label), MissSums(label, where))
    each.misses += 1
    each.seconds += miss.seconds
    each.cause = miss.cause or each.cause


# --- Markdown


def _markdown(content: MonthReport, since: datetime) -> str:
    total = content.total
    where = f", namespace {plain(content.namespace)}" if content.namespace else ""
    lines = [f"# graphstash in {since:%B %Y}{where}", ""]
    if total.hit_rate is None:
        lines += ["Nothing was looked up in this month, or no history of it is kept.", ""]
        return "\n".join(lines)
    lines.append(
        f"**{format_seconds(total.saved_compile_seconds)} of compile time was not spent.** "
        f"{total.hits:,} of {total.lookups:,} look-ups were hits "
        f"({total.hit_rate:.0%}); {format_bytes(total.served_bytes)} were served, and "
        f"{total.puts:,} artifacts were stored.\n\n"
        "This is the time of compilers, summed over all hosts: the computing that was not done, "
        "not how much earlier jobs ended.\n"
    )
    if content.saved_wall_seconds:
        lines.append(
            f"The runs of the month ({content.runs} that the server still has) ended about "
            f"{format_seconds(content.saved_wall_seconds)} earlier together, by their own "
            "estimate.\n"
        )
    for by in _GROUPINGS:
        lines += _groups(_TITLES[by], content.by.get(by.value, []))
    return "\n".join(lines + _misses(content))


def _groups(title: str, groups: Sequence[HistorySums]) -> list[str]:
    if not any(each.lookups for each in groups):
        return []
    rows = [
        (
            plain(each.group) or "not named",
            format_seconds(each.saved_compile_seconds),
            f"{each.hits:,}",
            f"{each.misses:,}",
            "" if each.hit_rate is None else f"{each.hit_rate:.0%}",
            format_bytes(each.served_bytes),
        )
        for each in groups
    ]
    titles = ("", "not spent", "hits", "misses", "hit rate", "served")
    return [f"## {title}", "", *table(titles, rows, numbers="-:::::")]


def _misses(content: MonthReport) -> list[str]:
    if not content.misses:
        return []
    rows = [
        (
            plain(each.label),
            plain(each.namespace),
            format_seconds(each.seconds),
            str(each.misses),
            plain(each.cause) or "not known",
        )
        for each in content.misses
    ]
    return [
        "## Compiled longest",
        "",
        f"Of the {content.runs_read} runs that compiled longest.",
        "",
        *table(("program", "namespace", "compiled", "times", "why"), rows, numbers="--::-"),
    ]
