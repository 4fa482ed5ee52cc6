"""Corruption: tells a damaged database from one that does not answer.

A retry repairs no damage, and an index that disagrees with its table can name the wrong artifact or
an unused blob. So the first sign of damage ends every use of the database by this process
(`engine.Database`). Nothing is deleted on the word of a damaged database.
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
"""The driver's message for a text that no release has written. It has no error code."""


def corruption_in(error: BaseException) -> str | None:
    """Return the database's own words if an error reports damage, else None."""
    cause: Any = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None) or 0
    state = str(getattr(cause, "sqlstate", None) or "")
    said = (str(cause).splitlines() or [type(cause).__name__])[0]
    is_damage = code & 0xFF in _SQLITE_CODES or state in _POSTGRES_STATES or _NOT_UTF8 in said
    return said if is_damage else None


def advice_for(reason: str) -> str:
    """Return the sentence for callers, logs and commands."""
    return (
        f"the database is corrupt ({reason}): nothing is served from it and nothing is deleted. "
        "Stop the servers and restore a backup with `graphstash restore`; without a backup, move "
        "the database and the blobs away and start empty: jobs publish their artifacts again"
    )


async def find_corruption(url: URL) -> str | None:
    """Check all of an SQLite database: pages, rows, indexes and foreign keys. Return the first
    problem, or None. PostgreSQL checks what it reads.

    If the caller is cancelled, the check ends unobserved: some releases of SQLite cannot stop it.
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
    """Return whether there is a database. Connecting would create one."""
    path = Path(url.database or "")
    return path.is_file() and path.stat().st_size > 0


def first_problem(connection: sqlite3.Connection) -> str | None:
    """Check all of an SQLite database, and return what is wrong first. Blocks."""
    ((said,),) = connection.execute("PRAGMA integrity_check(1)")
    if said != "ok":
        return str(said).removeprefix("*** in database main ***").strip().splitlines()[0]
    broken = connection.execute("PRAGMA foreign_key_check").fetchone()
    return None if broken is None else f"row {broken[1]} of {broken[0]} refers to no {broken[2]}"
