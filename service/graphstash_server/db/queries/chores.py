"""Statements on `chores`."""

from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_server.db.queries.upsert import insert_into
from graphstash_server.db.tables import chores

__all__ = ["claim_chore"]


async def claim_chore(
    connection: AsyncConnection, name: str, *, now: datetime, every: timedelta
) -> bool:
    """Whether a chore is due and this caller is to do it, in one statement.

    A server that dies while it is at it leaves it to whoever is next when it is due again.
    """
    statement = insert_into(connection, chores).values(name=name, next_at=now + every)
    statement = statement.on_conflict_do_update(
        index_elements=[chores.c.name],
        set_={"next_at": statement.excluded.next_at},
        where=chores.c.next_at <= now,
    )
    return (await connection.execute(statement)).rowcount == 1
