"""Statements on `recorded_times` and `suspensions`."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_server.db.queries.shared import insert_into, upsert
from graphstash_server.db.tables import chores, recorded_times, suspensions

__all__ = [
    "Suspension",
    "drop_suspension",
    "last_healing",
    "list_suspensions",
    "lock_recorded_time",
    "record_healing",
    "record_time",
    "save_suspension",
]

_NAME = "plausible"

_HEALING = "healing"


class Suspension(NamedTuple):
    """A period in which nothing is deleted by age, see `services.plausible_clock`.

    Attributes:
        began_at: recorded time at the beginning.
        ended_at: time of the clock at the end; None before.
        followed_at: a time that moves towards the clock at a limited pace. The suspension ends at
            the latest when it arrives.
        seen_at: time of the clock when a server last read it.
        up_seconds: uptime of that server at that reading.
    """

    began_at: datetime
    ended_at: datetime | None
    followed_at: datetime
    seen_at: datetime
    up_seconds: float


async def lock_recorded_time(connection: AsyncConnection, *, now: datetime) -> datetime:
    """Return the recorded time and lock its row until the end of the transaction.

    If no time is recorded, record `now`, or the latest time of a planned chore if that is earlier.
    The chores are those of a release that recorded no time.
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


async def record_healing(connection: AsyncConnection, at: datetime) -> None:
    """Record when an artifact was last dropped because its blob was absent or damaged."""
    await connection.execute(
        upsert(connection, recorded_times, {"name": _HEALING, "recorded_at": at})
    )


async def last_healing(connection: AsyncConnection) -> datetime | None:
    """Return when an artifact was last dropped because its blob was absent or damaged."""
    healed = select(recorded_times.c.recorded_at).where(recorded_times.c.name == _HEALING)
    found: datetime | None = await connection.scalar(healed)
    return found


async def list_suspensions(connection: AsyncConnection) -> Sequence[Suspension]:
    """Return all suspensions, the oldest first. Only the last may have no end."""
    columns = [suspensions.c[name] for name in Suspension._fields]
    rows = await connection.execute(select(*columns).order_by(suspensions.c.began_at))
    return [Suspension(*row) for row in rows]


async def save_suspension(connection: AsyncConnection, suspension: Suspension) -> None:
    """Insert or replace a suspension."""
    await connection.execute(upsert(connection, suspensions, suspension._asdict()))


async def drop_suspension(connection: AsyncConnection, suspension: Suspension) -> None:
    """Delete a suspension."""
    await connection.execute(
        delete(suspensions).where(suspensions.c.began_at == suspension.began_at)
    )
