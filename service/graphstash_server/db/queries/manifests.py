"""Statements on `manifest_entries`."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, and_, bindparam, case, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import ManifestEntry, ManifestName, Namespace
from graphstash_server.db.queries.shared import insert_into, key_values, stored_key
from graphstash_server.db.tables import manifest_entries as entries
from graphstash_server.keys import StoredKey

__all__ = [
    "add_run",
    "count_entries",
    "drop_unused_entries",
    "list_entries",
    "list_unused",
    "trim_entries",
]

_ORDER = (
    entries.c.used_at.desc(),
    entries.c.runs.desc(),
    entries.c.fingerprint,
    entries.c.kind,
    entries.c.device_type,
)
"""Most recently used first; the rest only makes the order one and the same every time."""


async def add_run(
    connection: AsyncConnection,
    name: ManifestName,
    keys: Sequence[StoredKey],
    *,
    writer: str,
    now: datetime,
) -> None:
    """Adds the keys that one run of a writer used, and counts the run for those that are there. An
    entry that another writer used, too, belongs to nobody from then on.
    """
    statement = insert_into(connection, entries)
    new = statement.excluded
    statement = statement.on_conflict_do_update(
        index_elements=list(entries.primary_key),
        set_={
            "used_at": new.used_at,
            "runs": entries.c.runs + 1,
            "writer": case((entries.c.writer == new.writer, new.writer), else_=""),
        },
    )
    run = {"name": name, "used_at": now, "runs": 1, "writer": writer}
    parameters = [{**key_values(key), **run} for key in keys]
    await connection.execute(statement, parameters)


async def count_entries(
    connection: AsyncConnection, namespace: Namespace, name: ManifestName | None = None
) -> int:
    """How many entries a manifest has, or all of a namespace."""
    statement = select(func.count()).select_from(entries).where(entries.c.namespace == namespace)
    if name is not None:
        statement = statement.where(entries.c.name == name)
    return int(await connection.scalar(statement) or 0)


async def list_entries(
    connection: AsyncConnection, namespace: Namespace, name: ManifestName
) -> list[ManifestEntry]:
    """The entries of one manifest, most recently used first; none when there is no manifest."""
    results = await connection.execute(
        select(entries).where(_of(namespace, name)).order_by(*_ORDER)
    )
    return [
        ManifestEntry(
            key=stored_key(result).key,
            used_at=result.used_at,
            runs=result.runs,
        )
        for result in results
    ]


async def drop_unused_entries(
    connection: AsyncConnection, namespace: str, *, before: datetime
) -> int:
    """Deletes entries of a namespace that no run used since a time; returns how many."""
    statement = delete(entries).where(entries.c.namespace == namespace, entries.c.used_at < before)
    return (await connection.execute(statement)).rowcount


async def list_unused(connection: AsyncConnection, *, before: datetime) -> Sequence[str]:
    """Namespaces with entries that no run used since a time."""
    statement = select(entries.c.namespace).distinct().where(entries.c.used_at < before)
    return (await connection.scalars(statement)).all()


async def trim_entries(
    connection: AsyncConnection,
    namespace: Namespace,
    name: ManifestName | None = None,
    *,
    keep: int,
) -> None:
    """Deletes all but the most recently used entries of a manifest, or of a namespace.

    It keeps as many of each writer: nobody pushes out the entries of others, or those that several
    have used.
    """
    chosen = entries.c.namespace == namespace
    if name is not None:
        chosen = _of(namespace, name)
    key = (entries.c.name, entries.c.fingerprint, entries.c.kind, entries.c.device_type)
    order = (*_ORDER, entries.c.name)
    turn = func.row_number().over(partition_by=entries.c.writer, order_by=order)
    surplus = select(*key).where(chosen).order_by(turn, *order).offset(keep)
    parameters = [
        {f"old_{column}": value for column, value in row._asdict().items()}
        for row in await connection.execute(surplus)
    ]
    if parameters:
        is_old = and_(*(column == bindparam(f"old_{column.name}") for column in key))
        await connection.execute(
            delete(entries).where(entries.c.namespace == namespace, is_old), parameters
        )


def _of(namespace: Namespace, name: ManifestName) -> ColumnElement[bool]:
    return and_(entries.c.namespace == namespace, entries.c.name == name)
