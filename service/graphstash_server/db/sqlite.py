"""SQLite without SQLAlchemy: connections that each run in their own thread.

SQLite needs microseconds for a statement. Handing it to a thread takes longer. So each hand-over
runs many statements: all waiting reads (`db.reads`), or a step of a transaction. The event loop
itself reads single rows that are in memory (`SqliteHere`).
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from resource import RUSAGE_THREAD, getrusage
from typing import Any, Final, TypeVar

from sqlalchemy.dialects.sqlite.base import SQLiteCompiler
from sqlalchemy.engine import URL, Dialect
from sqlalchemy.exc import DBAPIError

from graphstash_server.threads import Threads

__all__ = [
    "HintingCompiler",
    "SqliteConnection",
    "SqliteHere",
    "SqliteThread",
    "SqliteTransaction",
    "as_core_error",
    "connect",
    "set_pragmas",
]

T = TypeVar("T")

_BUSY_MILLISECONDS: Final = 10_000

_SLOW_SECONDS: Final = 0.001
_TOO_SLOW_SECONDS: Final = 0.05

_MAX_BLOCKED_SHARE: Final = 0.01
"""Maximum share of the event loop's time that slow reads take."""


class HintingCompiler(SQLiteCompiler):
    """Renders `Select.with_hint` (INDEXED BY), which SQLAlchemy ignores on SQLite."""

    def get_from_hint_text(self, _table: Any, text: str | None) -> str | None:
        """Return the text that follows the name of a table."""
        return text


class SqliteConnection(sqlite3.Connection):
    """A connection whose `close` ends its transaction.

    Otherwise an open transaction lasts until Python frees the connection's last cursor. The
    traceback of a cancelled caller may hold a cursor, and meanwhile the database stays locked.
    """

    def close(self) -> None:
        """Roll back an open transaction, and close the connection. Idempotent."""
        try:
            with suppress(sqlite3.ProgrammingError):  # already closed
                if self.in_transaction:
                    self.rollback()
        finally:
            super().close()


class _OfThread(threading.local):
    connection: sqlite3.Connection | None = None


class SqliteThread:
    """One connection in its own thread, which the first call starts."""

    def __init__(self, url: URL, *, name: str, is_reader: bool = False) -> None:
        """Start nothing yet. A reader's connection is read-only."""
        self.dialect: Dialect = url.get_dialect()()
        self._url = url
        self._is_reader = is_reader
        self._of_thread = _OfThread()
        self._thread = Threads(1, name=name, when_ended=self._hang_up)

    def call(self, work: Callable[[sqlite3.Connection], T]) -> "asyncio.Future[T]":
        """Run `work` in the thread, after all earlier calls."""
        return self._thread.call(partial(self._run, work))

    async def close(self) -> None:
        """Finish the earlier calls, then end the thread and its connection."""
        await self._thread.close()

    def end(self) -> None:
        """Like `close`, but do not wait."""
        self._thread.end()

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if (connection := self._of_thread.connection) is None:
                connection = connect(self._url, is_reader=self._is_reader)
                self._of_thread.connection = connection
            return work(connection)
        except sqlite3.Error as error:
            raise as_core_error(error) from error

    def _hang_up(self) -> None:
        if self._of_thread.connection is not None:
            self._of_thread.connection.close()


class SqliteHere:
    """A connection on which the event loop reads single rows by an index.

    If a row is not in memory, the loop blocks on the disk. After such a slow read, the threads run
    all reads for a hundred times its duration. The loop never waits for a lock.

    A read of more than 1 ms is slow if Linux counted a block read from disk. Otherwise another
    thread or process probably held the CPU core. Some network file systems count no blocks, so a
    read of more than 50 ms is always slow.
    """

    def __init__(self, url: URL) -> None:
        """Open nothing yet. The first `fetch` opens the connection in a thread."""
        self._url = url
        self._opening: asyncio.Future[sqlite3.Connection] | None = None
        self._connection: sqlite3.Connection | None = None
        self._not_before = 0.0

    def fetch(self, sql: str, values: Sequence[Any]) -> Sequence[Sequence[Any]] | None:
        """Return the rows of a statement, or None if a thread must run it."""
        began = time.monotonic()
        if began < self._not_before:
            return None
        if self._connection is None:
            self._open()
            return None
        blocks = getrusage(RUSAGE_THREAD).ru_inblock
        try:
            found = self._connection.execute(sql, values).fetchall()
        except sqlite3.Error:
            return None  # the thread will report the error
        took = time.monotonic() - began
        if took > _SLOW_SECONDS and (
            took > _TOO_SLOW_SECONDS or getrusage(RUSAGE_THREAD).ru_inblock > blocks
        ):
            self._not_before = began + took / _MAX_BLOCKED_SHARE
        return found

    async def close(self) -> None:
        """Close the connection."""
        if self._opening is not None:
            await asyncio.wait([self._opening])
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _open(self) -> None:
        if self._opening is None:
            opened = partial(connect, self._url, is_reader=True, busy_milliseconds=0)
            self._opening = asyncio.get_running_loop().run_in_executor(None, opened)
            self._opening.add_done_callback(self._opened)

    def _opened(self, opening: "asyncio.Future[sqlite3.Connection]") -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._opening = None  # the threads get the same error and report it
        else:
            self._connection = opening.result()


class SqliteTransaction:
    """A transaction on the connection of a thread.

    It runs the same coroutines as on PostgreSQL. They await only statements, which never suspend
    here, so the thread runs each coroutine to its end.
    """

    def __init__(self, thread: SqliteThread) -> None:
        """Begin nothing yet. The first `run` begins the transaction."""
        self.dialect = thread.dialect
        self._thread = thread
        self._connection: sqlite3.Connection | None = None
        self._is_open = False

    async def run(
        self,
        work: "Callable[[SqliteTransaction], Coroutine[Any, Any, T]]",
        *,
        is_last: bool = False,
    ) -> T:
        """Run a step in one call of the thread, and commit after the last step.

        An exception rolls the whole transaction back. A cancelled caller waits until the thread has
        finished the step.
        """

        def steps(connection: sqlite3.Connection) -> T:
            try:
                self._begin(connection)
                result = _finish(work(self))
                if is_last:
                    connection.execute("COMMIT")
                    self._is_open = False
            except BaseException:
                self._end(connection)
                raise
            return result

        return await _completed(self._thread.call(steps))

    async def roll_back(self) -> None:
        """Roll the transaction back, unless it has ended."""
        if self._is_open:
            await _completed(self._thread.call(self._end))

    def fetch(self, sql: str, values: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Run a statement and return its rows. Call it only in the thread."""
        return self._open.execute(sql, values).fetchall()

    def execute(self, sql: str, values: Sequence[Any]) -> int:
        """Run a statement and return the number of changed rows. Call it only in the thread."""
        return self._open.execute(sql, values).rowcount

    def execute_all(self, sql: str, values: Sequence[Sequence[Any]]) -> None:
        """Run a statement once per set of parameters. Call it only in the thread."""
        self._open.executemany(sql, values)

    def _begin(self, connection: sqlite3.Connection) -> None:
        if self._connection is None:
            connection.execute("BEGIN IMMEDIATE")
            self._connection, self._is_open = connection, True
        assert self._is_open  # noqa: S101 - an ended transaction must not continue

    def _end(self, connection: sqlite3.Connection) -> None:
        self._is_open = False
        if connection.in_transaction:
            connection.execute("ROLLBACK")

    @property
    def _open(self) -> sqlite3.Connection:
        assert self._connection is not None  # noqa: S101 - `run` begins it
        return self._connection


def connect(
    url: URL, *, is_reader: bool, busy_milliseconds: int = _BUSY_MILLISECONDS
) -> sqlite3.Connection:
    """Open a connection that any thread may use, but only one thread at a time."""
    (path,), options = url.get_dialect()().create_connect_args(url)
    connection: sqlite3.Connection = sqlite3.connect(
        path, **{**options, "isolation_level": None, "check_same_thread": False}
    )
    set_pragmas(connection, None)
    connection.execute(f"PRAGMA busy_timeout={busy_milliseconds}")
    if is_reader:
        connection.execute("PRAGMA query_only=ON")
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()  # reads the schema
    return connection


def set_pragmas(connection: Any, _record: Any) -> None:
    """Configure a new connection.

    With WAL, readers continue during a write. With `synchronous=FULL`, a commit waits for the disk.
    With NORMAL, a power cut could lose an artifact whose upload the server acknowledged.
    """
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_MILLISECONDS}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def as_core_error(error: sqlite3.Error) -> Exception:
    """Wrap an error as SQLAlchemy does, so that the same handlers catch it."""
    return DBAPIError.instance(None, None, error, sqlite3.Error)


async def _completed(future: "asyncio.Future[T]") -> T:
    """Wait for a future, and return its result or raise its exception.

    If the caller is cancelled, raise CancelledError only after the future is done.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # noqa: BLE001 - `future.result` raises it
            break
    if cancelled is not None:
        future.exception()  # or asyncio logs that no caller retrieved it
        raise cancelled
    return future.result()


def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("a transaction of SQLite waited for something else than its statements")
