"""Corruption: distinguish a damaged database from one that does not respond.

A damaged index can name the wrong artifact, or a blob in use as unused. After the first sign of
damage, no worker of this host therefore serves or deletes anything (`engine.Database`).
"""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any, Final

from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from graphstash_server.db.sqlite import SqliteThread

__all__ = ["advice_for", "corruption_in", "find_corruption", "first_problem"]

_SQLITE_CODES: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_POSTGRES_STATES: Final = ("XX001", "XX002")
"""data_corrupted and index_corrupted."""

_NOT_UTF8: Final = "Could not decode to UTF-8"
"""The driver's message for text that no release writes. It has no error code."""


def corruption_in(error: BaseException) -> str | None:
    """Return the database's message if an error reports damage, else None."""
    cause: Any = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None) or 0
    state = str(getattr(cause, "sqlstate", None) or "")
    text = (str(cause).splitlines() or [type(cause).__name__])[0]
    is_damage = code & 0xFF in _SQLITE_CODES or state in _POSTGRES_STATES or _NOT_UTF8 in text
    return text if is_damage else None


def advice_for(reason: str) -> str:
    """Return the message about a corrupt database, with what to do."""
    return (
        f"the database is corrupt ({reason}): nothing is served from it and nothing is deleted. "
        "Stop the servers and restore a backup with `graphstash restore`; without a backup, move "
        "the database and the blobs away and start empty: jobs publish their artifacts again"
    )


async def find_corruption(url: URL) -> str | None:
    """Check the pages, rows, indexes and foreign keys of an SQLite database. Return the first
    problem, or None. Does not check PostgreSQL.

    Cancelling the caller does not stop the check, which some releases of SQLite cannot interrupt.
    """
    if url.get_backend_name() != "sqlite" or not await asyncio.to_thread(_has_content, url):
        return None
    thread = SqliteThread(url, name="sqlite-check", is_reader=True)
    try:
        found = await asyncio.shield(thread.call(first_problem))
    except DBAPIError as error:
        if (reason := corruption_in(error)) is None:
            raise
        return reason
    finally:
        thread.end()
    return found


def _has_content(url: URL) -> bool:
    """Return whether the file has content. Connecting would create it."""
    path = Path(url.database or "")
    return path.is_file() and path.stat().st_size > 0


def first_problem(connection: sqlite3.Connection) -> str | None:
    """Check all of an SQLite database, and return the first problem. Blocks."""
    ((result,),) = connection.execute("PRAGMA integrity_check(1)")
    if result != "ok":
        return str(result).removeprefix("*** in database main ***").strip().splitlines()[0]
    broken = connection.execute("PRAGMA foreign_key_check").fetchone()
    return None if broken is None else f"row {broken[1]} of {broken[0]} refers to no {broken[2]}"
