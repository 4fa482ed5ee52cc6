"""Statements on `manifest_entries`."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, and_, bindparam, delete, exists, select
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import (
    ArtifactKind,
    DeviceType,
    Fingerprint,
    ManifestEntry,
    ManifestName,
    Namespace,
)
from graphstash_server.db.queries.upsert import insert_into
from graphstash_server.db.tables import manifest_entries as entries
from graphstash_server.keys import StoredKey

__all__ = ["add_run", "drop_unused_entries", "has_manifest", "list_entries", "trim_entries"]

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
    now: datetime,
) -> None:
    """Adds what one run used: a new key with one run, a known one with one run more."""
    statement = insert_into(connection, entries)
    statement = statement.on_conflict_do_update(
        index_elements=list(entries.primary_key),
        set_={"used_at": statement.excluded.used_at, "runs": entries.c.runs + 1},
    )
    parameters = [
        {
            "namespace": key.namespace,
            "name": name,
            "fingerprint": key.fingerprint,
            "kind": key.kind.value,
            "device_type": key.device_type,
            "used_at": now,
            "runs": 1,
        }
        for key in keys
    ]
    await connection.execute(statement, parameters)


async def list_entries(
    connection: AsyncConnection, namespace: Namespace, name: ManifestName
) -> list[ManifestEntry]:
    """The entries of one manifest, most recently used first; none when there is no manifest."""
    results = await connection.execute(
        select(entries).where(_of(namespace, name)).order_by(*_ORDER)
    )
    return [
        ManifestEntry(
            key=StoredKey(
                namespace,
                ArtifactKind.parse(result.kind),
                DeviceType(result.device_type),
                Fingerprint(result.fingerprint),
            ).key,
            used_at=result.used_at,
            runs=result.runs,
        )
        for result in results
    ]


async def has_manifest(
    connection: AsyncConnection, namespace: Namespace, name: ManifestName
) -> bool:
    """Whether the manifest has an entry."""
    return bool(await connection.scalar(select(exists().where(_of(namespace, name)))))


async def drop_unused_entries(
    connection: AsyncConnection, namespace: Namespace, name: ManifestName, *, before: datetime
) -> None:
    """Forgets what no run used since a time."""
    await connection.execute(
        delete(entries).where(_of(namespace, name), entries.c.used_at < before)
    )


async def trim_entries(
    connection: AsyncConnection, namespace: Namespace, name: ManifestName, *, keep: int
) -> None:
    """Forgets all but the most recently used entries."""
    surplus = (
        select(entries.c.fingerprint, entries.c.kind, entries.c.device_type)
        .where(_of(namespace, name))
        .order_by(*_ORDER)
        .offset(keep)
    )
    parameters = [
        {"old_fingerprint": row.fingerprint, "old_kind": row.kind, "old_device": row.device_type}
        for row in await connection.execute(surplus)
    ]
    if not parameters:
        return
    await connection.execute(
        delete(entries).where(
            _of(namespace, name),
            entries.c.fingerprint == bindparam("old_fingerprint"),
            entries.c.kind == bindparam("old_kind"),
            entries.c.device_type == bindparam("old_device"),
        ),
        parameters,
    )


def _of(namespace: Namespace, name: ManifestName) -> ColumnElement[bool]:
    return and_(entries.c.namespace == namespace, entries.c.name == name)
