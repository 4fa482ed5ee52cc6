"""Statements on `usage`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import bindparam, func, literal, or_, select, union_all, update
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import NamespaceStats
from graphstash_server.db.queries.upsert import insert_into
from graphstash_server.db.tables import artifacts, usage

__all__ = [
    "UsageChange",
    "add_counts",
    "add_usage",
    "list_usage",
    "recount_usage",
    "stored_bytes",
]


class UsageChange(NamedTuple):
    """What is added to the counters of one namespace; the fields are the table's columns."""

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

    def plus(self, other: "UsageChange") -> "UsageChange":
        """Both changes at once."""
        return UsageChange._make(a + b for a, b in zip(self, other, strict=True))


async def add_usage(connection: AsyncConnection, namespace: str, change: UsageChange) -> None:
    """Adds to a namespace's counters; the first change makes the row."""
    statement = insert_into(connection, usage).values(namespace=namespace, **change._asdict())
    statement = statement.on_conflict_do_update(
        index_elements=[usage.c.namespace],
        set_={name: usage.c[name] + statement.excluded[name] for name in UsageChange._fields},
    )
    await connection.execute(statement)


async def add_counts(connection: AsyncConnection, changes: Mapping[str, UsageChange]) -> None:
    """Adds to the counters of namespaces that have a row: those that something was stored in.

    Whoever asks for what is not there can name any number of namespaces, and makes no row.
    """
    parameters = [
        {"of_namespace": namespace}
        | {f"more_{name}": value for name, value in change._asdict().items()}
        for namespace, change in sorted(changes.items())
    ]
    if parameters:
        await connection.execute(_ADD_COUNTS, parameters)


_ADD_COUNTS = (
    update(usage)
    .where(usage.c.namespace == bindparam("of_namespace"))
    .values({name: usage.c[name] + bindparam(f"more_{name}") for name in UsageChange._fields})
)


async def list_usage(connection: AsyncConnection) -> Sequence[NamespaceStats]:
    """Every namespace that something was ever stored in, by name."""
    results = await connection.execute(select(usage).order_by(usage.c.namespace))
    return [NamespaceStats.model_validate(result._asdict()) for result in results]


async def stored_bytes(connection: AsyncConnection, namespace: str | None = None) -> int:
    """What the artifacts of one namespace, or of all, have together."""
    statement = select(func.coalesce(func.sum(usage.c.size_bytes), 0))
    if namespace is not None:
        statement = statement.where(usage.c.namespace == namespace)
    return int(await connection.scalar(statement) or 0)


async def recount_usage(connection: AsyncConnection, *, is_repair: bool) -> Sequence[str]:
    """Compares what is counted as stored with the artifacts, and mends it when asked to.

    Returns:
        The namespaces whose counters were wrong.
    """
    # One statement sees one state of both tables, so the differences hold whatever goes on.
    parts = union_all(
        select(
            artifacts.c.namespace,
            literal(1).label("more"),
            artifacts.c.size_bytes.label("more_bytes"),
        ),
        select(usage.c.namespace, -usage.c.artifacts, -usage.c.size_bytes),
    ).subquery()
    more, more_bytes = func.sum(parts.c.more), func.sum(parts.c.more_bytes)
    statement = (
        select(parts.c.namespace, more, more_bytes)
        .group_by(parts.c.namespace)
        .having(or_(more != 0, more_bytes != 0))
        .order_by(parts.c.namespace)
    )
    wrong = (await connection.execute(statement)).all()
    if is_repair:
        for namespace, count, size_bytes in wrong:
            change = UsageChange(artifacts=int(count), size_bytes=int(size_bytes))
            await add_usage(connection, namespace, change)
    return [namespace for namespace, *_ in wrong]
