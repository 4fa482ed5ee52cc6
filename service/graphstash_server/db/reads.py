"""Reads: runs the most frequent reads, and shares one statement among equal concurrent requests.

A request joins an equal read that is waiting. It never joins a running read, which may miss rows
committed meanwhile. So any number of simultaneous equal requests cost one or two statements, and
each result includes everything committed before its request.

Each lane keeps one connection. A PostgreSQL lane runs one read at a time; a SQLite lane runs all
waiting reads together.
"""

import asyncio
import sqlite3
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from graphstash_server.db.prepared import Compiled, Parameters, Prepared, Row
from graphstash_server.db.sqlite import SqliteThread, as_core_error
from graphstash_server.logs import in_background

__all__ = ["Lane", "PostgresLane", "ReadLanes", "SqliteLane"]

Read: TypeAlias = tuple[Compiled, tuple[Any, ...]]
"""A statement and its bound values."""

Answer: TypeAlias = Sequence[Row] | Exception


class Lane(Protocol):
    """Runs reads, one call at a time.

    Attributes:
        at_once: maximum number of reads per call.
    """

    at_once: int

    async def fetch(self, reads: Sequence[Read]) -> Sequence[Answer]:
        """Return the rows or the error of each read."""

    async def close(self) -> None:
        """Release the connection."""


class ReadLanes:
    """Distributes reads among lanes. Use it from one event loop."""

    def __init__(self, lanes: Sequence[Lane], *, is_postgresql: bool) -> None:
        self._lanes = lanes
        self._free = list(lanes)
        self._is_postgresql = is_postgresql
        self._waiting: dict[Read, list[asyncio.Future[Sequence[Row]]]] = {}
        self._is_scheduled = False
        self._running: set[asyncio.Task[None]] = set()

    async def fetch(self, statement: Prepared, parameters: Parameters) -> Sequence[Row]:
        """Return the rows of a statement, read after this call began."""
        compiled = statement.postgresql if self._is_postgresql else statement.sqlite
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Sequence[Row]] = loop.create_future()
        self._waiting.setdefault((compiled, compiled.bind(parameters)), []).append(result)
        if not self._is_scheduled and self._free:
            self._is_scheduled = True
            loop.call_soon(self._send)  # batch all requests of this loop iteration
        return await result

    async def close(self) -> None:
        """Wait for the running reads, and close the lanes."""
        if self._running:
            await asyncio.wait(self._running)
        for lane in self._lanes:
            await lane.close()

    def _send(self) -> None:
        self._is_scheduled = False
        while self._waiting and self._free:
            lane = self._free.pop()
            batch = {read: self._waiting.pop(read) for read in list(self._waiting)[: lane.at_once]}
            task = in_background(self._run(lane, batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(
        self, lane: Lane, batch: "dict[Read, list[asyncio.Future[Sequence[Row]]]]"
    ) -> None:
        """Run a batch, and pass its rows or its error to the requests."""
        try:
            answers = await lane.fetch(list(batch))
        except Exception as error:  # noqa: BLE001 - the requests raise it
            answers = [error] * len(batch)
        finally:
            self._free.append(lane)
        for results, answer in zip(batch.values(), answers, strict=True):
            for result in results:
                if result.done():
                    continue  # its caller was cancelled
                if isinstance(answer, Exception):
                    result.set_exception(answer)
                else:
                    result.set_result(answer)
        self._send()


class SqliteLane:
    """A SQLite thread."""

    at_once = 256

    def __init__(self, thread: SqliteThread) -> None:
        self._thread = thread

    async def fetch(self, reads: Sequence[Read]) -> Sequence[Answer]:
        """Run all reads in one call of the thread."""
        return await self._thread.call(lambda connection: [_fetch(connection, *r) for r in reads])

    async def close(self) -> None:
        """Stop the thread."""
        await self._thread.close()


def _fetch(connection: sqlite3.Connection, statement: Compiled, values: Sequence[Any]) -> Answer:
    try:
        return statement.rows(connection.execute(statement.sql, values).fetchall())
    except sqlite3.Error as error:
        return as_core_error(error)


class PostgresLane:
    """A connection of the pool, kept because its driver caches prepared statements."""

    at_once = 1

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._kept: AsyncConnection | None = None
        self._driver: Any = None

    async def fetch(self, reads: Sequence[Read]) -> Sequence[Answer]:
        """Run one read. If the kept connection was closed, retry once with a new connection."""
        ((statement, values),) = reads
        was_kept = self._kept is not None
        try:
            return [statement.rows(await self._fetch(statement.sql, values))]
        except BaseException:
            has_ended = self._driver is None or self._driver.is_closed()
            await self._discard()
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
        rows: Sequence[Row] = await self._driver.fetch(sql, *values)
        return rows

    async def _discard(self) -> None:
        """Discard the connection, because its state is unknown. The next read opens another."""
        kept, self._kept, self._driver = self._kept, None, None
        if kept is not None:
            await kept.invalidate()
            await kept.close()
