"""Database: connections that read and transactions that write.

SQLite takes one writer at a time. So there are two pools on it: reading connections without
transactions, and one writing connection whose transactions begin IMMEDIATE. Writers of this
process queue for that connection instead of failing with "database is locked", and a transaction
never has to upgrade from reading to writing, which is the deadlock that SQLite cannot wait out.
A database server will have one pool for both; nothing outside this module depends on it.
"""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DatabaseError, DataError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from graphstash_schema import ErrorCode
from graphstash_server.errors import NoSpaceError, ServerError

__all__ = ["Database", "begin_immediate"]

_LOGGER = logging.getLogger(__name__)

_READERS = 4
_BUSY_MILLISECONDS = 10_000
_POOL_SECONDS = 20


class Database:
    """Opened by whoever makes it, closed with `close`."""

    def __init__(self, url: str) -> None:
        """Prepares the pools; nothing connects yet."""
        self._reading = create_async_engine(
            url,
            isolation_level="AUTOCOMMIT",
            pool_size=_READERS,
            max_overflow=0,
            pool_timeout=_POOL_SECONDS,
            pool_reset_on_return=None,
        )
        self._writing = create_async_engine(
            url, pool_size=1, max_overflow=0, pool_timeout=_POOL_SECONDS
        )
        event.listen(self._reading.sync_engine, "connect", _set_pragmas)
        begin_immediate(self._writing)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A connection for statements that change nothing; each sees what was committed before it.

        Raises:
            ServerError: 503 when the database does not answer.
        """
        with _failures_named():
            async with self._reading.connect() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """A transaction, committed at the end and durable then; rolled back by an exception.

        While it is open no other one is, in any process on this database: what is checked inside
        stays true until the commit. (A database with finer locks has to lock the digest here.)

        Raises:
            NoSpaceError: when the disk is full.
            ServerError: 503 when the database does not answer.
        """
        with _failures_named():
            async with self._writing.begin() as connection:
                yield connection

    async def close(self) -> None:
        """Closes every connection."""
        await self._writing.dispose()
        await self._reading.dispose()


def begin_immediate(engine: AsyncEngine) -> None:
    """Makes an engine on SQLite begin real transactions, and with the write lock taken."""
    event.listen(engine.sync_engine, "connect", _set_pragmas)
    event.listen(engine.sync_engine, "connect", _begin_nothing)
    event.listen(engine.sync_engine, "begin", _begin_immediate)


def _set_pragmas(connection: Any, _record: Any) -> None:
    """Prepares a new SQLite connection.

    WAL lets readers go on while one writes. `synchronous=FULL` makes the commit wait for the disk:
    with NORMAL an artifact whose upload was acknowledged could be forgotten by a power cut.
    """
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_MILLISECONDS}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin_nothing(connection: Any, _record: Any) -> None:
    """Stops the driver from beginning transactions its own way, which is late and DEFERRED."""
    connection.isolation_level = None


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


@contextmanager
def _failures_named() -> Iterator[None]:
    """Turns what the driver says into a refusal, and logs it whole."""
    try:
        yield
    except PoolTimeoutError as error:
        raise ServerError(
            ErrorCode.UNAVAILABLE, "the database is busy: ask again in a second"
        ) from error
    except (IntegrityError, ProgrammingError, DataError):
        raise  # a fault of this program
    except DatabaseError as error:
        if "disk is full" in str(error.orig):
            raise NoSpaceError(
                "the disk has no room for the database: nothing was stored; free some space"
            ) from error
        _LOGGER.exception("the database does not answer")
        raise ServerError(
            ErrorCode.UNAVAILABLE, "the database does not answer: ask again in a second"
        ) from error
