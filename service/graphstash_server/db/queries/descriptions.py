"""Statements on `descriptions` and `environments`."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Select, bindparam, delete, func, literal, select, union
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Namespace
from graphstash_schema.explanation import Description, digest_of_parts, identity_of
from graphstash_server.artifact import DescribedArtifact
from graphstash_server.db.queries.shared import (
    KEY_COLUMNS,
    KEYED_ARTIFACT_COLUMNS,
    described_of,
    insert_into,
    is_key,
    key_values,
    same_key,
)
from graphstash_server.db.tables import artifacts, descriptions, environments
from graphstash_server.keys import StoredKey

__all__ = [
    "NearRequest",
    "add_descriptions",
    "count_undescribed",
    "drop_unused_environments",
    "list_by_identity",
    "list_by_label",
    "list_by_near_label",
]


class NearRequest(NamedTuple):
    """Selects described artifacts that may be near a missed one. `until` is the latest time of the
    description. `limit` applies to each query.
    """

    namespace: str
    kind: str
    until: datetime
    limit: int


_DESCRIBED = (
    select(
        *KEYED_ARTIFACT_COLUMNS,
        descriptions.c.label,
        descriptions.c.parts.label("program"),
        environments.c.parts.label("environment"),
    )
    .select_from(descriptions)
    .join(environments, environments.c.id == descriptions.c.environment)
    .join(artifacts, same_key(artifacts, descriptions))
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
    connection: AsyncConnection,
    namespace: Namespace,
    new: Sequence[Description],
    *,
    now: datetime,
) -> int:
    """Add descriptions of stored artifacts that have none. Return their number. Write rows in key
    order, environments first, so that two calls cannot deadlock.
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
    keyed = [(StoredKey.of(namespace, each.key), each) for each in new]
    for key, each in sorted(keyed, key=lambda pair: pair[0].columns):
        added += await _add_description(connection, key, each, now=now)
    return added


async def _add_description(
    connection: AsyncConnection, key: StoredKey, new: Description, *, now: datetime
) -> int:
    values = {
        **key_values(key),
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
        .where(is_key(artifacts, key))
        .with_for_update(read=True, key_share=True)  # no other transaction deletes it meanwhile
    )
    statement = insert_into(connection, descriptions).from_select(list(values), chosen)
    return (await connection.execute(statement.on_conflict_do_nothing())).rowcount


async def list_by_identity(
    connection: AsyncConnection, near: NearRequest, identity: str
) -> list[DescribedArtifact]:
    """Return artifacts of the same program, last described first."""
    return await _list(connection, _BY_IDENTITY, near, identity)


async def list_by_label(
    connection: AsyncConnection, near: NearRequest, label: str
) -> list[DescribedArtifact]:
    """Return artifacts of programs with this label, last described first."""
    return await _list(connection, _BY_LABEL, near, label)


async def list_by_near_label(
    connection: AsyncConnection, near: NearRequest, label: str, *, prefix: str
) -> list[DescribedArtifact]:
    """Return artifacts with the labels right before and after a label, if they have a prefix."""
    after = await _list(connection, _AFTER_LABEL, near, label)
    before = await _list(connection, _BEFORE_LABEL, near, label)
    return [each for each in after + before if each.label.startswith(prefix)]


async def _list(
    connection: AsyncConnection, statement: Select[Any], near: NearRequest, wanted: str
) -> list[DescribedArtifact]:
    found = await connection.execute(
        statement,
        {
            "in_namespace": near.namespace,
            "of_kind": near.kind,
            "until": near.until,
            "most": near.limit,
            "wanted": wanted,
        },
    )
    return [described_of(each) for each in found]


async def count_undescribed(
    connection: AsyncConnection, namespace: str, *, until: datetime, looked_at: int
) -> int:
    """Count artifacts stored by the time `until` that have no description. To be fast, look only at
    the `looked_at` oldest and the `looked_at` newest artifacts of the namespace.
    """
    age = artifacts.c.created_at
    ends = (
        select(*(artifacts.c[name] for name in KEY_COLUMNS))
        .where(artifacts.c.namespace == namespace, age <= until)
        .order_by(order)
        .limit(looked_at)
        .subquery()
        for order in (age, age.desc())
    )
    some = union(*(select(end) for end in ends)).subquery()
    counted = (
        select(func.count())
        .select_from(some)
        .where(~select(descriptions.c.label).where(same_key(descriptions, some)).exists())
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


def _dumped(parts: Mapping[str, str]) -> str:
    return json.dumps(dict(parts), separators=(",", ":"), sort_keys=True)
