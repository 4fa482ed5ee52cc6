"""Statements on `identifiers`."""

import secrets
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_server.db.queries.shared import insert_into
from graphstash_server.db.tables import identifiers

__all__ = ["find_cache_id"]

_CACHE: Final = "cache"
_ID_BYTES: Final = 8


async def find_cache_id(connection: AsyncConnection) -> str:
    """Return the random identifier of this cache. The first call creates it."""
    created = insert_into(connection, identifiers).values(
        name=_CACHE, value=secrets.token_hex(_ID_BYTES)
    )
    await connection.execute(created.on_conflict_do_nothing())
    found = select(identifiers.c.value).where(identifiers.c.name == _CACHE)
    return str((await connection.execute(found)).scalar_one())
