"""Statements on `absences`."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Digest
from graphstash_server.db.queries.shared import insert_into
from graphstash_server.db.tables import absences

__all__ = ["drop_absences", "list_absences", "note_absences"]


async def note_absences(
    connection: AsyncConnection, digests: Sequence[Digest], *, now: datetime
) -> None:
    """Record that blobs are absent, unless an earlier look has recorded it."""
    if digests:
        statement = insert_into(connection, absences).on_conflict_do_nothing()
        sizes = {each.sha256: each.size_bytes for each in digests}
        await connection.execute(
            statement,
            [
                {"sha256": sha256, "size_bytes": sizes[sha256], "since": now}
                for sha256 in sorted(sizes)
            ],
        )


async def list_absences(
    connection: AsyncConnection, *, after_sha256: str, limit: int
) -> list[tuple[Digest, datetime]]:
    """Return a page of absent blobs, ordered by SHA-256, and when a server first missed each."""
    statement = select(absences).where(absences.c.sha256 > after_sha256).order_by(absences.c.sha256)
    found = await connection.execute(statement.limit(limit))
    return [(Digest(row.sha256, row.size_bytes), row.since) for row in found]


async def drop_absences(connection: AsyncConnection, digests: Sequence[Digest]) -> None:
    """Forget absences of blobs that are back or that no artifact needs."""
    if digests:
        names = sorted(each.sha256 for each in digests)
        await connection.execute(delete(absences).where(absences.c.sha256.in_(names)))
