"""SQLite on its own driver: a connection in a thread, and a transaction in one call of that thread.

A statement takes SQLite microseconds; handing it to a thread and its rows back takes longer. So a
thread is called once for many statements: for all reads that are wanted at the same time
(`db.reads`), and for a transaction, or for the part of it between two waits for something else. A
single row that is in memory is read without any thread (`SqliteHere`).
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from resource import RUSAGE_THREAD, getrusage
from typing import Any, Final, TypeAlias, TypeVar

from sqlalchemy.engine import URL, Dialect
from sqlalchemy.exc import DBAPIError

__all__ = [
    "SqliteConnection",
    "SqliteHere",
    "SqliteThread",
    "SqliteTransaction",
    "as_core_says",
    "set_pragmas",
]

T = TypeVar("T")

_Work: TypeAlias = Callable[[sqlite3.Connection], Any]
_Job: TypeAlias = "tuple[_Work, asyncio.Future[Any], asyncio.AbstractEventLoop]"

_BUSY_MILLISECONDS: Final = 10_000

_SLOW_SECONDS: Final = 0.001
_TOO_SLOW_SECONDS: Final = 0.05
_SHARE_OF_WAITS: Final = 0.01


class SqliteConnection(sqlite3.Connection):
    """Closing it ends its transaction.

    Python's own is closed by SQLite only when nobody refers to its cursors any more, and a
    cancelled caller's traceback does: until it is forgotten, all others find the database locked.
    """

    def close(self) -> None:
        """Rolls back what is open, and closes; harmless when it is closed already."""
        try:
            with suppress(sqlite3.ProgrammingError):  # it is closed
                if self.in_transaction:
                    self.rollback()
        finally:
            super().close()


class SqliteThread:
    """One connection in a thread of its own, which begins with the first call."""

    def __init__(self, url: URL, *, name: str, is_reader: bool = False) -> None:
        """Prepares it; a reader can change nothing."""
        self.dialect: Dialect = url.get_dialect()()
        self._url = url
        self._name = name
        self._is_reader = is_reader
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, work: Callable[[sqlite3.Connection], T]) -> "asyncio.Future[T]":
        """Runs `work` in the thread, after what was called before."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put((work, future, loop))
        return future

    async def close(self) -> None:
        """Ends the thread when it has done what was called, and its connection."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(thread.join)

    def _run(self) -> None:
        connection: sqlite3.Connection | None = None
        while (job := self._jobs.get()) is not None:
            work, future, loop = job
            try:
                if connection is None:
                    connection = _connect(self._url, is_reader=self._is_reader)
                answer = partial(_settle, future, work(connection))
            except sqlite3.Error as error:
                answer = partial(_fail, future, as_core_says(error))
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller
                answer = partial(_fail, future, error)
            try:
                loop.call_soon_threadsafe(answer)
            except RuntimeError:  # the loop has ended, and nobody waits
                break
            del job, work, future, answer  # not kept while nothing is called
        if connection is not None:
            connection.close()


class SqliteHere:
    """A connection on which the event loop itself reads single rows, found by an index.

    What is not in memory makes the loop wait for the disk, once in a while: after a slow read all
    of them are left to the threads for a hundred times as long. A lock is not waited for at all.

    Other threads and processes may have had the core during a slow read, which a thread would not
    change, so Linux is asked whether a block was read. Where it counts none (some network file
    systems), only what takes much longer is slow.
    """

    def __init__(self, url: URL) -> None:
        """Prepares it; the first `fetch` opens it, in a thread."""
        self._url = url
        self._opening: asyncio.Future[sqlite3.Connection] | None = None
        self._connection: sqlite3.Connection | None = None
        self._not_before = 0.0

    def fetch(self, sql: str, values: Sequence[Any]) -> Sequence[Sequence[Any]] | None:
        """The rows of a statement; None when a thread has to be asked."""
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
            return None  # the thread will say what is wrong
        took = time.monotonic() - began
        if took > _SLOW_SECONDS and (
            took > _TOO_SLOW_SECONDS or getrusage(RUSAGE_THREAD).ru_inblock > blocks
        ):
            self._not_before = began + took / _SHARE_OF_WAITS
        return found

    async def close(self) -> None:
        """Closes the connection."""
        if self._opening is not None:
            await asyncio.wait([self._opening])
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _open(self) -> None:
        if self._opening is None:
            connect = partial(_connect, self._url, is_reader=True, busy_milliseconds=0)
            self._opening = asyncio.get_running_loop().run_in_executor(None, connect)
            self._opening.add_done_callback(self._opened)

    def _opened(self, opening: "asyncio.Future[sqlite3.Connection]") -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._opening = None  # the threads fare alike, and say so
        else:
            self._connection = opening.result()


class SqliteTransaction:
    """A transaction on the connection of a thread.

    What is run in it is the same coroutine as on PostgreSQL. It waits for nothing but statements,
    which are done when they return, so the thread runs it from its beginning to its end.
    """

    def __init__(self, thread: SqliteThread) -> None:
        """Begins nothing yet; the first `run` does."""
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
        """Runs a part of the transaction in one call, and commits after the last one.

        An exception rolls everything back. A caller that is cancelled waits for the thread: the
        transaction must not go on behind its back.
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

        return await _to_its_end(self._thread.call(steps))

    async def roll_back(self) -> None:
        """Ends the transaction without a trace; does nothing when it has ended."""
        if self._is_open:
            await _to_its_end(self._thread.call(self._end))

    def fetch(self, sql: str, values: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Runs a statement and returns its rows. In the thread only."""
        return self._open.execute(sql, values).fetchall()

    def execute(self, sql: str, values: Sequence[Any]) -> int:
        """Runs a statement and returns how many rows it changed. In the thread only."""
        return self._open.execute(sql, values).rowcount

    def execute_all(self, sql: str, values: Sequence[Sequence[Any]]) -> None:
        """Runs a statement once for each of many parameters. In the thread only."""
        self._open.executemany(sql, values)

    def _begin(self, connection: sqlite3.Connection) -> None:
        if self._connection is None:
            connection.execute("BEGIN IMMEDIATE")
            self._connection, self._is_open = connection, True
        assert self._is_open  # noqa: S101 - what has ended is not gone on with

    def _end(self, connection: sqlite3.Connection) -> None:
        self._is_open = False
        if connection.in_transaction:
            connection.execute("ROLLBACK")

    @property
    def _open(self) -> sqlite3.Connection:
        assert self._connection is not None  # noqa: S101 - `run` begins it
        return self._connection


def _connect(
    url: URL, *, is_reader: bool, busy_milliseconds: int = _BUSY_MILLISECONDS
) -> sqlite3.Connection:
    """A connection for one thread at a time, whichever it is."""
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
    """Prepares a new connection.

    WAL lets readers continue while one writes. `synchronous=FULL` makes the commit wait for the
    disk: with NORMAL a power cut could lose an artifact whose upload was acknowledged.
    """
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_MILLISECONDS}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def as_core_says(error: sqlite3.Error) -> Exception:
    """The same error as SQLAlchemy's connections raise it, so that both are handled alike."""
    return DBAPIError.instance(None, None, error, sqlite3.Error)


def _settle(future: "asyncio.Future[Any]", result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


async def _to_its_end(future: "asyncio.Future[T]") -> T:
    """Its result; who is cancelled, however often, waits for it all the same."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()  # nobody else asks for it
        raise cancelled
    return future.result()


def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("a transaction of SQLite waited for something else than its statements")
