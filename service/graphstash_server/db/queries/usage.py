"""Statements on `usage`."""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import NamespaceStats
from graphstash_server.db.queries.upsert import insert_into
from graphstash_server.db.tables import usage

__all__ = ["UsageChange", "add_usage", "list_usage", "stored_bytes"]


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


async def list_usage(connection: AsyncConnection) -> Sequence[NamespaceStats]:
    """Every namespace that was ever used, by name."""
    results = await connection.execute(select(usage).order_by(usage.c.namespace))
    return [NamespaceStats.model_validate(result._asdict()) for result in results]


async def stored_bytes(connection: AsyncConnection) -> int:
    """What all artifacts together have."""
    total = await connection.scalar(select(func.coalesce(func.sum(usage.c.size_bytes), 0)))
    return int(total or 0)
