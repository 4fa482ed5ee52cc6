"""Every statement that this process sends to a database, through any driver."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from graphstash_server.db.reads import PostgresLane, SqliteLane
from graphstash_server.db.sqlite import SqliteHere, SqliteThread, SqliteTransaction


class Statement(NamedTuple):
    """An executed statement, as the driver received it, with the first of its parameters."""

    sql: str
    parameters: Any


@contextmanager
def recorded(naming: str = "", *, of_servers: bool = False) -> Iterator[list[Statement]]:
    """Record the statements that contain a word during the block, in order.

    An `executemany` counts as one statement. BEGIN, COMMIT, settings and EXPLAIN do not count. Live
    servers run chores in threads of their own. Without `of_servers`, only the event loops of this
    thread are recorded.
    """
    seen: list[Statement] = []
    this = threading.get_ident()
    asked_by = threading.local()  # in a thread of SQLite: the calling thread

    def add(sql: str, parameters: Any) -> None:
        is_one = sql.lstrip().startswith(("SELECT", "UPDATE", "DELETE", "INSERT", "WITH"))
        is_here = getattr(asked_by, "ident", threading.get_ident()) == this
        if is_one and naming in sql and (is_here or of_servers):
            seen.append(Statement(sql, parameters))

    def by_core(*arguments: Any) -> None:
        _, _, sql, parameters, _, executemany = arguments
        add(sql, parameters[0] if executemany else parameters)

    call = SqliteThread.call

    def call_and_note(thread: SqliteThread, work: Any) -> Any:
        ident = threading.get_ident()

        def noting(connection: Any) -> Any:
            asked_by.ident = ident
            return work(connection)

        return call(thread, noting)

    event.listen(Engine, "before_cursor_execute", by_core)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqliteThread, "call", call_and_note)
        _record_lanes(patch, add)
        _record_transactions(patch, add)
        yield seen
    event.remove(Engine, "before_cursor_execute", by_core)


def _record_lanes(patch: pytest.MonkeyPatch, add: Any) -> None:
    def recording(fetch: Any) -> Any:
        async def record(lane: Any, wanted: Any) -> Any:
            for compiled, values in wanted:
                add(compiled.sql, values)
            return await fetch(lane, wanted)

        return record

    for lane in (SqliteLane, PostgresLane):
        patch.setattr(lane, "fetch", recording(lane.fetch))

    fetch_here = SqliteHere.fetch

    def record_here(here: SqliteHere, sql: str, values: Any) -> Any:
        found = fetch_here(here, sql, values)
        if found is not None:  # otherwise a lane runs the statement
            add(sql, values)
        return found

    patch.setattr(SqliteHere, "fetch", record_here)


def _record_transactions(patch: pytest.MonkeyPatch, add: Any) -> None:
    def recording(run: Any, first: Any) -> Any:
        def record(transaction: SqliteTransaction, sql: str, values: Any) -> Any:
            add(sql, first(values))
            return run(transaction, sql, values)

        return record

    for name in ("fetch", "execute"):
        run = getattr(SqliteTransaction, name)
        patch.setattr(SqliteTransaction, name, recording(run, lambda values: values))
    many = SqliteTransaction.execute_all
    patch.setattr(SqliteTransaction, "execute_all", recording(many, lambda values: values[0]))
