"""Statements on `history`."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Executable,
    and_,
    bindparam,
    case,
    delete,
    func,
    literal,
    select,
    text,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema.history import OTHERS, Grouping, HistoryPoint, Step
from graphstash_server.db.prepared import Prepared, Source, Transaction, is_one_of
from graphstash_server.db.queries.shared import (
    Upsert,
    array_values,
    given_rows,
    insert_in,
    new_values,
)
from graphstash_server.db.tables import history

__all__ = [
    "HISTORY_COLUMNS",
    "Group",
    "HistoryChange",
    "HistoryRow",
    "Selection",
    "add_history",
    "adding",
    "begin_of",
    "drop_history",
    "history_rows",
    "list_points",
    "rank_groups",
]

Group: TypeAlias = tuple[str, str, str]
"""Kind, device type and job."""

_STEP: Final = ("namespace", "step", "at")
_GROUP: Final = ("kind", "device_type", "job")


class HistoryChange(NamedTuple):
    """An increment of a row. The fields are the table's columns."""

    hits: int = 0
    misses: int = 0
    served_bytes: int = 0
    puts: int = 0
    saved_compile_seconds: float = 0.0

    def plus(self, other: "HistoryChange") -> "HistoryChange":
        """Return the sum of both changes."""
        return HistoryChange._make(a + b for a, b in zip(self, other, strict=True))


HistoryRow: TypeAlias = tuple[Any, ...]
"""Values of `HISTORY_COLUMNS`."""

HISTORY_COLUMNS: Final = (*_STEP, *_GROUP, *HistoryChange._fields)


def begin_of(step: Step, at: datetime) -> datetime:
    """Return the start of the step that contains a UTC time."""
    hour = 0 if step is Step.DAY else at.hour
    return at.replace(hour=hour, minute=0, second=0, microsecond=0)


async def history_rows(
    source: Source,
    changes: Mapping[str, Mapping[Group, HistoryChange]],
    hour: datetime,
    *,
    max_groups: int,
) -> list[HistoryRow]:
    """Return the hour rows and the day rows of changes by namespace and group, for `add_history`.

    Each hour or day of a namespace has at most `max_groups` rows, plus one row per kind for all
    further device types and jobs. Two servers that add rows at the same time may exceed the limit
    once.
    """
    if not changes:
        return []
    begins = {step: begin_of(step, hour) for step in Step}
    asked = [(name, step.value, at) for name in changes for step, at in begins.items()]
    given = {
        "names": list(changes),
        **{f"of_{step}": at for step, at in begins.items()},
        **array_values("asked", asked, _STEP),
    }
    known: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for namespace, step, *group in await _LIST_GROUPS.fetch(source, given):
        known.setdefault((namespace, step), set()).add(tuple(group))
    return [
        (namespace, step.value, at, *group, *change)
        for namespace, groups in changes.items()
        for step, at in begins.items()
        for group, change in _bounded(
            groups, known.get((namespace, step), set()), max_groups=max_groups
        ).items()
    ]


def _bounded(
    changes: Mapping[Group, HistoryChange], known: Collection[tuple[str, ...]], *, max_groups: int
) -> dict[Group, HistoryChange]:
    bounded: dict[Group, HistoryChange] = {}
    free = max_groups - len(known)
    for group, change in changes.items():
        shared = (group[0], "", "")
        if group not in known and group != shared:
            free -= 1
        place = group if group in known or free >= 0 else shared
        bounded[place] = bounded.get(place, HistoryChange()).plus(change)
    return bounded


def _list_groups(dialect: str) -> Executable:
    columns = [history.c[name] for name in ("namespace", "step", *_GROUP)]
    if dialect == "postgresql":
        # For one value of `at`, PostgreSQL could read the rows of all namespaces: it expects few
        # rows at a time that is later than its statistics.
        asked = given_rows("asked", history, _STEP)
        are_same = (history.c[name] == asked.c[name] for name in _STEP)
        return select(*columns).join(asked, and_(*are_same))
    return union_all(  # with OR instead of UNION, SQLite reads all rows of the namespace
        *(
            select(*columns).where(
                is_one_of(history.c.namespace, "names", dialect),
                history.c.step == literal(step.value, history.c.step.type),
                history.c.at == bindparam(f"of_{step}", type_=history.c.at.type),
            )
            for step in Step
        )
    )


_LIST_GROUPS = Prepared(_list_groups)


async def add_history(connection: Transaction, rows: Sequence[HistoryRow]) -> None:
    """Add rows of `history_rows`."""
    given = [dict(zip(_ADDED, row, strict=True)) for row in rows]
    await _ADD.execute_all(connection, given)


_ADDED: Final = [f"new_{name}" for name in HISTORY_COLUMNS]


def adding(statement: Upsert) -> Upsert:
    """Let an INSERT add to rows that exist."""
    return statement.on_conflict_do_update(
        index_elements=list(history.primary_key),
        set_={name: history.c[name] + statement.excluded[name] for name in HistoryChange._fields},
    )


_ADD = Prepared(
    lambda dialect: adding(insert_in(dialect, history).values(new_values(history, HISTORY_COLUMNS)))
)


class Selection(NamedTuple):
    """The rows to sum: steps that begin at or after `since` and before `until`, of the given
    namespaces. None means all namespaces.
    """

    step: Step
    since: datetime
    until: datetime
    namespaces: Sequence[str] | None


async def rank_groups(
    connection: AsyncConnection, selection: Selection, by: Grouping, *, limit: int
) -> list[str]:
    """Return the groups with the most hits and misses, largest first."""
    column = history.c[by.value]
    requests = func.sum(history.c.hits + history.c.misses)
    statement = (
        select(column)
        .where(*_conditions(connection, selection))
        .group_by(column)
        .order_by(requests.desc(), column)
        .limit(limit)
    )
    return list(await connection.scalars(statement, _parameters(selection)))


async def list_points(
    connection: AsyncConnection, selection: Selection, by: Grouping, *, shown: Sequence[str]
) -> list[HistoryPoint]:
    """Return the sums of each step and group, in order. If `shown` is not empty, `OTHERS` sums the
    groups outside of it. A thread builds the points, because there may be thousands.
    """
    group: ColumnElement[str] = literal("") if by is Grouping.NONE else history.c[by.value]
    if shown:
        is_shown = is_one_of(history.c[by.value], "shown", connection.dialect.name)
        group = case((is_shown, group), else_=OTHERS)
    sums = (func.sum(history.c[name]) for name in HistoryChange._fields)
    # PostgreSQL takes two copies of an expression with parameters for two expressions.
    order = (history.c.at, text("group_name"))
    statement = (
        select(history.c.at, group.label("group_name"), *sums)
        .where(*_conditions(connection, selection))
        .group_by(*order)
        .order_by(*order)
    )
    parameters = _parameters(selection) | ({"shown": shown} if shown else {})
    return await asyncio.to_thread(_points, await connection.execute(statement, parameters))


def _points(found: Iterable[Any]) -> list[HistoryPoint]:
    return [
        HistoryPoint(at=at, group=name, **HistoryChange(*counts)._asdict())
        for at, name, *counts in found
    ]


def _conditions(connection: AsyncConnection, selection: Selection) -> list[ColumnElement[bool]]:
    conditions = [
        history.c.step == selection.step.value,
        history.c.at >= selection.since,
        history.c.at < selection.until,
    ]
    if selection.namespaces is not None:
        conditions.append(is_one_of(history.c.namespace, "names", connection.dialect.name))
    return conditions


def _parameters(selection: Selection) -> dict[str, object]:
    return {} if selection.namespaces is None else {"names": selection.namespaces}


async def drop_history(connection: AsyncConnection, step: Step, *, before: datetime) -> int:
    """Delete steps that began before a time. Return the number of deleted rows."""
    statement = delete(history).where(history.c.step == step.value, history.c.at < before)
    return (await connection.execute(statement)).rowcount
