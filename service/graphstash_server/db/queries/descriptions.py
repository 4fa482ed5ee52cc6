"""Statements on `descriptions` and `environments`."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import and_, bindparam, delete, func, literal, select, union
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema.explanation import digest_of_parts, identity_of
from graphstash_server.db.queries.shared import (
    insert_into,
    is_key,
    key_values,
    stored_key,
)
from graphstash_server.db.tables import artifacts, descriptions, environments
from graphstash_server.keys import StoredKey

__all__ = [
    "DescribedRow",
    "NewDescription",
    "add_descriptions",
    "count_undescribed",
    "drop_unused_environments",
    "find_described",
    "list_by_identity",
    "list_by_label",
    "list_by_near_label",
]


class NewDescription(NamedTuple):
    """A publisher's description of an artifact."""

    key: StoredKey
    label: str
    program: Mapping[str, str]
    environment: Mapping[str, str]


class DescribedRow(NamedTuple):
    """An artifact that may be served, with its description."""

    key: StoredKey
    label: str
    identity: str
    parts: dict[str, str]
    metadata_header: str
    created_at: datetime


_KEY: Final = ("namespace", "fingerprint", "kind", "device_type")

_DESCRIBED = (
    select(
        *(descriptions.c[name] for name in (*_KEY, "label", "identity", "parts")),
        environments.c.parts.label("environment_parts"),
        artifacts.c.metadata_header,
        artifacts.c.created_at,
    )
    .join(environments, environments.c.id == descriptions.c.environment)
    .join(artifacts)
    .where(artifacts.c.withheld_at.is_(None))
)
_NEAREST = (
    _DESCRIBED.where(
        descriptions.c.namespace == bindparam("in_namespace"),
        descriptions.c.kind == bindparam("of_kind"),
        descriptions.c.described_at <= bindparam("until"),
    )
    .order_by(descriptions.c.described_at.desc())
    .limit(bindparam("most"))
)
_BY_IDENTITY = _NEAREST.where(descriptions.c.identity == bindparam("wanted"))
_BY_LABEL = _NEAREST.where(descriptions.c.label == bindparam("wanted"))
_AFTER_LABEL, _BEFORE_LABEL = (
    _NEAREST.where(is_beyond).order_by(None).order_by(*order)
    for is_beyond, order in (
        (
            descriptions.c.label > bindparam("wanted"),
            (descriptions.c.label, descriptions.c.described_at),
        ),
        (
            descriptions.c.label < bindparam("wanted"),
            (descriptions.c.label.desc(), descriptions.c.described_at.desc()),
        ),
    )
)


async def add_descriptions(
    connection: AsyncConnection, new: Sequence[NewDescription], *, now: datetime
) -> int:
    """Describe existing artifacts that have no description. Return how many were described. Write
    rows in key order, environments first, so that two calls cannot deadlock.
    """
    used = {digest_of_parts(each.environment): each.environment for each in new}
    for digest, parts in sorted(used.items()):
        kept = insert_into(connection, environments).values(
            id=digest, parts=_dumped(parts), used_at=now
        )
        await connection.execute(
            kept.on_conflict_do_update(index_elements=["id"], set_={"used_at": now})
        )
    added = 0
    for each in sorted(new, key=lambda one: one.key.columns):
        added += await _add_description(connection, each, now=now)
    return added


async def _add_description(
    connection: AsyncConnection, new: NewDescription, *, now: datetime
) -> int:
    values = {
        **key_values(new.key),
        "label": new.label,
        "identity": identity_of(new.program),
        "environment": digest_of_parts(new.environment),
        "parts": _dumped(new.program),
        "described_at": now,
    }
    columns = descriptions.c
    chosen = (
        select(*(literal(value, columns[name].type) for name, value in values.items()))
        .select_from(artifacts)
        .where(is_key(artifacts, new.key))
        .with_for_update(read=True, key_share=True)  # no other transaction deletes it meanwhile
    )
    statement = insert_into(connection, descriptions).from_select(list(values), chosen)
    return (await connection.execute(statement.on_conflict_do_nothing())).rowcount


async def list_by_identity(
    connection: AsyncConnection,
    namespace: str,
    kind: str,
    identity: str,
    *,
    until: datetime,
    limit: int,
) -> list[DescribedRow]:
    """Return artifacts of the same program that were described until a time, latest first."""
    chosen = _chosen(namespace, kind, identity, until=until, limit=limit)
    return [_row(each) for each in await connection.execute(_BY_IDENTITY, chosen)]


async def list_by_label(
    connection: AsyncConnection,
    namespace: str,
    kind: str,
    label: str,
    *,
    until: datetime,
    limit: int,
) -> list[DescribedRow]:
    """Return artifacts of programs of that name that were described until a time, latest first."""
    chosen = _chosen(namespace, kind, label, until=until, limit=limit)
    return [_row(each) for each in await connection.execute(_BY_LABEL, chosen)]


async def list_by_near_label(
    connection: AsyncConnection,
    namespace: str,
    kind: str,
    label: str,
    *,
    prefix: str,
    until: datetime,
    limit: int,
) -> list[DescribedRow]:
    """Return artifacts whose labels have a prefix, and come right before or after a label."""
    chosen = _chosen(namespace, kind, label, until=until, limit=limit)
    return [
        _row(each)
        for statement in (_AFTER_LABEL, _BEFORE_LABEL)
        for each in await connection.execute(statement, chosen)
        if each.label.startswith(prefix)
    ]


def _chosen(
    namespace: str, kind: str, wanted: str, *, until: datetime, limit: int
) -> dict[str, object]:
    """Return the parameters of the statements that extend `_NEAREST`."""
    return {
        "in_namespace": namespace,
        "of_kind": kind,
        "wanted": wanted,
        "until": until,
        "most": limit,
    }


async def find_described(connection: AsyncConnection, key: StoredKey) -> DescribedRow | None:
    """Return one artifact, or None if it is absent or has no description."""
    found = (await connection.execute(_DESCRIBED.where(is_key(descriptions, key)))).first()
    return None if found is None else _row(found)


async def count_undescribed(
    connection: AsyncConnection, namespace: str, *, until: datetime, looked_at: int
) -> int:
    """Count artifacts of a namespace, stored until a time, that have no description.

    Looks at the `looked_at` oldest and the `looked_at` newest only: counting a million would take
    too long.
    """
    age = artifacts.c.created_at
    ends = (
        select(*(artifacts.c[name] for name in _KEY))
        .where(artifacts.c.namespace == namespace, age <= until)
        .order_by(order)
        .limit(looked_at)
        .subquery()
        for order in (age, age.desc())
    )
    some = union(*(select(end) for end in ends)).subquery()
    is_described = and_(*(descriptions.c[name] == some.c[name] for name in _KEY))
    counted = (
        select(func.count())
        .select_from(some)
        .where(~select(descriptions.c.label).where(is_described).exists())
    )
    return int(await connection.scalar(counted) or 0)


async def drop_unused_environments(connection: AsyncConnection, *, before: datetime) -> None:
    """Delete environments that no description uses, and that were last sent before a time."""
    is_used = select(descriptions.c.environment).where(
        descriptions.c.environment == environments.c.id
    )
    await connection.execute(
        delete(environments).where(environments.c.used_at < before, ~is_used.exists())
    )


def _row(found: Any) -> DescribedRow:
    parts = {**json.loads(found.environment_parts), **json.loads(found.parts)}
    return DescribedRow(
        stored_key(found),
        found.label,
        found.identity,
        parts,
        found.metadata_header,
        found.created_at,
    )


def _dumped(parts: Mapping[str, str]) -> str:
    return json.dumps(dict(parts), separators=(",", ":"), sort_keys=True)
