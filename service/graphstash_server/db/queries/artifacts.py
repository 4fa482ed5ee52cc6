"""Statements on `artifacts`."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import ArtifactKind, Digest, Namespace
from graphstash_server.db.queries.keys import (
    WHERE_KEY,
    in_parts,
    is_key,
    key_parameters,
    key_values,
)
from graphstash_server.db.queries.upsert import insert_into
from graphstash_server.db.tables import artifacts
from graphstash_server.keys import StoredKey
from graphstash_server.value import aged, density

__all__ = [
    "ArtifactRow",
    "FoundArtifact",
    "delete_artifact",
    "find_artifact",
    "find_artifacts",
    "find_stored",
    "insert_artifact",
    "is_blob_used",
    "list_artifacts_of",
    "list_digests",
    "replace_artifact",
]

_FIND_MANY = select(
    artifacts.c.kind,
    artifacts.c.device_type,
    artifacts.c.fingerprint,
    artifacts.c.sha256,
    artifacts.c.size_bytes,
    artifacts.c.pinned_until,
)

_CHOSEN = select(
    artifacts.c.namespace,
    artifacts.c.kind,
    artifacts.c.device_type,
    artifacts.c.fingerprint,
    artifacts.c.sha256,
    artifacts.c.size_bytes,
    artifacts.c.metadata_header,
    artifacts.c.compile_seconds,
    artifacts.c.hits,
    artifacts.c.created_at,
    artifacts.c.withheld_at,
)


class ArtifactRow(NamedTuple):
    """A stored artifact."""

    key: StoredKey
    digest: Digest
    metadata_header: str
    compile_seconds: float
    hits: int
    created_at: datetime
    withheld_at: datetime | None = None


class FoundArtifact(NamedTuple):
    """What a lookup tells, and until when an earlier one pinned it."""

    digest: Digest
    pinned_until: datetime | None


async def find_artifact(connection: AsyncConnection, key: StoredKey) -> ArtifactRow | None:
    """One artifact that may be served, or None: what is withheld is absent to whoever asks."""
    found = (await connection.execute(_FIND_ONE, key_parameters(key))).first()
    return _row(found, key) if found is not None else None


async def find_stored(connection: AsyncConnection, key: StoredKey) -> ArtifactRow | None:
    """One artifact, be it withheld, or None."""
    found = (await connection.execute(_FIND_STORED, key_parameters(key))).first()
    return _row(found, key) if found is not None else None


async def find_artifacts(
    connection: AsyncConnection, namespace: Namespace, keys: Sequence[StoredKey]
) -> dict[StoredKey, FoundArtifact]:
    """Those of many artifacts of one namespace that exist and may be served."""
    wanted: dict[tuple[str, str, str], StoredKey] = {
        (key.kind.value, key.device_type, key.fingerprint): key for key in keys
    }
    found = {}
    for part in in_parts([key.fingerprint for key in keys]):
        statement = _FIND_MANY.where(
            artifacts.c.namespace == namespace,
            artifacts.c.fingerprint.in_(part),
            artifacts.c.withheld_at.is_(None),
        )
        for *name, sha256, size_bytes, pinned_until in await connection.execute(statement):
            key = wanted.get((name[0], name[1], name[2]))
            if key is not None:
                found[key] = FoundArtifact(Digest(sha256, size_bytes), pinned_until)
    return found


async def list_digests(
    connection: AsyncConnection, *, after_sha256: str, until_sha256: str | None, limit: int
) -> list[Digest]:
    """Digests that artifacts have, whose SHA-256 is in (after, until], in its order.

    Args:
        connection: where to ask.
        after_sha256: exclusive; empty for the first page.
        until_sha256: inclusive; None for no end.
        limit: most digests of a page.
    """
    wanted: ColumnElement[bool] = artifacts.c.sha256 > after_sha256
    if until_sha256 is not None:
        wanted = and_(wanted, artifacts.c.sha256 <= until_sha256)
    statement = (
        select(artifacts.c.sha256, artifacts.c.size_bytes)
        .where(wanted)
        .distinct()
        .order_by(artifacts.c.sha256)
        .limit(limit)
    )
    return [Digest(*found) for found in await connection.execute(statement)]


async def list_artifacts_of(connection: AsyncConnection, digest: Digest) -> list[ArtifactRow]:
    """The artifacts that have a blob."""
    known = [kind.value for kind in ArtifactKind]  # others are left to servers of a later release
    statement = _CHOSEN.where(artifacts.c.sha256 == digest.sha256, artifacts.c.kind.in_(known))
    return [
        _row(
            found,
            StoredKey.parse(
                namespace=found.namespace,
                kind=found.kind,
                device_type=found.device_type,
                fingerprint=found.fingerprint,
            ),
        )
        for found in await connection.execute(statement)
    ]


async def insert_artifact(
    connection: AsyncConnection,
    *,
    key: StoredKey,
    digest: Digest,
    metadata_header: str,
    compile_seconds: float,
    toolchain: str,
    now: datetime,
) -> bool:
    """Adds an artifact; False when there is one under the key already."""
    values = _new(
        digest=digest,
        metadata_header=metadata_header,
        compile_seconds=compile_seconds,
        toolchain=toolchain,
        now=now,
    )
    statement = insert_into(connection, artifacts).values(**key_values(key), **values)
    return (await connection.execute(statement.on_conflict_do_nothing())).rowcount == 1


async def replace_artifact(
    connection: AsyncConnection,
    *,
    key: StoredKey,
    replaces: Digest,
    digest: Digest,
    metadata_header: str,
    compile_seconds: float,
    toolchain: str,
    now: datetime,
) -> bool:
    """Puts an artifact in the place of the one that has the blob `replaces`; False when that one
    is gone, or withheld. A pin stays.
    """
    values = _new(
        digest=digest,
        metadata_header=metadata_header,
        compile_seconds=compile_seconds,
        toolchain=toolchain,
        now=now,
    )
    statement = (
        update(artifacts)
        .where(
            is_key(artifacts, key),
            artifacts.c.sha256 == replaces.sha256,
            artifacts.c.withheld_at.is_(None),
        )
        .values(**values)
    )
    return (await connection.execute(statement)).rowcount == 1


async def delete_artifact(
    connection: AsyncConnection,
    key: StoredKey,
    *,
    digest: Digest,
    created_at: datetime | None = None,
) -> bool:
    """Removes an artifact; False when it was absent.

    Args:
        connection: where to ask.
        key: which artifact.
        digest: remove it only if it still has this blob,
        created_at: and was stored then; None: whenever that was.
    """
    statement = delete(artifacts).where(
        is_key(artifacts, key),
        artifacts.c.sha256 == digest.sha256,
        artifacts.c.size_bytes == digest.size_bytes,
    )
    if created_at is not None:
        statement = statement.where(artifacts.c.created_at == created_at)
    return (await connection.execute(statement)).rowcount == 1


async def is_blob_used(connection: AsyncConnection, digest: Digest) -> bool:
    """Whether any artifact, of any namespace, has this blob."""
    statement = select(artifacts.c.sha256).where(artifacts.c.sha256 == digest.sha256).limit(1)
    return (await connection.execute(statement)).first() is not None


_FIND_STORED = _CHOSEN.where(WHERE_KEY)
_FIND_ONE = _FIND_STORED.where(artifacts.c.withheld_at.is_(None))


def _new(
    *,
    digest: Digest,
    metadata_header: str,
    compile_seconds: float,
    toolchain: str,
    now: datetime,
) -> dict[str, Any]:
    """The columns of an artifact that was just stored, without its key."""
    worth = density(compile_seconds=compile_seconds, size_bytes=digest.size_bytes)
    return {
        "sha256": digest.sha256,
        "size_bytes": digest.size_bytes,
        "metadata_header": metadata_header,
        "compile_seconds": compile_seconds,
        "toolchain": toolchain,
        "density": worth,
        "rank": worth + aged(now),
        "created_at": now,
        "last_used_at": now,
        "hits": 0,
    }


def _row(result: Any, key: StoredKey) -> ArtifactRow:
    """A row under the key that it was asked for: nothing is parsed again that was checked."""
    return ArtifactRow(
        key,
        Digest(result.sha256, result.size_bytes),
        result.metadata_header,
        result.compile_seconds,
        result.hits,
        result.created_at,
        result.withheld_at,
    )
