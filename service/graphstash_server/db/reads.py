"""Reads: run the most frequent reads, with one statement for all requests with the same read.

A request joins an equal read that has not begun. It never joins a running read, which may miss rows
committed meanwhile. So a crowd costs one or two statements, and each result includes everything
committed before its request.

Each lane keeps one connection. It runs one read at a time, or on SQLite all reads that are waiting.
"""

import asyncio
import sqlite3
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from graphstash_server.db.prepared import Compiled, Parameters, Prepared, Row
from graphstash_server.db.sqlite import SqliteThread, as_core_error
from graphstash_server.logs import in_background

__all__ = ["Lane", "PostgresLane", "Reads", "SqliteLane"]

Read: TypeAlias = tuple[Compiled, tuple[Any, ...]]
"""A statement and its values."""

Answer: TypeAlias = Sequence[Row] | Exception


class Lane(Protocol):
    """Runs reads, one call at a time.

    Attributes:
        at_once: maximum number of reads per call.
    """

    at_once: int

    async def fetch(self, wanted: Sequence[Read]) -> Sequence[Answer]:
        """Return the rows of each read, or its error."""

    async def close(self) -> None:
        """Release the connection."""


class Reads:
    """Distributes reads among lanes. Use it on one event loop."""

    def __init__(self, lanes: Sequence[Lane], *, is_postgresql: bool) -> None:
        self._lanes = lanes
        self._free = list(lanes)
        self._is_postgresql = is_postgresql
        self._wanted: dict[Read, list[asyncio.Future[Sequence[Row]]]] = {}
        self._is_called = False
        self._running: set[asyncio.Task[None]] = set()

    async def fetch(self, statement: Prepared, given: Parameters) -> Sequence[Row]:
        """Return the rows of a statement, as of some time after this call."""
        compiled = statement.postgresql if self._is_postgresql else statement.sqlite
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Sequence[Row]] = loop.create_future()
        self._wanted.setdefault((compiled, compiled.bind(given)), []).append(found)
        if not self._is_called and self._free:
            self._is_called = True
            loop.call_soon(self._send)  # after the other requests of this loop iteration
        return await found

    async def close(self) -> None:
        """Wait for the running reads."""
        if self._running:
            await asyncio.wait(self._running)
        for lane in self._lanes:
            await lane.close()

    def _send(self) -> None:
        self._is_called = False
        while self._wanted and self._free:
            lane = self._free.pop()
            batch = {read: self._wanted.pop(read) for read in list(self._wanted)[: lane.at_once]}
            task = in_background(self._run(lane, batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(
        self, lane: Lane, batch: "dict[Read, list[asyncio.Future[Sequence[Row]]]]"
    ) -> None:
        """Run a batch as the outermost frame of a task. An error goes to the requests."""
        try:
            answers = await lane.fetch(list(batch))
        except Exception as error:  # noqa: BLE001 - passed to the requests
            answers = [error] * len(batch)
        finally:
            self._free.append(lane)
        for waiting, answer in zip(batch.values(), answers, strict=True):
            for found in waiting:
                if found.done():
                    continue  # its caller was cancelled
                if isinstance(answer, Exception):
                    found.set_exception(answer)
                else:
                    found.set_result(answer)
        self._send()


class SqliteLane:
    """A thread that takes all waiting reads."""

    at_once = 256

    def __init__(self, thread: SqliteThread) -> None:
        self._thread = thread

    async def fetch(self, wanted: Sequence[Read]) -> Sequence[Answer]:
        """Run all reads in one call of the thread."""
        return await self._thread.call(lambda connection: [_fetch(connection, *r) for r in wanted])

    async def close(self) -> None:
        """Stop the thread."""
        await self._thread.close()


def _fetch(connection: sqlite3.Connection, statement: Compiled, values: Sequence[Any]) -> Answer:
    try:
        return statement.rows(connection.execute(statement.sql, values).fetchall())
    except sqlite3.Error as error:
        return as_core_error(error)


class PostgresLane:
    """A pool connection, kept from the first read on. Its driver keeps prepared statements."""

    at_once = 1

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._kept: AsyncConnection | None = None
        self._driver: Any = None

    async def fetch(self, wanted: Sequence[Read]) -> Sequence[Answer]:
        """Run one read. If the kept connection has ended, retry once on another one."""
        ((statement, values),) = wanted
        was_kept = self._kept is not None
        try:
            return [statement.rows(await self._fetch(statement.sql, values))]
        except BaseException:
            has_ended = self._driver is None or self._driver.is_closed()
            await self._give_up()
            if not (was_kept and has_ended):
                raise
        return [statement.rows(await self._fetch(statement.sql, values))]

    async def close(self) -> None:
        """Return the connection to the pool."""
        kept, self._kept = self._kept, None
        if kept is not None:
            await kept.close()

    async def _fetch(self, sql: str, values: Sequence[Any]) -> Sequence[Row]:
        if self._kept is None:
            self._kept = await self._engine.connect()
            self._driver = (await self._kept.get_raw_connection()).driver_connection
        found: Sequence[Row] = await self._driver.fetch(sql, *values)
        return found

    async def _give_up(self) -> None:
        """Use another connection next time, because the state of this one is unknown."""
        kept, self._kept, self._driver = self._kept, None, None
        if kept is not None:
            await kept.invalidate()
            await kept.close()
