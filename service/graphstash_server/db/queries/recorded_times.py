"""Statements on `recorded_times`."""

from datetime import datetime

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_server.db.queries.shared import insert_into
from graphstash_server.db.tables import chores, recorded_times

__all__ = ["lock_recorded_time", "record_time"]

_NAME = "plausible"


async def lock_recorded_time(connection: AsyncConnection, *, now: datetime) -> datetime:
    """Return the recorded time and lock it until the end of the transaction.

    The first call records `now`. If the database was in use before, the first call records the
    latest time for which an earlier release planned a chore, unless it lies after `now`.
    """
    planned = await connection.scalar(select(func.max(chores.c.next_at)))
    first = insert_into(connection, recorded_times).values(
        name=_NAME, recorded_at=min(now, planned or now)
    )
    await connection.execute(first.on_conflict_do_nothing())
    recorded = select(recorded_times.c.recorded_at).where(recorded_times.c.name == _NAME)
    found: datetime = (await connection.execute(recorded.with_for_update())).scalar_one()
    return found


async def record_time(connection: AsyncConnection, at: datetime) -> None:
    """Replace the recorded time."""
    await connection.execute(
        update(recorded_times).where(recorded_times.c.name == _NAME).values(recorded_at=at)
    )
