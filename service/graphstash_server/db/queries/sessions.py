"""Statements on `sessions`."""

from datetime import datetime
from typing import NamedTuple

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_server.db.tables import sessions

__all__ = ["SessionRow", "add_session", "delete_session", "drop_sessions", "find_session"]


class SessionRow(NamedTuple):
    """A signed-in browser."""

    token_id: str
    expires_at: datetime


async def add_session(connection: AsyncConnection, id_sha256: str, row: SessionRow) -> None:
    """Add a session."""
    await connection.execute(insert(sessions).values(id_sha256=id_sha256, **row._asdict()))


async def find_session(connection: AsyncConnection, id_sha256: str) -> SessionRow | None:
    """Return a session, even if expired, or None."""
    chosen = select(sessions.c.token_id, sessions.c.expires_at)
    found = (await connection.execute(chosen.where(sessions.c.id_sha256 == id_sha256))).first()
    return None if found is None else SessionRow(*found)


async def delete_session(connection: AsyncConnection, id_sha256: str) -> None:
    """End a session, if it exists."""
    await connection.execute(delete(sessions).where(sessions.c.id_sha256 == id_sha256))


async def drop_sessions(
    connection: AsyncConnection, *, expired: datetime, token_id: str, kept: int
) -> None:
    """Delete expired sessions, and all but the `kept` last to expire of one token."""
    await connection.execute(delete(sessions).where(sessions.c.expires_at <= expired))
    surplus = (
        select(sessions.c.id_sha256)
        .where(sessions.c.token_id == token_id)
        .order_by(sessions.c.expires_at.desc())
        .limit(-1 if connection.dialect.name == "sqlite" else None)
        .offset(kept)
    )
    await connection.execute(delete(sessions).where(sessions.c.id_sha256.in_(surplus)))
