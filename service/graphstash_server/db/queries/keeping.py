"""Statements on `artifacts` that leave key and blob alone: uses, pins, and what is withheld."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, and_, bindparam, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Digest
from graphstash_server.db.queries.keys import WHERE_KEY, in_parts, is_key, key_parameters
from graphstash_server.db.tables import artifacts
from graphstash_server.keys import StoredKey
from graphstash_server.value import aged

__all__ = [
    "pin_artifacts",
    "release_artifact",
    "touch_artifacts",
    "unpin_artifacts",
    "withhold_artifact",
]


async def pin_artifacts(
    connection: AsyncConnection, keys: Sequence[StoredKey], *, until: datetime
) -> None:
    """Keeps artifacts of one namespace from eviction until a time, at least."""
    for part in in_parts(sorted(key.fingerprint for key in keys)):
        chosen = and_(
            artifacts.c.namespace == keys[0].namespace,
            artifacts.c.fingerprint.in_(part),
            or_(artifacts.c.pinned_until.is_(None), artifacts.c.pinned_until < until),
        )
        await _lock_rows(connection, chosen)
        await connection.execute(update(artifacts).where(chosen).values(pinned_until=until))


async def unpin_artifacts(connection: AsyncConnection, keys: Sequence[StoredKey]) -> None:
    """Lets artifacts of one namespace be evicted again."""
    for part in in_parts(sorted(key.fingerprint for key in keys)):
        chosen = and_(artifacts.c.namespace == keys[0].namespace, artifacts.c.fingerprint.in_(part))
        await _lock_rows(connection, chosen)
        await connection.execute(update(artifacts).where(chosen).values(pinned_until=None))


async def touch_artifacts(
    connection: AsyncConnection, used: Sequence[tuple[StoredKey, int, datetime]]
) -> None:
    """Adds hits and sets the last use of many artifacts, given in the order of their keys."""
    statement = (
        update(artifacts)
        .where(WHERE_KEY)
        .values(
            hits=artifacts.c.hits + bindparam("more_hits"),
            last_used_at=bindparam("used_at"),
            rank=artifacts.c.density + bindparam("aged"),
        )
    )
    parameters = [
        {**key_parameters(key), "more_hits": hits, "used_at": used_at, "aged": aged(used_at)}
        for key, hits, used_at in used
    ]
    await connection.execute(statement, parameters)


async def withhold_artifact(
    connection: AsyncConnection, key: StoredKey, digest: Digest, *, now: datetime
) -> bool:
    """Serves an artifact no more; False when it has another blob, or is withheld already."""
    statement = (
        update(artifacts)
        .where(
            is_key(artifacts, key),
            artifacts.c.sha256 == digest.sha256,
            artifacts.c.withheld_at.is_(None),
        )
        .values(withheld_at=now)
    )
    return (await connection.execute(statement)).rowcount == 1


async def release_artifact(connection: AsyncConnection, key: StoredKey) -> Digest | None:
    """Serves an artifact again and says which blob it has; None when none was withheld."""
    statement = (
        update(artifacts)
        .where(is_key(artifacts, key), artifacts.c.withheld_at.is_not(None))
        .values(withheld_at=None)
        .returning(artifacts.c.sha256, artifacts.c.size_bytes)
    )
    found = (await connection.execute(statement)).first()
    return Digest(found.sha256, found.size_bytes) if found is not None else None


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
