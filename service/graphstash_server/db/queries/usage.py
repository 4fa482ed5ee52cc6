"""Statements on `usage`. A namespace has a row if something was ever stored in it."""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, func, literal, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_server.db.prepared import NOTHING, Prepared, Row, Source, Transaction, is_one_of
from graphstash_server.db.queries.costs import MANIFEST_ENTRY_BYTES, METADATA_BYTES
from graphstash_server.db.queries.shared import Upsert, insert_in, new_values, prefixed
from graphstash_server.db.tables import artifacts, manifest_entries, usage

__all__ = [
    "UsageChange",
    "add_usage",
    "count_stored",
    "find_namespaces",
    "list_namespaces",
    "list_stored",
    "list_usage",
    "recount_usage",
    "stored_bytes",
]


class UsageChange(NamedTuple):
    """Amounts to add to the counters of one namespace, one per column of the table."""

    artifacts: int = 0
    size_bytes: int = 0
    hits: int = 0
    misses: int = 0
    served_bytes: int = 0
    puts: int = 0
    conflicts: int = 0
    saved_seconds: float = 0.0
    evictions: int = 0
    evicted_bytes: int = 0
    metadata_bytes: int = 0
    manifest_bytes: int = 0

    def plus(self, other: "UsageChange") -> "UsageChange":
        """Return the sum, field by field."""
        return UsageChange._make(a + b for a, b in zip(self, other, strict=True))


async def add_usage(connection: Transaction, namespace: str, change: UsageChange) -> None:
    """Add to a namespace's counters, and create its row if necessary."""
    parameters = prefixed("new_", {"namespace": namespace, **change._asdict()})
    await _ADD_USAGE.execute(connection, parameters)


def _add_usage(dialect: str) -> Upsert:
    statement = insert_in(dialect, usage).values(
        new_values(usage, ("namespace", *UsageChange._fields))
    )
    return statement.on_conflict_do_update(
        index_elements=[usage.c.namespace],
        set_={name: usage.c[name] + statement.excluded[name] for name in UsageChange._fields},
    )


_ADD_USAGE = Prepared(_add_usage)


async def find_namespaces(source: Source, names: Sequence[str]) -> set[str]:
    """Return those of `names` that have a row."""
    return {name for (name,) in await _FIND.fetch(source, {"names": names})}


_FIND = Prepared(
    lambda dialect: select(usage.c.namespace).where(is_one_of(usage.c.namespace, "names", dialect))
)


async def list_usage(source: Source) -> Sequence[Row]:
    """Return the namespace and the fields of `UsageChange` of each row, ordered by namespace."""
    return await _LIST.fetch(source, NOTHING)


_LIST = Prepared(
    lambda _: select(usage.c.namespace, *(usage.c[name] for name in UsageChange._fields)).order_by(
        usage.c.namespace
    )
)


_STORED: ColumnElement[int] = usage.c.size_bytes + usage.c.metadata_bytes + usage.c.manifest_bytes


async def list_stored(source: Source) -> Sequence[Row]:
    """Return the namespace of each row, and its bytes that count against a limit."""
    return await _LIST_STORED.fetch(source, NOTHING)


_LIST_STORED = Prepared(lambda _: select(usage.c.namespace, _STORED).order_by(usage.c.namespace))


async def list_namespaces(connection: AsyncConnection) -> Sequence[str]:
    """Return all namespaces that have a row."""
    return (await connection.scalars(select(usage.c.namespace))).all()


async def stored_bytes(connection: AsyncConnection, namespace: str | None = None) -> int:
    """Return the bytes that count against a limit, of one namespace or of all."""
    statement = select(func.coalesce(func.sum(_STORED), 0))
    if namespace is not None:
        statement = statement.where(usage.c.namespace == namespace)
    return int(await connection.scalar(statement) or 0)


async def count_stored(connection: AsyncConnection) -> int:
    """Return the number of all artifacts."""
    statement = select(func.coalesce(func.sum(usage.c.artifacts), 0))
    return int(await connection.scalar(statement) or 0)


async def recount_usage(connection: AsyncConnection) -> dict[str, UsageChange]:
    """Count artifacts and manifest entries again. Return the namespaces whose counters differ, and
    the changes that correct them.

    Every transaction changes rows and counters together, so concurrent writes change no difference:
    it can be added later, once.
    """
    # One statement reads all tables at the same time, so concurrent writes cause no difference.
    counted = [
        select(
            artifacts.c.namespace,
            literal(1).label("artifacts"),
            artifacts.c.size_bytes,
            METADATA_BYTES.label("metadata_bytes"),
            literal(0).label("manifest_bytes"),
        ),
        select(
            manifest_entries.c.namespace,
            *(literal(0) for _ in range(3)),
            literal(MANIFEST_ENTRY_BYTES),
        ),
        select(usage.c.namespace, *(-usage.c[name] for name in _RECOUNTED)),
    ]
    parts = union_all(*counted).subquery()
    differences = [func.sum(parts.c[name]) for name in _RECOUNTED]
    statement = (
        select(parts.c.namespace, *differences)
        .group_by(parts.c.namespace)
        .having(or_(*(difference != 0 for difference in differences)))
        .order_by(parts.c.namespace)
    )
    return {
        namespace: UsageChange(**dict(zip(_RECOUNTED, map(int, found), strict=True)))
        for namespace, *found in await connection.execute(statement)
    }


_RECOUNTED = ("artifacts", "size_bytes", "metadata_bytes", "manifest_bytes")
