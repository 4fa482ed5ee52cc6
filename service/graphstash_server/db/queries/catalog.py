"""Statements that list artifacts for people. Limits bound what each statement reads."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

from sqlalchemy import and_, exists, func, literal, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_server.artifact import DescribedArtifact
from graphstash_server.db.queries.shared import (
    KEY_COLUMNS,
    KEYED_ARTIFACT_COLUMNS,
    KNOWN_KINDS,
    described_of,
    is_key,
    same_key,
)
from graphstash_server.db.tables import artifacts, descriptions, environments, manifest_entries
from graphstash_server.keys import StoredKey

__all__ = [
    "User",
    "find_described",
    "list_by_fingerprint",
    "list_from_label",
    "list_labelled",
    "list_latest",
    "list_users",
]


class User(NamedTuple):
    """A job that used an artifact."""

    job: str
    runs: int
    used_at: datetime


_IS_SHOWN: Final = and_(artifacts.c.withheld_at.is_(None), artifacts.c.kind.in_(KNOWN_KINDS))
_OUTER: Final = artifacts.outerjoin(descriptions, same_key(artifacts, descriptions))
_IS_WITHHELD: Final = exists().where(
    same_key(artifacts, descriptions), artifacts.c.withheld_at.is_not(None)
)
_LABELLED: Final = select(
    *KEYED_ARTIFACT_COLUMNS, func.coalesce(descriptions.c.label, "").label("label")
).select_from(_OUTER)


async def list_latest(
    connection: AsyncConnection, namespaces: Sequence[str], *, limit: int
) -> list[DescribedArtifact]:
    """Return the newest artifacts. Per namespace, read `2 * limit / namespaces`, at least ten."""
    if not namespaces:
        return []
    share = min(limit, max(10, 2 * limit // len(namespaces)))
    latest = union_all(
        *(
            select(
                select(*(artifacts.c[name] for name in (*KEY_COLUMNS, "created_at")))
                .where(_IS_SHOWN, artifacts.c.namespace == namespace)
                .order_by(artifacts.c.created_at.desc())
                .limit(share)
                .subquery()
            )
            for namespace in namespaces
        )
    ).subquery()
    chosen = select(latest).order_by(latest.c.created_at.desc()).limit(limit).subquery()
    statement = _LABELLED.join(chosen, same_key(artifacts, chosen)).order_by(
        chosen.c.created_at.desc()
    )
    return [described_of(found) for found in await connection.execute(statement)]


async def list_by_fingerprint(
    connection: AsyncConnection, namespaces: Sequence[str], prefix: str, *, limit: int
) -> list[DescribedArtifact]:
    """Return artifacts whose fingerprint begins with `prefix`: at most `limit`, in any order."""
    statement = _LABELLED.where(
        _IS_SHOWN,
        artifacts.c.namespace.in_(namespaces),
        artifacts.c.fingerprint >= prefix,
        artifacts.c.fingerprint < prefix + "g",  # sorts after every hex digit
    ).limit(limit)
    return [described_of(found) for found in await connection.execute(statement)]


async def list_labelled(
    connection: AsyncConnection, namespaces: Sequence[str], label: str, *, limit: int
) -> list[DescribedArtifact]:
    """Return artifacts of programs with exactly this label: at most `limit`, in any order."""
    chosen = (
        select(*(descriptions.c[name] for name in KEY_COLUMNS))
        .where(
            descriptions.c.namespace.in_(namespaces),
            descriptions.c.kind.in_(KNOWN_KINDS),
            descriptions.c.label == label,
            ~_IS_WITHHELD,
        )
        .limit(limit)
        .subquery()
    )
    statement = select(*KEYED_ARTIFACT_COLUMNS, literal(label).label("label")).join(
        chosen, same_key(artifacts, chosen)
    )
    return [described_of(found) for found in await connection.execute(statement)]


async def list_from_label(
    connection: AsyncConnection, namespace: str, kind: str, label: str, *, limit: int
) -> list[DescribedArtifact]:
    """Return the artifacts of a kind with labels from `label` on, in their order: at most `limit`.

    There is no last label, because only a collation of the database orders labels by their bytes.
    """
    same_kind = (descriptions.c.namespace == namespace, descriptions.c.kind == kind)
    chosen = (
        select(*(descriptions.c[name] for name in (*KEY_COLUMNS, "label", "described_at", "parts")))
        .where(*same_kind, descriptions.c.label >= label, ~_IS_WITHHELD)
        .order_by(descriptions.c.label, descriptions.c.described_at)
        .limit(limit)
        .subquery()
    )
    statement = (
        select(*KEYED_ARTIFACT_COLUMNS, chosen.c.label, chosen.c.parts.label("program"))
        .join(chosen, same_key(artifacts, chosen))
        .order_by(chosen.c.label, chosen.c.described_at)
    )
    return [described_of(found) for found in await connection.execute(statement)]


async def find_described(connection: AsyncConnection, key: StoredKey) -> DescribedArtifact | None:
    """Return an artifact with its description, or None if it is absent or withheld."""
    statement = (
        _LABELLED.add_columns(
            descriptions.c.parts.label("program"), environments.c.parts.label("environment")
        )
        .outerjoin(environments, environments.c.id == descriptions.c.environment)
        .where(is_key(artifacts, key), artifacts.c.withheld_at.is_(None))
    )
    found = (await connection.execute(statement)).first()
    return None if found is None else described_of(found)


async def list_users(connection: AsyncConnection, key: StoredKey, *, limit: int) -> list[User]:
    """Return the jobs whose manifests name an artifact, most recent use first.

    Reads all manifest entries of the namespace, whose number is limited. No index serves the key.
    """
    names = ("name", "runs", "used_at")
    statement = (
        select(*(manifest_entries.c[name] for name in names))
        .where(is_key(manifest_entries, key))
        .order_by(manifest_entries.c.used_at.desc())
        .limit(limit)
    )
    return [User(*found) for found in await connection.execute(statement)]
