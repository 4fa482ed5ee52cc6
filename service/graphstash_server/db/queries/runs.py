"""Statements on `runs`."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, delete, func, literal, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema.run import RunQuery
from graphstash_server.db.queries.shared import upsert
from graphstash_server.db.tables import runs

__all__ = [
    "HeldRun",
    "ReportRow",
    "count_processes",
    "delete_old_runs",
    "delete_runs",
    "find_writer",
    "list_latest",
    "list_reports",
    "list_runs",
    "put_report",
    "size_of",
]


class ReportRow(NamedTuple):
    """The report of one process, by column. `list_reports` needs `misses` last."""

    namespace: str
    run: str
    process: str
    job: str
    writer: str
    reported_at: datetime
    size_bytes: int
    program: str
    producer: str
    started_at: datetime
    seconds: float
    saved_wall_seconds: float
    first_step_seconds: float | None
    last_program_seconds: float | None
    counts: str
    misses: str


class HeldRun(NamedTuple):
    """A run's share of the limits."""

    namespace: str
    run: str
    writer: str
    reports: int
    size_bytes: int


async def put_report(connection: AsyncConnection, row: ReportRow) -> None:
    """Store a report, or replace the earlier one of the same process."""
    await connection.execute(upsert(connection, runs, row._asdict()))


async def find_writer(connection: AsyncConnection, namespace: str, run: str) -> str | None:
    """Return the caller that reported a run, or None."""
    statement = select(runs.c.writer).where(_is_run(namespace, run)).limit(1)
    return (await connection.execute(statement)).scalar()


async def count_processes(
    connection: AsyncConnection, namespace: str, run: str, *, but: str
) -> int:
    """Return how many processes other than `but` have reported a run."""
    statement = (
        select(func.count()).select_from(runs).where(_is_run(namespace, run), runs.c.process != but)
    )
    return int(await connection.scalar(statement) or 0)


async def size_of(
    connection: AsyncConnection, *, namespace: str | None = None, writer: str | None = None
) -> tuple[int, int]:
    """Return the number of reports of a namespace or a caller, and their bytes."""
    statement = select(func.count(), func.coalesce(func.sum(runs.c.size_bytes), 0)).where(
        _of(namespace, writer)
    )
    reports, size_bytes = (await connection.execute(statement)).one()
    return int(reports), int(size_bytes)


async def list_runs(
    connection: AsyncConnection, *, namespace: str | None = None, writer: str | None = None
) -> list[HeldRun]:
    """Return the runs of a namespace or of a caller, latest report last."""
    key = (runs.c.namespace, runs.c.run, runs.c.writer)
    statement = (
        select(*key, func.count(), func.sum(runs.c.size_bytes))
        .where(_of(namespace, writer))
        .group_by(*key)
        .order_by(func.max(runs.c.reported_at), *key)
    )
    return [
        HeldRun(where, run, by, int(reports), int(size_bytes))
        for where, run, by, reports, size_bytes in await connection.execute(statement)
    ]


async def delete_runs(connection: AsyncConnection, held: Sequence[HeldRun]) -> None:
    """Delete all reports of runs."""
    for each in held:
        await connection.execute(delete(runs).where(_is_run(each.namespace, each.run)))


async def delete_old_runs(connection: AsyncConnection, *, before: datetime, limit: int) -> int:
    """Delete up to `limit` reports older than `before`. Return their number."""
    key = tuple(runs.primary_key)
    is_old = runs.c.reported_at < before
    old = select(*key).where(is_old).order_by(runs.c.reported_at).limit(limit)
    return (await connection.execute(delete(runs).where(tuple_(*key).in_(old)))).rowcount


async def list_latest(
    connection: AsyncConnection,
    namespace: str,
    query: RunQuery,
    *,
    after: tuple[datetime, str] | None = None,
) -> list[tuple[str, int, int, datetime]]:
    """Return runs, latest report first: name, processes, bytes, and time of the latest report.

    `after` is the last run of the page before: time of its latest report, and its name.
    """
    last = func.max(runs.c.reported_at)
    statement = (
        select(runs.c.run, func.count(), func.sum(runs.c.size_bytes), last)
        .where(runs.c.namespace == namespace)
        .group_by(runs.c.run)
        .order_by(last.desc(), runs.c.run)
        .limit(query.limit)
    )
    if query.job is not None:
        statement = statement.where(runs.c.job == query.job)
    if query.since is not None:
        statement = statement.having(func.min(runs.c.started_at) >= query.since)
    if query.until is not None:
        statement = statement.having(func.min(runs.c.started_at) < query.until)
    if after is not None:
        at, name = after
        statement = statement.having(or_(last < at, and_(last == at, runs.c.run > name)))
    rows = await connection.execute(statement)
    return [(name, int(count), int(size_bytes), at) for name, count, size_bytes, at in rows]


async def list_reports(
    connection: AsyncConnection, namespace: str, names: Sequence[str], *, with_misses: bool
) -> list[ReportRow]:
    """Return all reports of some runs. Without `with_misses`, their `misses` are `[]`."""
    columns = [runs.c[name] for name in ReportRow._fields if name != "misses"]
    misses = runs.c.misses if with_misses else literal("[]")
    statement = select(*columns, misses).where(runs.c.namespace == namespace, runs.c.run.in_(names))
    return [ReportRow._make(row) for row in await connection.execute(statement)]


def _is_run(namespace: str, run: str) -> ColumnElement[bool]:
    return and_(runs.c.namespace == namespace, runs.c.run == run)


def _of(namespace: str | None, writer: str | None) -> ColumnElement[bool]:
    return or_(
        *([runs.c.namespace == namespace] if namespace is not None else []),
        *([runs.c.writer == writer] if writer is not None else []),
    )
