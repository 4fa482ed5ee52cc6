"""PlausibleClock: the time by which servers age and delete. After a jump, it follows slowly.

A clock may be wrong: a bad time server, a host that starts before its clock is set, a restored
virtual machine. A deletion by age cannot be undone, so it must not depend on one reading.

The servers record the time in the database. The recorded time follows the clock, at most `_PACE`
times as fast as a monotonic clock. If clock and recorded time differ by more than `TOLERANCE`, the
servers suspend deletion by age. During a suspension, the recorded time advances like a monotonic
clock. A second time, `followed_at`, starts at the recorded time and follows the clock at most
`_PACE` times as fast. The suspension ends in one of three cases:

- The clock agrees with the recorded time again.
- `followed_at` has reached the clock.
- An operator accepts the clock.

If a clock is 200 days ahead for eight seconds, `followed_at` advances by only eighty seconds. A
server that was off for two months deletes nothing by age for its first week.

Times that the servers store during a suspension are from before the jump, and would suddenly be old
at its end. Therefore `ago` never returns a time between the beginning and the end of a suspension.
So an artifact used during the suspension ages from its end.

Each process adds its own monotonic time to the times that it has read, so many servers follow the
clock no faster than one. A restart advances nothing, except during a suspension. Then
`followed_at` advances by the time since a server last ran: at most `_OFF_PACE` times its uptime,
and at most `_MAX_OFF`. So a server that is off for most of every day catches up, and a wrong clock
gains no more than that per start.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import ErrorCode
from graphstash_server.clock import Clock, SteadyClock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.recorded_times import (
    Suspension,
    drop_suspension,
    list_suspensions,
    lock_recorded_time,
    record_time,
    save_suspension,
)
from graphstash_server.errors import ServerError

__all__ = ["TOLERANCE", "PlausibleClock"]

_LOGGER = logging.getLogger(__name__)

TOLERANCE: Final = timedelta(hours=1)
"""Maximum difference of clock and recorded time at which the servers delete by age."""

_PACE: Final = 10

_OFF_PACE: Final = 72
_MAX_OFF: Final = timedelta(days=3)  # a weekend

_OVERLAP: Final = 4 * TOLERANCE
"""Times this long before a suspension count as recorded during it. Servers that have not read the
suspension yet store times up to `TOLERANCE` from a recorded time that was up to `TOLERANCE` off."""


@dataclass(kw_only=True, eq=False)
class PlausibleClock:
    """A `Clock` for times that decide about deletions: uses, pins, ages.

    It returns the time of `clock`, but never before the recorded time, and at most `TOLERANCE`
    after the recorded time plus the time since the last `observe`. Before the first `observe`, it
    returns the time of `clock`.

    Attributes:
        jump: clock minus recorded time.
    """

    database: Database
    clock: Clock
    steady: SteadyClock

    def __post_init__(self) -> None:
        self._recorded: datetime | None = None
        self._suspensions: Sequence[Suspension] = ()
        self._began_at = self._read_at = self.steady()
        self.jump = timedelta(0)

    def __call__(self) -> datetime:
        """Return the time."""
        return self.bound(self.clock())

    def bound(self, at: datetime) -> datetime:
        """Limit a recent time of `clock` to the range that this clock allows."""
        if self._recorded is None:
            return at
        return min(max(at, self._recorded), self._recorded + self._passed() + TOLERANCE)

    def ago(self, age: timedelta) -> datetime:
        """Return the time before which stored times are older than `age`.

        A clock that is ahead by less than `TOLERANCE` may also be wrong, which matters for short
        ages. So the age ends at the recorded time. An age of zero means everything.
        """
        now = self()
        if age and self._recorded is not None:
            now = min(now, self._recorded + self._passed())
        limit = now - age
        for suspension in reversed(self._suspensions):
            began_at = suspension.began_at - _OVERLAP
            if suspension.ended_at is not None and began_at <= limit < suspension.ended_at:
                limit = began_at
        return limit

    @property
    def last_gap(self) -> tuple[datetime, datetime] | None:
        """Range of the stored times that count as the end of the last suspension, or None."""
        if self._open or not self._suspensions:
            return None
        last = self._suspensions[-1]
        return (last.began_at - _OVERLAP, last.ended_at) if last.ended_at else None

    @property
    def is_suspended(self) -> bool:
        """Whether deletion by age is suspended, as of the last `observe`."""
        return abs(self.jump) > TOLERANCE

    @property
    def state(self) -> str:
        """`ok`, or why deletion by age is suspended."""
        if not self.is_suspended:
            return "ok"
        side = "ahead of" if self.jump > timedelta(0) else "behind"
        ahead = self.jump
        if self._recorded is not None and self._open is not None:
            ahead += self._recorded - self._open.followed_at
        wait = abs(ahead) / _PACE
        return (
            f"deletion by age is suspended: the clock is {_rounded(self.jump)} {side} the time "
            f"that the servers have recorded; if it stays, they believe it in {_rounded(wait)}; if "
            "it is right, `graphstash clock --accept` ends the wait"
        )

    async def observe(self) -> bool:
        """Let the recorded time follow the clock. Return whether the servers may delete by age.

        Raises:
            ServerError: 503 if the database does not respond.
        """
        now = self.clock()
        async with self.database.writing() as connection:
            recorded = await lock_recorded_time(connection, now=now)
            last = [None, *await list_suspensions(connection)][-1]
            if last is None or last.ended_at is not None:
                since = self._recorded or recorded
                recorded = _followed(recorded, now, since=since, reach=_PACE * self._passed())
                if abs(now - recorded) > TOLERANCE:
                    opened = Suspension(recorded, None, recorded, now, 0.0)
                    await save_suspension(connection, opened)
            else:
                recorded, last = self._during(last, recorded, now)
                if abs(now - recorded) <= TOLERANCE:
                    await drop_suspension(connection, last)
                elif abs(now - last.followed_at) <= TOLERANCE:
                    recorded = await self._end(connection, last, now)
                else:
                    await save_suspension(connection, last)
            await record_time(connection, recorded)
            suspensions = await list_suspensions(connection)
        self._note(recorded, now, suspensions)
        return not self.is_suspended

    async def accept(self) -> None:
        """Record the time of the clock, which an operator has confirmed."""
        now = self.clock()
        async with self.database.writing() as connection:
            recorded = await lock_recorded_time(connection, now=now)
            last = [None, *await list_suspensions(connection)][-1]
            if last is None or last.ended_at is not None:
                last = Suspension(recorded, None, recorded, now, 0.0)
            await self._end(connection, last, now)
            await record_time(connection, now)
            suspensions = await list_suspensions(connection)
        self._note(now, now, suspensions)

    async def require(self) -> None:
        """Raise if deletion by age is suspended.

        Raises:
            ServerError: 409 if deletion by age is suspended, 503 if the database does not respond.
        """
        if not await self.observe():
            raise ServerError(ErrorCode.CONFLICT, self.state)

    @property
    def _open(self) -> Suspension | None:
        """The current suspension, as of the last `observe`."""
        last = self._suspensions[-1] if self._suspensions else None
        return last if last is not None and last.ended_at is None else None

    def _during(
        self, last: Suspension, recorded: datetime, now: datetime
    ) -> tuple[datetime, Suspension]:
        """Return the recorded time and the suspension after another reading of the clock."""
        followed = last.followed_at
        if self._recorded is None:  # this process has just started
            was_off = min(now - last.seen_at, _MAX_OFF, _OFF_PACE * _seconds(last.up_seconds))
            if was_off > timedelta(0):
                followed = min(followed + was_off, max(followed, now))
        elif (mine := self._open) is not None and mine.began_at == last.began_at:
            passed = self._passed()
            recorded = max(recorded, self._recorded + passed)
            followed = _followed(followed, now, since=mine.followed_at, reach=_PACE * passed)
        up_seconds = self.steady() - self._began_at
        return recorded, last._replace(followed_at=followed, seen_at=now, up_seconds=up_seconds)

    @staticmethod
    async def _end(connection: AsyncConnection, last: Suspension, now: datetime) -> datetime:
        """End a suspension. Drop it after a jump backwards, which makes nothing look too old."""
        if now > last.began_at:
            await save_suspension(connection, last._replace(ended_at=now))
        else:
            await drop_suspension(connection, last)
        return now

    def _note(self, recorded: datetime, now: datetime, suspensions: Sequence[Suspension]) -> None:
        was_suspended = self.is_suspended
        self._recorded, self._read_at, self.jump = recorded, self.steady(), now - recorded
        self._suspensions = suspensions
        if self.is_suspended and not was_suspended:
            _LOGGER.warning("%s", self.state)
        elif was_suspended and not self.is_suspended:
            _LOGGER.warning("the clock and the recorded time agree: deletion by age continues")

    def _passed(self) -> timedelta:
        """Return the time since this process read the recorded time."""
        if self._recorded is None:
            return timedelta(0)
        return _seconds(self.steady() - self._read_at)


def _followed(recorded: datetime, now: datetime, *, since: datetime, reach: timedelta) -> datetime:
    """Move a recorded time towards the clock, but not further than `reach` from `since`."""
    if now > recorded:
        return max(recorded, min(now, since + reach))
    return min(recorded, max(now, since - reach))


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def _rounded(time: timedelta) -> str:
    """Return a duration in days or hours, without its sign."""
    hours = abs(time) / timedelta(hours=1)
    if hours >= 48:
        return f"{hours / 24:.0f} days"
    return f"{hours:.1f} hours"
