"""Database: read connections and write transactions, on SQLite or PostgreSQL.

Statements that are prepared (`db.prepared`) run on the driver, without SQLAlchemy's statement
layer. Prepared reads use their own connections (`db.reads`). Prepared transactions use
`writing_in_steps`. All other statements use SQLAlchemy's connections.

SQLite allows one writer at a time. So read connections have no transactions, and every write
transaction begins IMMEDIATE. Writers of this process queue instead of failing with "database is
locked". No transaction upgrades from reading to writing, because SQLite may fail an upgrade at
once instead of waiting.

PostgreSQL has one pool for reads and writes. Prepared reads keep one or two of its connections.
Transactions run concurrently (READ COMMITTED). A transaction takes a named lock on data that must
not change between two statements (`queries.locks`). On SQLite these locks do nothing.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Protocol, TypeVar

from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import DatabaseError, DataError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from graphstash_schema import ErrorCode
from graphstash_server.db.corruption import advice_for, corruption_in
from graphstash_server.db.prepared import NOTHING, Parameters, Prepared, Row, Transaction
from graphstash_server.db.reads import PostgresLane, ReadLanes, SqliteLane
from graphstash_server.db.sqlite import (
    HintingCompiler,
    SqliteConnection,
    SqliteHere,
    SqliteThread,
    SqliteTransaction,
    set_pragmas,
)
from graphstash_server.errors import CorruptDatabaseError, NoSpaceError, ServerError
from graphstash_server.shared_text import SharedText

__all__ = ["LOCK_NOT_AVAILABLE", "Database", "Steps", "make_engine"]

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

LOCK_NOT_AVAILABLE: Final = "55P03"
"""SQLSTATE of PostgreSQL: a lock was not granted within `lock_timeout`."""

_SQLITE_READERS = 4
_LANES = 2
"""Maximum number of connections for prepared reads. One may be busy with a long read, such as a
look-up of a thousand keys."""

_ANALYZED_ROWS = 400
"""Rows of each index that statistics are made of, so that this takes milliseconds in any store."""

_POOL_SECONDS = 20

_CONNECT_SECONDS = 5.0
_STATEMENT_SECONDS = 20.0
_LOCK_SECONDS = 5.0
"""Longer than `_IDLE_SECONDS`. If a frozen server holds the lock, the database ends its transaction
first and the waiting one continues. A transaction that is not idle may still cause a refusal."""

_IDLE_SECONDS = 3.0
_POSTGRES_SETTINGS = {
    "application_name": "graphstash",
    "idle_in_transaction_session_timeout": "60s",  # releases the locks of a host that vanished
    "jit": "off",  # costs more than any statement here
}
_POOL_SETTINGS = _POSTGRES_SETTINGS | {
    "idle_in_transaction_session_timeout": f"{_IDLE_SECONDS:g}s",
    "lock_timeout": f"{_LOCK_SECONDS:g}s",
    # Also ends a transaction whose server froze between preparing and executing a statement, which
    # does not count as idle.
    "statement_timeout": f"{_STATEMENT_SECONDS:g}s",
}
"""Settings for a server's requests, whose transactions take milliseconds. A migration may take
longer."""


class Steps(Protocol):
    """The steps of a transaction that waits for other work in between."""

    async def run(
        self, work: Callable[[Transaction], Coroutine[Any, Any, T]], *, is_last: bool = False
    ) -> T:
        """Run a step, which awaits only its own statements. The last step may commit; otherwise the
        end of the transaction does.
        """


class Database:
    """The connections of this process to its database, until `close`.

    Attributes:
        shared_connections: maximum connections that concurrent calls of one kind should occupy, so
            that other calls find a free connection.
        corruption: the first sign of damage that a worker of this host found, or None. From then
            on, every call raises `CorruptDatabaseError`.
    """

    def __init__(
        self, url: str, *, connections: int = 5, corruption: SharedText | None = None
    ) -> None:
        """Prepare the pools. Connects to nothing yet.

        Args:
            url: SQLAlchemy URL, `sqlite+aiosqlite:///...` or `postgresql+asyncpg://...`.
            connections: maximum number of connections in the pool to PostgreSQL.
            corruption: where the workers of this host share the first sign of damage.
        """
        self.url = make_url(url)
        self._corruption = corruption or SharedText()
        lanes = min(_LANES, connections // 2) if self.is_postgresql else 0
        free = connections - lanes if self.is_postgresql else _SQLITE_READERS
        self.shared_connections = max(1, free - 2)
        self._here = None if self.is_postgresql else SqliteHere(self.url)
        self._turn = asyncio.Lock()  # to write: SQLite allows one writer at a time
        if self.is_postgresql:
            self._writing = make_engine(
                self.url, pool_size=connections, max_overflow=0, pool_timeout=_POOL_SECONDS
            )
            self._reading = self._writing.execution_options(isolation_level="AUTOCOMMIT")
            self._reads = ReadLanes(
                [PostgresLane(self._reading) for _ in range(lanes)], is_postgresql=True
            )
            return
        self._reading = create_async_engine(
            self.url,
            isolation_level="AUTOCOMMIT",
            pool_size=_SQLITE_READERS,
            max_overflow=0,
            pool_timeout=_POOL_SECONDS,
            pool_reset_on_return=None,
        )
        self._reading.dialect.statement_compiler = HintingCompiler
        event.listen(self._reading.sync_engine, "connect", set_pragmas)
        self._writing = make_engine(
            self.url, pool_size=1, max_overflow=0, pool_timeout=_POOL_SECONDS
        )
        threads = [
            SqliteThread(self.url, name=f"sqlite-read-{number}", is_reader=True)
            for number in range(_LANES)
        ]
        self._reads = ReadLanes([SqliteLane(thread) for thread in threads], is_postgresql=False)
        self._writer = SqliteThread(self.url, name="sqlite-write")

    @property
    def corruption(self) -> str | None:
        """The first sign of damage, or None."""
        return self._corruption.get()

    @property
    def is_postgresql(self) -> bool:
        """Whether several hosts can share the database."""
        return self.url.get_backend_name() == "postgresql"

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection for reads. Each statement reads everything committed before it.

        Raises:
            ServerError: 503 if the database does not respond.
        """
        with self._map_errors():
            async with self._reading.connect() as connection:
                yield connection

    async def fetch(self, statement: Prepared, given: Parameters = NOTHING) -> Sequence[Row]:
        """Return the rows of a prepared statement, see `db.reads`.

        The result includes everything committed before this call.

        Raises:
            ServerError: 503 if the database does not respond.
        """
        if statement.finds_one and (found := self.fetch_now(statement, given)) is not None:
            return found
        with self._map_errors():
            return await self._reads.fetch(statement, given)

    def fetch_now(self, statement: Prepared, given: Parameters) -> Sequence[Row] | None:
        """Return the rows of a statement with `finds_one`, read on the event loop. Return None if
        that is impossible: on PostgreSQL, in a damaged database, before `SqliteHere` has a
        connection, after a slow read, or if the read fails.
        """
        if self._here is None or self.corruption is not None:
            return None
        compiled = statement.sqlite
        found = self._here.fetch(compiled.sql, compiled.bind(given))
        return None if found is None else compiled.rows(found)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction. It is durable at the end. An exception rolls it back.

        Raises:
            NoSpaceError: the disk is full.
            ServerError: 503 if the database does not respond.
        """
        with self._map_errors():
            async with self._write_turn(), self._writing.begin() as connection:
                yield connection

    @asynccontextmanager
    async def writing_in_steps(self, *, at_once: bool = False) -> AsyncIterator[Steps]:
        """Open a transaction of prepared statements. Raises the errors of `writing`. On SQLite,
        each step costs one call of a thread, regardless of its number of statements.

        With `at_once`, PostgreSQL commits each statement at its end, so a server that freezes
        between two statements holds no locks. On SQLite, this makes no difference.
        """
        with self._map_errors():
            if self.is_postgresql:
                engine = self._reading if at_once else self._writing
                async with engine.begin() as connection:
                    yield _PostgresSteps(connection)
                return
            async with self._write_turn():
                transaction = SqliteTransaction(self._writer)
                try:
                    yield transaction
                finally:
                    await transaction.roll_back()  # no effect after a commit

    @asynccontextmanager
    async def _write_turn(self) -> AsyncIterator[None]:
        """On SQLite, queue the writers of this process in their order of arrival."""
        if self.is_postgresql:
            yield
            return
        try:
            async with asyncio.timeout(_POOL_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            raise PoolTimeoutError("other transactions take too long") from None
        try:
            yield
        finally:
            self._turn.release()

    async def update_statistics(self) -> None:
        """Let SQLite estimate how selective its indexes are, from some rows of each. PostgreSQL
        does that itself.
        """
        if not self.is_postgresql:
            async with self.writing() as connection:
                await connection.exec_driver_sql(f"PRAGMA analysis_limit={_ANALYZED_ROWS}")
                await connection.exec_driver_sql("ANALYZE")

    def note_corruption(self, reason: str) -> None:
        """Make all workers of this host refuse every call of the database. Log what to do, unless a
        worker has noted damage before.
        """
        if self.corruption is None:
            self._corruption.set(reason)
            _LOGGER.error("%s", advice_for(reason))

    @contextmanager
    def _map_errors(self) -> Iterator[None]:
        if (reason := self.corruption) is not None:
            raise CorruptDatabaseError(advice_for(reason))
        try:
            yield
        except PoolTimeoutError as error:
            raise ServerError(
                ErrorCode.UNAVAILABLE, "the database is busy: retry in a second"
            ) from error
        except (IntegrityError, ProgrammingError, DataError) as error:
            if not _is_transient(error):
                raise  # a bug in this program
            raise self._no_answer(error) from error
        except DBAPIError as error:
            raise self._failure(error) from error
        except OSError as error:  # asyncpg: connection refused, or a timeout
            raise self._no_answer(error) from error
        except Exception as error:
            # Raised while connecting, or by statements that run directly on the driver (`fetch`).
            if type(error).__module__.startswith("asyncpg") and not _is_bug(error):
                raise self._no_answer(error) from error
            raise

    def _failure(self, error: DBAPIError) -> ServerError:
        if _sqlstate(error) == LOCK_NOT_AVAILABLE:
            _LOGGER.warning("a lock was not granted within %g s: %s", _LOCK_SECONDS, error.orig)
            return ServerError(
                ErrorCode.UNAVAILABLE,
                f"another transaction has kept this one waiting for {_LOCK_SECONDS:g} s: nothing "
                "was changed, retry in some seconds; if it lasts, /readyz says what waits",
            )
        if _is_full(error):
            return NoSpaceError(
                "the disk of the database is full: nothing was stored; free some space"
            )
        return self._no_answer(error)

    def _no_answer(self, error: Exception) -> ServerError:
        if (reason := corruption_in(error)) is not None:
            self.note_corruption(reason)
            return CorruptDatabaseError(advice_for(reason))
        cause = error.orig if isinstance(error, DBAPIError) else error
        _LOGGER.warning("the database does not answer: %s: %s", type(error).__name__, cause)
        return ServerError(ErrorCode.UNAVAILABLE, "the database does not answer: retry in a second")

    async def close(self) -> None:
        """Close every connection."""
        await self._reads.close()
        if self._here is not None:
            await self._here.close()
            await self._writer.close()
        else:
            event.listen(self._writing.sync_engine, "close", _hang_up)
        await self._writing.dispose()
        await self._reading.dispose()


class _PostgresSteps:
    """Steps on one connection. Leaving `writing_in_steps` commits the transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def run(
        self,
        work: Callable[[Transaction], Coroutine[Any, Any, T]],
        *,
        is_last: bool = False,  # noqa: ARG002 - leaving the connection commits
    ) -> T:
        return await work(self._connection)


def make_engine(url: URL, **pool: Any) -> AsyncEngine:
    """Create an engine with real transactions, also on SQLite. Without `pool`, the engine keeps no
    connection, and statements have no timeout.
    """
    pool = pool or {"poolclass": NullPool}
    if url.get_backend_name() == "postgresql":
        is_pool = "pool_size" in pool
        arguments: dict[str, Any] = {
            "timeout": _CONNECT_SECONDS,
            "command_timeout": _STATEMENT_SECONDS if is_pool else None,
            "server_settings": _POOL_SETTINGS if is_pool else _POSTGRES_SETTINGS,
        }
        # A connection is tested before use, so that a restart of the database fails no request.
        return create_async_engine(url, connect_args=arguments, pool_pre_ping=is_pool, **pool)
    engine = create_async_engine(url, connect_args={"factory": SqliteConnection}, **pool)
    engine.dialect.statement_compiler = HintingCompiler
    event.listen(engine.sync_engine, "connect", set_pragmas)
    event.listen(engine.sync_engine, "connect", _begin_nothing)
    event.listen(engine.sync_engine, "begin", _begin_immediate)
    return engine


def _hang_up(connection: Any, _record: Any) -> None:
    """End a connection without waiting for the database, which may not respond."""
    connection.driver_connection.terminate()


def _begin_nothing(connection: Any, _record: Any) -> None:
    """Stop the driver from beginning transactions itself: it begins late, and DEFERRED."""
    connection.isolation_level = None


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _is_full(error: DBAPIError) -> bool:
    return "disk is full" in str(error.orig) or _sqlstate(error) == "53100"


def _is_transient(error: DatabaseError) -> bool:
    """Return whether the database is starting, stopping or out of resources (classes 53 and 57)."""
    return _sqlstate(error)[:2] in ("53", "57")


def _is_bug(error: Exception) -> bool:
    """Return whether the statement or its values are wrong (classes 22, 23 and 42). Missing rights
    on the database (42501) count as no response instead.
    """
    sqlstate = str(getattr(error, "sqlstate", None) or "")
    return sqlstate[:2] in ("22", "23", "42") and sqlstate != "42501"


def _sqlstate(error: DBAPIError) -> str:
    return str(getattr(error.orig, "sqlstate", None) or "")
