"""Statements on `deletions`."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Digest
from graphstash_server.db.queries.upsert import insert_into
from graphstash_server.db.tables import deletions

__all__ = ["add_deletions", "claim_deletions", "drop_deletion", "has_deletion", "pending_bytes"]


async def add_deletions(connection: AsyncConnection, digests: Sequence[Digest]) -> None:
    """Marks blobs that lost an artifact."""
    if not digests:
        return
    sizes = {digest.sha256: digest.size_bytes for digest in digests}
    await connection.execute(
        insert_into(connection, deletions).on_conflict_do_nothing(),
        [{"sha256": sha256, "size_bytes": sizes[sha256]} for sha256 in sorted(sizes)],
    )


async def claim_deletions(
    connection: AsyncConnection,
    *,
    after_sha256: str,
    now: datetime,
    keep: timedelta,
    limit: int,
    claimed_too: bool,
) -> list[Digest]:
    """Takes marked blobs that no other server is at, in the order of their SHA-256.

    Args:
        connection: where to ask.
        after_sha256: exclusive; empty for the first page.
        now: the time.
        keep: how long nobody else takes them.
        limit: most blobs.
        claimed_too: take also what another server has claimed; it may be dead.
    """
    free = (
        select(deletions.c.sha256)
        .where(deletions.c.sha256 > after_sha256)
        .order_by(deletions.c.sha256)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    if not claimed_too:
        is_free = or_(deletions.c.claimed_until.is_(None), deletions.c.claimed_until < now)
        free = free.where(is_free)
    statement = (
        update(deletions)
        .where(deletions.c.sha256.in_(free))
        .values(claimed_until=now + keep)
        .returning(deletions.c.sha256, deletions.c.size_bytes)
    )
    claimed = [Digest(*found) for found in await connection.execute(statement)]
    return sorted(claimed, key=lambda digest: digest.sha256)


async def drop_deletion(connection: AsyncConnection, digest: Digest) -> None:
    """The blob is gone, or needed again."""
    await connection.execute(delete(deletions).where(deletions.c.sha256 == digest.sha256))


async def has_deletion(connection: AsyncConnection, digest: Digest) -> bool:
    """Whether a blob is about to be deleted."""
    statement = select(deletions.c.sha256).where(deletions.c.sha256 == digest.sha256)
    return (await connection.execute(statement)).first() is not None


async def pending_bytes(connection: AsyncConnection) -> int:
    """Of blobs that are marked and may still be there."""
    total = await connection.scalar(select(func.coalesce(func.sum(deletions.c.size_bytes), 0)))
    return int(total or 0)
