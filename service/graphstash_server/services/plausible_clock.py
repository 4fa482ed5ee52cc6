"""PlausibleClock: the time by which servers age and delete. It follows a clock that jumps slowly.

A clock may be wrong: a bad time server, a host that starts before its clock is set, a restored
virtual machine. A deletion by age cannot be undone, so one look at one clock is not enough for it.

The servers record in the database what time it is. At each look, the recorded time follows the
clock, but at most `_PACE` times as fast as the monotonic clocks of the servers run. A clock that is
200 days ahead for eight seconds therefore moves the recorded time by eighty seconds. If clock and
recorded time differ by more than `TOLERANCE`, deletion by age is suspended until an operator
accepts the clock, or until the recorded time has caught up: after a tenth of the jump. A server
that was off for two months deletes nothing by age for its first six days.

Each process measures from the recorded time that it read itself, so many servers together advance
the recorded time no faster than one server, and a restart advances nothing.
"""

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from graphstash_schema import ErrorCode
from graphstash_server.clock import Clock, SteadyClock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.recorded_times import lock_recorded_time, record_time
from graphstash_server.errors import ServerError

__all__ = ["TOLERANCE", "PlausibleClock"]

_LOGGER = logging.getLogger(__name__)

TOLERANCE: Final = timedelta(hours=1)
"""Maximum difference of clock and recorded time at which the servers delete by age. Every such rule
keeps what it deletes for longer."""

_PACE: Final = 10


@dataclass(kw_only=True, eq=False)
class PlausibleClock:
    """A `Clock` for times that decide about deletions: uses, pins, ages.

    It returns the time of `clock`, but never before the recorded time, and never more than
    `TOLERANCE` after it. Until the first `observe` it returns the time of `clock`.

    Attributes:
        jump: how far the clock is ahead of the recorded time; negative if it is behind.
    """

    database: Database
    clock: Clock
    steady: SteadyClock

    def __post_init__(self) -> None:
        self._recorded: datetime | None = None
        self._read_at = 0.0
        self.jump = timedelta(0)

    def __call__(self) -> datetime:
        """Return the time."""
        return self.bound(self.clock())

    def bound(self, at: datetime) -> datetime:
        """Return a recent time of `clock` as this clock gives it."""
        if self._recorded is None:
            return at
        return min(max(at, self._recorded), self._recorded + self._passed() + TOLERANCE)

    @property
    def is_suspended(self) -> bool:
        """Whether nothing may be deleted by age, as of the last `observe`."""
        return abs(self.jump) > TOLERANCE

    @property
    def state(self) -> str:
        """Return `ok`, or what suspends deletion by age."""
        if not self.is_suspended:
            return "ok"
        side = "ahead of" if self.jump > timedelta(0) else "behind"
        wait = abs(self.jump) / _PACE
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
            reach = _PACE * self._passed()
            since = self._recorded or recorded
            if now > recorded:
                recorded = max(recorded, min(now, since + reach))
            else:
                recorded = min(recorded, max(now, since - reach))
            await record_time(connection, recorded)
        self._note(recorded, now)
        return not self.is_suspended

    async def accept(self) -> None:
        """Record the time of the clock, because an operator says that it is right."""
        now = self.clock()
        async with self.database.writing() as connection:
            await lock_recorded_time(connection, now=now)
            await record_time(connection, now)
        self._note(now, now)

    async def require(self) -> None:
        """Refuse a deletion by age while the clock is doubtful.

        Raises:
            ServerError: 409 if deletion by age is suspended.
        """
        if not await self.observe():
            raise ServerError(ErrorCode.CONFLICT, self.state)

    def _note(self, recorded: datetime, now: datetime) -> None:
        was_suspended = self.is_suspended
        self._recorded, self._read_at, self.jump = recorded, self.steady(), now - recorded
        if self.is_suspended and not was_suspended:
            _LOGGER.warning("%s", self.state)
        elif was_suspended and not self.is_suspended:
            _LOGGER.warning("the clock and the recorded time agree: deletion by age continues")

    def _passed(self) -> timedelta:
        """Return the time since this process read the recorded time."""
        if self._recorded is None:
            return timedelta(0)
        return timedelta(seconds=self.steady() - self._read_at)


def _rounded(time: timedelta) -> str:
    """Return a time in the largest unit that fits, without its sign."""
    hours = abs(time) / timedelta(hours=1)
    if hours >= 48:
        return f"{hours / 24:.0f} days"
    return f"{hours:.1f} hours"
