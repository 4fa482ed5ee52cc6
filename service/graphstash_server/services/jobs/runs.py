"""RunService: stores the reports of processes, and sums them up per run.

Any caller that may read a namespace may report to it, once something was stored in it. So each
caller has a limit over all namespaces, and each namespace has a limit.

If a caller exceeds its limit, the server deletes the caller's oldest runs. If a namespace exceeds
its limit, the server deletes the oldest runs of the caller with the largest share, so that no
caller can displace the reports of a smaller one. A run belongs to its first reporter.
"""

import asyncio
import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic_core import from_json

from graphstash_schema import ErrorCode, ManifestName, Namespace
from graphstash_schema.run import (
    MAX_RUN_AHEAD,
    MAX_RUN_COUNTS,
    MAX_RUN_MISSES,
    MAX_RUN_SECONDS,
    RUNS_KEPT,
    Run,
    RunCounts,
    RunList,
    RunMiss,
    RunName,
    RunQuery,
    RunReport,
    RunTimes,
)
from graphstash_schema.stats import MAX_COUNT
from graphstash_server.clock import Ago, Clock, parsed_time
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.locks import lock_name
from graphstash_server.db.queries.runs import (
    HeldRun,
    ReportRow,
    count_processes,
    delete_old_runs,
    delete_runs,
    find_writer,
    list_latest,
    list_reports,
    list_runs,
    put_report,
    size_of,
)
from graphstash_server.db.queries.shared import KNOWN_KINDS
from graphstash_server.db.queries.usage import find_namespaces
from graphstash_server.errors import ServerError

__all__ = ["MAX_PROCESSES", "MAX_REPORTS", "MAX_REPORT_BYTES", "RunService"]

MAX_PROCESSES: Final = 512
"""Maximum number of processes with a report of one run."""

MAX_REPORTS: Final = 16_384
MAX_REPORT_BYTES: Final = 64 * 1024**2
"""Limits of one namespace, and of one caller over all namespaces."""

_LEFT: Final = 7 / 8
"""Share of a limit to which a deletion reduces, so that not every report causes a deletion."""

_ROW_BYTES: Final = 512
"""Estimated bytes of a row and its index entries, without the reported counts and misses."""

_MAX_LISTED_BYTES: Final = 8 * 1024**2
_MAX_LISTED_REPORTS: Final = 8192
"""Limits of the reports that one list reads. If necessary, it has fewer runs, but at least one."""

_PRUNED_AT_ONCE: Final = 500

_COUNTS: Final = TypeAdapter(tuple[RunCounts, ...])
_MISSES: Final = TypeAdapter(tuple[RunMiss, ...])


@dataclass(kw_only=True, eq=False)
class RunService:
    """Store, list and sum up reports. Safe for concurrent calls."""

    database: Database
    clock: Clock
    max_reports: int = MAX_REPORTS
    max_bytes: int = MAX_REPORT_BYTES

    def __post_init__(self) -> None:
        self._summing = asyncio.Semaphore(1)  # the GIL would serialize the sums anyway

    async def put(
        self,
        namespace: Namespace,
        run: RunName,
        process: RunName,
        report: RunReport,
        times: RunTimes,
        *,
        writer: str,
    ) -> None:
        """Store the report of a process in place of its previous one.

        Raises:
            ServerError: 400 if the run begins more than `MAX_RUN_AHEAD` in the future; 404 if
                nothing was ever stored in the namespace; 409 if the run belongs to another caller;
                413 if the run has too many processes.
        """
        now = self.clock()
        if report.started_at - now > MAX_RUN_AHEAD:
            raise ServerError(
                ErrorCode.INVALID_REQUEST,
                f"the run began at {report.started_at:%Y-%m-%dT%H:%M:%S%z}, more than "
                f"{MAX_RUN_AHEAD.days} day after {now:%Y-%m-%dT%H:%M:%S%z}, the time of this "
                "server: set the clock of the job's host",
                limit=MAX_RUN_AHEAD.days,
            )
        if not await find_namespaces(self.database, [namespace]):
            raise ServerError(
                ErrorCode.NOT_FOUND,
                f"nothing was ever stored in the namespace {namespace}, so it keeps no reports of "
                "runs: publish an artifact first",
            )
        counts = _COUNTS.dump_json(report.counts, exclude_defaults=True).decode()
        misses = _MISSES.dump_json(report.misses, exclude_defaults=True).decode()
        row = ReportRow(
            namespace=namespace,
            run=run,
            process=process,
            job=report.job or "",
            writer=writer,
            reported_at=now,
            size_bytes=_ROW_BYTES + len(counts.encode()) + len(misses.encode()),
            program=report.program,
            producer=report.producer,
            started_at=report.started_at,
            seconds=report.seconds,
            saved_wall_seconds=report.saved_wall_seconds,
            first_step_seconds=times.first_step_seconds,
            last_program_seconds=times.last_program_seconds,
            counts=counts,
            misses=misses,
        )
        await self._store(row)

    async def _store(self, row: ReportRow) -> None:
        """Store a report, and delete the oldest ones that exceed a limit."""
        namespace, run, writer = row.namespace, row.run, row.writer
        async with self.database.writing() as connection:
            await lock_name(connection, f"runs {namespace}")
            owner = await find_writer(connection, namespace, run)
            if owner not in (None, writer):
                raise ServerError(
                    ErrorCode.CONFLICT,
                    f"the run {run} in the namespace {namespace} was reported by another caller: "
                    "choose another name",
                )
            others = await count_processes(connection, namespace, run, but=row.process)
            if others >= MAX_PROCESSES:
                raise ServerError(
                    ErrorCode.TOO_LARGE,
                    f"{others} processes of the run {run} have reported, and the limit is "
                    f"{MAX_PROCESSES}: send no further reports",
                    limit=MAX_PROCESSES,
                )
            await put_report(connection, row)
            if self._is_too_much(*await size_of(connection, writer=writer)):
                held = await list_runs(connection, writer=writer)
                await delete_runs(connection, self._surplus(held))
            if self._is_too_much(*await size_of(connection, namespace=namespace)):
                held = await list_runs(connection, namespace=namespace)
                await delete_runs(connection, self._surplus(held))

    async def list_latest(self, namespace: Namespace, query: RunQuery) -> RunList:
        """Return a page of runs, latest report first.

        Raises:
            ServerError: 400 if `after` does not have the form of a page's `next`.
        """
        after = _parse(query.after) if query.after else None
        async with self._summing:  # only one call at a time holds reports in memory
            async with self.database.reading() as connection:
                latest = await list_latest(connection, namespace, query, after=after)
                names: list[str] = []
                processes = size_bytes = 0
                for name, count, size, _ in latest:
                    processes += count
                    size_bytes += size
                    if names and (
                        processes > _MAX_LISTED_REPORTS or size_bytes > _MAX_LISTED_BYTES
                    ):
                        break
                    names.append(name)
                reports = await list_reports(connection, namespace, names, with_misses=False)
            of_run: defaultdict[str, list[ReportRow]] = defaultdict(list)
            for report in reports:
                of_run[report.run].append(report)
            runs = await asyncio.to_thread(
                lambda: tuple(_sum(of_run[name]) for name in names if of_run[name])
            )
        has_more = len(names) == query.limit or len(names) < len(latest)
        end = latest[len(names) - 1] if has_more and names else None
        return RunList(runs=runs, next=f"{end[3].isoformat()}/{end[0]}" if end else None)

    async def find(self, namespace: Namespace, run: RunName) -> Run | None:
        """Return one run with its misses, or None if it has no report."""
        async with self._summing:
            async with self.database.reading() as connection:
                reports = await list_reports(connection, namespace, [run], with_misses=True)
            return await asyncio.to_thread(_sum, reports) if reports else None

    async def drop_old(self, *, ago: Ago) -> None:
        """Delete reports that are older than `RUNS_KEPT`, in short transactions."""
        before = ago(RUNS_KEPT)
        dropped = _PRUNED_AT_ONCE
        while dropped == _PRUNED_AT_ONCE:
            async with self.database.writing() as connection:
                dropped = await delete_old_runs(connection, before=before, limit=_PRUNED_AT_ONCE)

    def _is_too_much(self, reports: int, size_bytes: int) -> bool:
        return reports > self.max_reports or size_bytes > self.max_bytes

    def _surplus(self, held: Sequence[HeldRun]) -> list[HeldRun]:
        """Choose the runs to delete from `held` (oldest first): repeatedly the oldest run of the
        caller with the largest share, until at most `_LEFT` of each limit remains.
        """
        of_writer: defaultdict[str, deque[HeldRun]] = defaultdict(deque)
        share: defaultdict[str, float] = defaultdict(float)
        for run in held:
            of_writer[run.writer].append(run)
            share[run.writer] += self._share(run)
        reports = sum(run.reports for run in held)
        size_bytes = sum(run.size_bytes for run in held)
        largest = [(-each, writer) for writer, each in share.items()]
        heapq.heapify(largest)
        surplus = []
        while (
            reports > self.max_reports * _LEFT or size_bytes > self.max_bytes * _LEFT
        ) and largest:
            negative_share, writer = largest[0]
            run = of_writer[writer].popleft()
            surplus.append(run)
            reports -= run.reports
            size_bytes -= run.size_bytes
            if of_writer[writer]:
                heapq.heapreplace(largest, (negative_share + self._share(run), writer))
            else:
                heapq.heappop(largest)
        return surplus

    def _share(self, run: HeldRun) -> float:
        return max(run.reports / self.max_reports, run.size_bytes / self.max_bytes)


def _parse(text: str) -> tuple[datetime, str]:
    at, _, name = text.partition("/")
    try:
        return parsed_time(at), RunName(name)
    except (ValueError, OverflowError):
        raise ServerError(
            ErrorCode.INVALID_REQUEST,
            f"after={text[:120]!r} does not come from a page: use its `next` as it is, or leave it "
            "out to begin",
        ) from None


def _sum(reports: Sequence[ReportRow]) -> Run:
    """Combine the reports of a run. May take a second, so call it in a thread."""
    first = min(reports, key=lambda each: (each.started_at, each.process))
    return Run(
        run=RunName(first.run),
        job=ManifestName(first.job) if first.job else None,
        program=first.program,
        producer=first.producer,
        started_at=first.started_at,
        seconds=max(each.seconds for each in reports),
        processes=len(reports),
        saved_wall_seconds=max(each.saved_wall_seconds for each in reports),
        first_step_seconds=_maximum(each.first_step_seconds for each in reports),
        last_program_seconds=_maximum(each.last_program_seconds for each in reports),
        counts=_sum_counts(count for each in reports for count in from_json(each.counts)),
        misses=_longest(miss for each in reports for miss in from_json(each.misses)),
    )


def _maximum(seconds: Iterable[float | None]) -> float | None:
    return max((each for each in seconds if each is not None), default=None)


_SUMMED: Final = [name for name in RunCounts.model_fields if name not in ("kind", "device_type")]
_REQUESTS: Final = ("hits_server", "hits_prefetched", "hits_host", "misses", "fallbacks")
_MAX_SUM: Final = {
    name: MAX_RUN_SECONDS if name.endswith("_seconds") else MAX_COUNT for name in _SUMMED
}


def _sum_counts(reported: Iterable[dict[str, Any]]) -> tuple[RunCounts, ...]:
    """Sum counts by kind and device type. Skip kinds that this release does not have."""
    sums: dict[tuple[str, str], dict[str, float]] = {}
    for counts in reported:
        if counts["kind"] in KNOWN_KINDS:
            group = (counts["kind"], counts["device_type"])
            fields = sums.setdefault(group, dict.fromkeys(_SUMMED, 0))
            for name in _SUMMED:
                fields[name] = min(fields[name] + counts.get(name, 0), _MAX_SUM[name])

    def order(group: tuple[str, str]) -> tuple[float, tuple[str, str]]:
        return -sum(sums[group][name] for name in _REQUESTS), group

    return tuple(
        RunCounts.model_validate({"kind": group[0], "device_type": group[1], **sums[group]})
        for group in heapq.nsmallest(MAX_RUN_COUNTS, sums, key=order)
    )


def _longest(reported: Iterable[dict[str, Any]]) -> tuple[RunMiss, ...]:
    longest: dict[tuple[str, ...], dict[str, Any]] = {}
    for miss in reported:
        key = tuple(miss["key"].values())
        if miss["key"]["kind"] in KNOWN_KINDS and (
            key not in longest or longest[key]["seconds"] < miss["seconds"]
        ):
            longest[key] = miss

    def order(key: tuple[str, ...]) -> tuple[float, tuple[str, ...]]:
        return -longest[key]["seconds"], key

    return tuple(
        RunMiss.model_validate(longest[key])
        for key in heapq.nsmallest(MAX_RUN_MISSES, longest, key=order)
    )
