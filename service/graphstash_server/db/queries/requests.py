"""Add counts of requests to `artifacts`, `usage` and `history`, in one transaction.

On PostgreSQL, one statement does that for many namespaces. It skips rows that another transaction
has locked. So it waits for no lock, and a server that freezes after it holds none.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Update,
    bindparam,
    null,
    select,
    union_all,
    update,
)

from graphstash_server.db.prepared import Prepared, Transaction
from graphstash_server.db.queries.history import (
    HISTORY_COLUMNS,
    Group,
    HistoryChange,
    add_history,
    adding,
    history_rows,
)
from graphstash_server.db.queries.shared import (
    KEY_COLUMNS,
    are_keys,
    array_values,
    given_rows,
    insert_in,
    keys_parameters,
    prefixed,
    same_key,
)
from graphstash_server.db.tables import artifacts, history, usage
from graphstash_server.eviction_order import aged
from graphstash_server.keys import StoredKey

__all__ = ["Requests", "Skipped", "UsageCounts", "Uses", "add_requests"]

Uses = Sequence[tuple[StoredKey, int]]
"""Hits of artifacts, sorted by namespace and number. SQLite adds one number to many artifacts in
one statement: a statement per artifact would hold the interpreter's lock and delay requests."""


class UsageCounts(NamedTuple):
    """Amounts to add to columns of `usage`."""

    hits: int = 0
    misses: int = 0
    served_bytes: int = 0
    conflicts: int = 0
    saved_seconds: float = 0.0


class Requests(NamedTuple):
    """Requests of one namespace, in total and by group."""

    total: UsageCounts
    groups: Mapping[Group, HistoryChange]


class Skipped(NamedTuple):
    """Counts whose rows were locked."""

    uses: Uses = ()
    namespaces: Sequence[str] = ()


async def add_requests(
    connection: Transaction,
    uses: Uses,
    requests: Mapping[str, Requests],
    *,
    now: datetime,
    hour: datetime,
    max_groups: int,
    waits: bool = False,
) -> Skipped:
    """Add hits to artifacts that were used until now, and requests to namespaces, in their hour.

    A request creates no row of `usage`, because clients can request any number of namespaces. With
    `waits`, PostgreSQL waits for locked rows, so pass either uses or one namespace: a transaction
    must lock artifacts before `usage`, and this statement does not.
    """
    rows = await history_rows(
        connection,
        {name: each.groups for name, each in requests.items()},
        hour,
        max_groups=max_groups,
    )
    common = {"used_at": now, "aged": aged(now)}
    if connection.dialect.name == "sqlite":
        groups = groupby(uses, key=lambda use: (use[0].namespace, use[1]))
        given = [
            {**common, **keys_parameters([key for key, _ in group]), "more_hits": hits}
            for (_, hits), group in groups
        ]
        await _TOUCH.execute_all(connection, given)
        given = [
            {"of_namespace": name, **prefixed("more_", each.total._asdict())}
            for name, each in requests.items()
        ]
        await _COUNT.execute_all(connection, given)
        await add_history(connection, rows)
        return Skipped()
    arrays = {
        **array_values("used", [(*key.columns, hits) for key, hits in uses], _USED),
        **array_values(
            "counted", [(name, *each.total) for name, each in requests.items()], _COUNTED
        ),
        **array_values("added", rows, HISTORY_COLUMNS),
    }
    skipped = await _ADD[waits].fetch(connection, {**common, **arrays})
    return Skipped(
        [uses[number - 1] for number, _ in skipped if number is not None],
        [namespace for _, namespace in skipped if namespace is not None],
    )


def _touch(condition: ColumnElement[bool], more_hits: ColumnElement[int]) -> Update:
    return (
        update(artifacts)
        .where(condition)
        .values(
            hits=artifacts.c.hits + more_hits,
            last_used_at=bindparam("used_at", type_=artifacts.c.last_used_at.type),
            eviction_rank=artifacts.c.density + bindparam("aged", type_=artifacts.c.density.type),
        )
    )


_TOUCH = Prepared(lambda dialect: _touch(are_keys(artifacts, dialect), bindparam("more_hits")))
_COUNT = Prepared(
    lambda _: (
        update(usage)
        .where(usage.c.namespace == bindparam("of_namespace"))
        .values({name: usage.c[name] + bindparam(f"more_{name}") for name in UsageCounts._fields})
    )
)

_USED: Final = (*KEY_COLUMNS, "hits")
_COUNTED: Final = ("namespace", *UsageCounts._fields)


def _add(_dialect: str, *, waits: bool) -> CompoundSelect[Any]:
    used = given_rows("used", artifacts, _USED)
    counted = given_rows("counted", usage, _COUNTED)
    added = given_rows("added", history, HISTORY_COLUMNS)
    free = (
        select(used.c.number, used.c.hits, *(artifacts.c[name] for name in KEY_COLUMNS))
        .join(artifacts, same_key(artifacts, used))
        .order_by(*artifacts.primary_key)
        .with_for_update(of=artifacts, skip_locked=not waits)
        .cte("free")
    )
    touched = _touch(same_key(artifacts, free), free.c.hits).returning(free.c.number).cte("touched")
    open_ = (
        select(*counted.c)
        .join(usage, usage.c.namespace == counted.c.namespace)
        .order_by(usage.c.namespace)
        .with_for_update(of=usage, skip_locked=not waits)
        .cte("open")
    )
    counts = (
        update(usage)
        .where(usage.c.namespace == open_.c.namespace)
        .values({name: usage.c[name] + open_.c[name] for name in UsageCounts._fields})
        .returning(usage.c.namespace)
        .cte("counts")
    )
    is_counted = added.c.namespace.in_(select(counts.c.namespace))
    rows = select(*(added.c[name] for name in HISTORY_COLUMNS)).where(is_counted)
    insert = insert_in("postgresql", history).from_select(HISTORY_COLUMNS, rows)
    return union_all(
        select(used.c.number, null().label("namespace")).where(
            used.c.number.not_in(select(touched.c.number)),
            select(artifacts.c.hits).where(same_key(artifacts, used)).exists(),
        ),
        select(null(), counted.c.namespace).where(
            counted.c.namespace.not_in(select(counts.c.namespace))
        ),
    ).add_cte(adding(insert).cte("inserted"))


_ADD = {waits: Prepared(partial(_add, waits=waits)) for waits in (False, True)}
