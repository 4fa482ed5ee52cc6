"""DatabaseClock: the clock of PostgreSQL, which the servers of all hosts share.

Servers compare times that other servers stored: the ends of leases, claims and tokens. With the
clock of its own host, a server whose clock is wrong would end other servers' leases, or wait hours
for a dead holder. SQLite needs no such clock, because all its servers run on one host.
"""

import asyncio
import logging
from datetime import datetime, timedelta
from typing import Self

from sqlalchemy import func, select

from graphstash_server.clock import SteadyClock
from graphstash_server.db.engine import Database
from graphstash_server.errors import CorruptDatabaseError, ServerError

__all__ = ["DatabaseClock"]

_LOGGER = logging.getLogger(__name__)

_READ_SECONDS = 10.0
"""Seconds between two readings. Servers follow a changed clock within this time."""


class DatabaseClock:
    """A `Clock` that adds monotonic time to its last reading. A call costs no query."""

    def __init__(self, database: Database, *, steady: SteadyClock) -> None:
        """Use `open` instead, which reads the clock first."""
        self._database = database
        self._steady = steady
        self._at: datetime | None = None
        self._read_at = 0.0

    @classmethod
    async def open(cls, database: Database, *, steady: SteadyClock) -> Self:
        """Return a clock after its first `read`, which may raise."""
        clock = cls(database, steady=steady)
        await clock.read()
        return clock

    def __call__(self) -> datetime:
        """Return the time of the database."""
        assert self._at is not None  # noqa: S101 - `open` has read it
        return self._at + timedelta(seconds=self._steady() - self._read_at)

    async def read(self) -> None:
        """Read the clock. Keep the last reading if they differ by at most the time of the query.

        Raises:
            ServerError: 503 if the database does not respond.
        """
        async with self._database.reading() as connection:
            began_at = self._steady()
            at: datetime = (await connection.execute(select(func.clock_timestamp()))).scalar_one()
            took = timedelta(seconds=self._steady() - began_at)
        if self._at is None or not at - took <= self() <= at + took:
            self._at, self._read_at = at, self._steady()

    async def run(self) -> None:
        """Read the clock every ten seconds until cancelled, or until the database is corrupt."""
        while True:
            await asyncio.sleep(_READ_SECONDS)
            try:
                await self.read()
            except CorruptDatabaseError:
                return  # the database has logged it
            except ServerError as error:
                _LOGGER.warning("could not read the clock of the database, will retry: %s", error)
            except Exception:
                _LOGGER.exception("could not read the clock of the database, will retry")
