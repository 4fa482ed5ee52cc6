"""Statements on `manifest_entries`."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Integer,
    Select,
    String,
    and_,
    bindparam,
    case,
    delete,
    func,
    literal,
    select,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import ManifestName, Namespace
from graphstash_server.db.prepared import Prepared, Source, Transaction
from graphstash_server.db.queries.shared import (
    KNOWN_KINDS,
    Upsert,
    insert_in,
    key_values,
    new_values,
    prefixed,
)
from graphstash_server.db.tables import manifest_entries as entries
from graphstash_server.db.tables import usage
from graphstash_server.keys import StoredKey

__all__ = [
    "StoredEntry",
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
"""Most recently used first. The other columns make the order deterministic."""


class StoredEntry(NamedTuple):
    """An artifact that runs of a job used. A tuple, because building 4,096 models is slow."""

    kind: str
    device_type: str
    fingerprint: str
    used_at: datetime
    runs: int
    writer: str

    @property
    def name(self) -> tuple[str, str, str]:
        """Kind, device type and fingerprint, which identify the artifact in its namespace."""
        return self.kind, self.device_type, self.fingerprint


async def add_run(
    connection: Transaction,
    name: ManifestName,
    keys: Sequence[StoredKey],
    *,
    writer: str,
    now: datetime,
) -> None:
    """Add an entry for each key that a run used, or count the run in the existing entry. The
    `writer` of an entry becomes empty if a second writer uses it.
    """
    run = {"new_name": name, "new_used_at": now, "new_writer": writer}
    if connection.dialect.name == "postgresql":
        columns = {
            f"new_{column}": [key_values(key)[column] for key in keys]
            for column in _ARTIFACT_COLUMNS
        }
        await _ADD.execute(connection, {"new_namespace": keys[0].namespace, **columns, **run})
        return
    await _ADD.execute_all(
        connection, [{**prefixed("new_", key_values(key)), **run} for key in keys]
    )


_ARTIFACT_COLUMNS = ("fingerprint", "kind", "device_type")


def _add(dialect: str) -> Upsert:
    """Build the statement. On SQLite it adds one row, on PostgreSQL one row per array item."""
    names = ("namespace", "name", *_ARTIFACT_COLUMNS, "used_at", "writer", "runs")
    values: dict[str, ColumnElement[Any]] = {**new_values(entries, names), "runs": literal(1)}
    statement = insert_in(dialect, entries)
    if dialect == "postgresql":
        arrays = [bindparam(f"new_{column}", type_=ARRAY(String)) for column in _ARTIFACT_COLUMNS]
        keys = func.unnest(*arrays).table_valued(*_ARTIFACT_COLUMNS).render_derived()
        values |= {column: keys.c[column] for column in _ARTIFACT_COLUMNS}
        statement = statement.from_select(list(values), select(*values.values()))
    else:
        statement = statement.values(values)
    new = statement.excluded
    return statement.on_conflict_do_update(
        index_elements=list(entries.primary_key),
        set_={
            "used_at": new.used_at,
            "runs": entries.c.runs + 1,
            "writer": case((entries.c.writer == new.writer, new.writer), else_=""),
        },
    )


_ADD = Prepared(_add)


async def count_entries(
    source: Source, namespace: Namespace, name: ManifestName | None = None
) -> int:
    """Return the number of entries of a manifest, or of a namespace."""
    found = await _COUNT[name is not None].fetch_one(source, _parameters(namespace, name))
    return int(found[0]) if found is not None else 0


async def list_entries(
    source: Source, namespace: Namespace, name: ManifestName
) -> list[StoredEntry]:
    """Return the entries of `KNOWN_KINDS` in a manifest, if any, most recently used first."""
    found = await _LIST.fetch(source, _parameters(namespace, name))
    return [StoredEntry(*row) for row in found if row[0] in KNOWN_KINDS]


async def drop_unused_entries(
    connection: AsyncConnection, namespace: str, *, before: datetime
) -> int:
    """Delete entries of a namespace that were last used before a time. Return their number."""
    statement = delete(entries).where(entries.c.namespace == namespace, entries.c.used_at < before)
    return (await connection.execute(statement)).rowcount


async def list_unused(connection: AsyncConnection, *, before: datetime) -> Sequence[str]:
    """Return the namespaces with entries that were last used before a time."""
    is_unused = and_(entries.c.namespace == usage.c.namespace, entries.c.used_at < before)
    statement = select(usage.c.namespace).where(select(entries.c.name).where(is_unused).exists())
    return (await connection.scalars(statement)).all()


async def trim_entries(
    connection: Transaction,
    namespace: Namespace,
    name: ManifestName | None = None,
    *,
    keep: int,
) -> None:
    """Delete entries of a manifest, or of a namespace, until `keep` are left.

    Keep entries of all writers in turn, the most recently used first, so that a writer with many
    entries cannot displace others. Entries used by several writers count as one more writer's.
    """
    if await count_entries(connection, namespace, name) <= keep:
        return
    surplus = await _SURPLUS[name is not None].fetch(
        connection, {**_parameters(namespace, name), "keep": keep}
    )
    parameters = [f"old_{column.name}" for column in _KEY]
    await _DELETE.execute_all(
        connection,
        [{"of_namespace": namespace, **dict(zip(parameters, row, strict=True))} for row in surplus],
    )


def _parameters(namespace: Namespace, name: ManifestName | None) -> dict[str, str]:
    return {"of_namespace": namespace} | ({"of_name": name} if name is not None else {})


def _count(chosen: ColumnElement[bool]) -> Select[Any]:
    return select(func.count()).select_from(entries).where(chosen)


def _surplus(chosen: ColumnElement[bool]) -> Select[Any]:
    order = (*_ORDER, entries.c.name)
    turn = func.row_number().over(partition_by=entries.c.writer, order_by=order)
    keep = bindparam("keep", type_=Integer)
    return select(*_KEY).where(chosen).order_by(turn, *order).offset(keep)


_KEY = (entries.c.name, entries.c.fingerprint, entries.c.kind, entries.c.device_type)
_OF_NAMESPACE = entries.c.namespace == bindparam("of_namespace")
_OF_NAME = and_(_OF_NAMESPACE, entries.c.name == bindparam("of_name"))

_LIST = Prepared(
    lambda _: (
        select(*(entries.c[name] for name in StoredEntry._fields)).where(_OF_NAME).order_by(*_ORDER)
    )
)
_COUNT = {
    False: Prepared(lambda _: _count(_OF_NAMESPACE)),
    True: Prepared(lambda _: _count(_OF_NAME)),
}
_SURPLUS = {
    False: Prepared(lambda _: _surplus(_OF_NAMESPACE)),
    True: Prepared(lambda _: _surplus(_OF_NAME)),
}
_DELETE = Prepared(
    lambda _: delete(entries).where(
        _OF_NAMESPACE, *(column == bindparam(f"old_{column.name}") for column in _KEY)
    )
)
