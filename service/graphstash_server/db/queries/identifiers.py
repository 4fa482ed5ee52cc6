"""Statements on `identifiers`."""

import secrets
from typing import Final

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_server.db.queries.shared import insert_into
from graphstash_server.db.tables import identifiers

__all__ = ["claim_recount", "find_cache_id", "last_recount"]

_CACHE: Final = "cache"
_RECOUNT: Final = "recount"
_ID_BYTES: Final = 8


async def find_cache_id(connection: AsyncConnection) -> str:
    """Return the random identifier of this cache. The first call creates it."""
    created = insert_into(connection, identifiers).values(
        name=_CACHE, value=secrets.token_hex(_ID_BYTES)
    )
    await connection.execute(created.on_conflict_do_nothing())
    found = select(identifiers.c.value).where(identifiers.c.name == _CACHE)
    return str((await connection.execute(found)).scalar_one())


async def last_recount(connection: AsyncConnection) -> str | None:
    """Return the random mark of the last correction of the usage counters, or None."""
    found = select(identifiers.c.value).where(identifiers.c.name == _RECOUNT)
    return (await connection.execute(found)).scalar()


async def claim_recount(connection: AsyncConnection, last: str | None) -> str | None:
    """Set and return a new mark before a correction of counters. Return None if another process has
    corrected them, so that the mark is no longer `last`.
    """
    mark = secrets.token_hex(_ID_BYTES)
    if last is None:
        created = insert_into(connection, identifiers).values(name=_RECOUNT, value=mark)
        done = await connection.execute(created.on_conflict_do_nothing())
    else:
        is_last = (identifiers.c.name == _RECOUNT, identifiers.c.value == last)
        done = await connection.execute(update(identifiers).where(*is_last).values(value=mark))
    return mark if done.rowcount == 1 else None
