"""Statements on `artifacts`."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, bindparam, delete, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import ArtifactKind, Digest, Namespace
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
    "insert_artifact",
    "is_blob_used",
    "list_artifacts_of",
    "list_digests",
    "pin_artifacts",
    "touch_artifacts",
    "unpin_artifacts",
]

_KEYS_PER_STATEMENT = 500
"""Below every database's limit on parameters (SQLite had 999 until 3.32)."""

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
)


class ArtifactRow(NamedTuple):
    """A stored artifact."""

    key: StoredKey
    digest: Digest
    metadata_header: str
    compile_seconds: float
    hits: int
    created_at: datetime


class FoundArtifact(NamedTuple):
    """What a lookup tells, and until when an earlier one pinned it."""

    digest: Digest
    pinned_until: datetime | None


async def find_artifact(connection: AsyncConnection, key: StoredKey) -> ArtifactRow | None:
    """One artifact, or None."""
    found = (await connection.execute(_FIND_ONE, _parameters(key))).first()
    return _row(found, key) if found is not None else None


async def find_artifacts(
    connection: AsyncConnection, namespace: Namespace, keys: Sequence[StoredKey]
) -> dict[StoredKey, FoundArtifact]:
    """Those of many artifacts of one namespace that exist."""
    wanted: dict[tuple[str, str, str], StoredKey] = {
        (key.kind.value, key.device_type, key.fingerprint): key for key in keys
    }
    found = {}
    for part in _parts([key.fingerprint for key in keys]):
        statement = _FIND_MANY.where(
            artifacts.c.namespace == namespace, artifacts.c.fingerprint.in_(part)
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
    worth = density(compile_seconds=compile_seconds, size_bytes=digest.size_bytes)
    statement = (
        insert_into(connection, artifacts)
        .values(
            **_named(key),
            sha256=digest.sha256,
            size_bytes=digest.size_bytes,
            metadata_header=metadata_header,
            compile_seconds=compile_seconds,
            toolchain=toolchain,
            density=worth,
            rank=worth + aged(now),
            created_at=now,
            last_used_at=now,
            hits=0,
        )
        .on_conflict_do_nothing()
    )
    return (await connection.execute(statement)).rowcount == 1


async def delete_artifact(
    connection: AsyncConnection, key: StoredKey, *, digest: Digest | None = None
) -> Digest | None:
    """Removes an artifact and says which blob it had; None when it was absent.

    Args:
        connection: where to ask.
        key: which artifact.
        digest: remove it only if it still has this blob.
    """
    statement = delete(artifacts).where(_is(key))
    if digest is not None:
        statement = statement.where(
            artifacts.c.sha256 == digest.sha256, artifacts.c.size_bytes == digest.size_bytes
        )
    gone = (
        await connection.execute(statement.returning(artifacts.c.sha256, artifacts.c.size_bytes))
    ).first()
    return Digest(gone.sha256, gone.size_bytes) if gone is not None else None


async def is_blob_used(connection: AsyncConnection, digest: Digest) -> bool:
    """Whether any artifact, of any namespace, has this blob."""
    statement = select(artifacts.c.sha256).where(artifacts.c.sha256 == digest.sha256).limit(1)
    return (await connection.execute(statement)).first() is not None


async def pin_artifacts(
    connection: AsyncConnection, keys: Sequence[StoredKey], *, until: datetime
) -> None:
    """Keeps artifacts of one namespace from eviction until a time, at least."""
    for part in _parts(sorted(key.fingerprint for key in keys)):
        chosen = and_(
            artifacts.c.namespace == keys[0].namespace,
            artifacts.c.fingerprint.in_(part),
            or_(artifacts.c.pinned_until.is_(None), artifacts.c.pinned_until < until),
        )
        await _lock_rows(connection, chosen)
        await connection.execute(update(artifacts).where(chosen).values(pinned_until=until))


async def unpin_artifacts(connection: AsyncConnection, keys: Sequence[StoredKey]) -> None:
    """Lets artifacts of one namespace be evicted again."""
    for part in _parts(sorted(key.fingerprint for key in keys)):
        chosen = and_(artifacts.c.namespace == keys[0].namespace, artifacts.c.fingerprint.in_(part))
        await _lock_rows(connection, chosen)
        await connection.execute(update(artifacts).where(chosen).values(pinned_until=None))


async def touch_artifacts(
    connection: AsyncConnection, used: Sequence[tuple[StoredKey, int, datetime]]
) -> None:
    """Adds hits and sets the last use of many artifacts, given in the order of their keys."""
    statement = (
        update(artifacts)
        .where(_WHERE_KEY)
        .values(
            hits=artifacts.c.hits + bindparam("more_hits"),
            last_used_at=bindparam("used_at"),
            rank=artifacts.c.density + bindparam("aged"),
        )
    )
    parameters = [
        {**_parameters(key), "more_hits": hits, "used_at": used_at, "aged": aged(used_at)}
        for key, hits, used_at in used
    ]
    await connection.execute(statement, parameters)


_WHERE_KEY = and_(
    artifacts.c.namespace == bindparam("key_namespace"),
    artifacts.c.fingerprint == bindparam("key_fingerprint"),
    artifacts.c.kind == bindparam("key_kind"),
    artifacts.c.device_type == bindparam("key_device_type"),
)
_FIND_ONE = _CHOSEN.where(_WHERE_KEY)


async def _lock_rows(connection: AsyncConnection, chosen: ColumnElement[bool]) -> None:
    """Locks rows in the order of their keys, as everybody does.

    An UPDATE takes them in any order, and two of these could wait for each other. SQLite's
    transaction has the lock on all.
    """
    if connection.dialect.name == "postgresql":
        await connection.execute(
            select(artifacts.c.fingerprint)
            .where(chosen)
            .order_by(*artifacts.primary_key)
            .with_for_update()
        )


def _named(key: StoredKey) -> dict[str, str]:
    return {
        "namespace": key.namespace,
        "fingerprint": key.fingerprint,
        "kind": key.kind.value,
        "device_type": key.device_type,
    }


def _parameters(key: StoredKey) -> dict[str, Any]:
    return {f"key_{name}": value for name, value in _named(key).items()}


def _is(key: StoredKey) -> ColumnElement[bool]:
    return and_(*(artifacts.c[name] == value for name, value in _named(key).items()))


def _parts(fingerprints: Sequence[str]) -> list[Sequence[str]]:
    return [
        fingerprints[start : start + _KEYS_PER_STATEMENT]
        for start in range(0, len(fingerprints), _KEYS_PER_STATEMENT)
    ]


def _row(result: Any, key: StoredKey) -> ArtifactRow:
    """A row under the key that it was asked for: nothing is parsed again that was checked."""
    return ArtifactRow(
        key,
        Digest(result.sha256, result.size_bytes),
        result.metadata_header,
        result.compile_seconds,
        result.hits,
        result.created_at,
    )
