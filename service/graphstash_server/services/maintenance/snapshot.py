"""Snapshot: all rows of a database at one moment, in one SQLite file.

Backups of SQLite and of PostgreSQL have this format, so each can be restored into the other. Every
function blocks, and some run an event loop: call them in a thread.
"""

import asyncio
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

from sqlalchemy import Executable, exists, insert, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Digest
from graphstash_server.db.corruption import advice_for, corruption_in, first_problem
from graphstash_server.db.engine import make_engine
from graphstash_server.db.migrate import (
    find_revision,
    map_database_errors,
    migrate,
    newest_revision,
)
from graphstash_server.db.queries.shared import KEY_COLUMNS
from graphstash_server.db.sqlite import connect
from graphstash_server.db.tables import (
    artifacts,
    audit,
    identifiers,
    metadata,
    tokens,
    withdrawals,
)
from graphstash_server.errors import BackupError, StartError
from graphstash_server.storage.upload import sync_directory

__all__ = [
    "apply_withdrawals",
    "drop_artifacts_of",
    "find_generations_in",
    "has_rows",
    "is_in_use",
    "list_digests_in",
    "load_snapshot",
    "remove_snapshot",
    "revision_in",
    "take_snapshot",
    "upgrade_snapshot",
]

_CHUNK_ROWS: Final = 1000
"""Rows to copy at a time, which bounds the memory."""

_SERVERS: Final = (
    "SELECT pid FROM pg_stat_activity WHERE application_name = 'graphstash' "
    "AND datname = current_database() AND pid <> pg_backend_pid()"
)

_CLOSING_SECONDS: Final = 2.0

_REVOKED_COLUMNS: Final = [
    column
    for column in tokens.c
    if not column.nullable or column.key in {"expires_at", "revoked_at"}
]
"""What a restore keeps of a revoked token: columns that all releases with tokens have."""


def take_snapshot(url: str, path: Path) -> None:
    """Copy a database of this release's revision to a new, durable file, while servers write.

    Raises:
        BackupError: the disk is full, the copy or the database is damaged, or PostgreSQL's schema
            has moved on.
        StartError: the database does not answer.
    """
    remove_snapshot(path)
    parsed = make_url(url)
    with _map_errors(path), map_database_errors(url):
        if parsed.get_backend_name() == "sqlite":
            with closing(connect(parsed, is_reader=True)) as live, closing(_open(path)) as copy:
                live.backup(copy)  # in one step, so that no write comes between
        else:
            migrate(_url_of(path), lock_path=path.with_name("migrate.lock"))
            asyncio.run(_export(parsed, path))
    _check(path, advice_for)
    _sync(path)


def upgrade_snapshot(path: Path) -> None:
    """Check a snapshot, and upgrade it to the revision of this release.

    Raises:
        BackupError: the snapshot is damaged.
    """
    _check(path, lambda reason: f"the backup is damaged: {reason}")
    migrate(_url_of(path), lock_path=path.with_name("migrate.lock"))
    _sync(path)


def load_snapshot(path: Path, url: str) -> None:
    """Replace all rows of a database by a snapshot's, and remove the snapshot. The snapshot must
    have this release's revision, and no server may use the database.

    Raises:
        StartError: the database does not answer.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        target = Path(parsed.database or "")
        remove_snapshot(target, logs_only=True)  # SQLite would apply the old log to the new file
        path.replace(target)
        sync_directory(target.parent)
        return
    with map_database_errors(url):
        migrate(url, lock_path=path.with_name("migrate.lock"))
        asyncio.run(_import(path, parsed))
    remove_snapshot(path)


def has_rows(url: str) -> bool:
    """Return whether a database exists and has anything that a restore would replace."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        path = Path(parsed.database or "")
        return path.is_file() and path.stat().st_size > 0
    return asyncio.run(find_revision(url)) is not None and any(
        _read(url, select(table).limit(1)) for table in metadata.sorted_tables
    )


def is_in_use(url: str) -> bool:
    """Return whether a server is connected to a PostgreSQL database, which ends a session only a
    moment after the server has closed it.
    """
    if make_url(url).get_backend_name() != "postgresql":
        return False
    until = monotonic() + _CLOSING_SECONDS
    while _read(url, text(_SERVERS)):
        if monotonic() > until:
            return True
        sleep(0.05)
    return False


def revision_in(path: Path) -> str:
    """Return the schema revision of a snapshot, which may be a later release's."""
    with closing(_open(path)) as snapshot:
        ((revision,),) = snapshot.execute("SELECT version_num FROM alembic_version").fetchall()
        return str(revision)


def list_digests_in(path: Path) -> list[Digest]:
    """Return the blobs of a snapshot's artifacts, ordered by SHA-256."""
    with closing(_open(path)) as snapshot:
        found = snapshot.execute(
            "SELECT DISTINCT sha256, size_bytes FROM artifacts ORDER BY sha256"
        )
        return [Digest(*row) for row in found]


def find_generations_in(path: Path) -> list[tuple[Digest, int]]:
    """Return each blob whose name in the store has a generation, and the generation."""
    with closing(_open(path)) as snapshot:
        found = snapshot.execute("SELECT sha256, generation FROM generations")
        return [(Digest(sha256, 0), generation) for sha256, generation in found]


def drop_artifacts_of(path: Path, digests: Sequence[Digest]) -> int:
    """Remove the artifacts of these blobs from a snapshot. Return how many."""
    with closing(_open(path)) as snapshot, snapshot:
        snapshot.execute("PRAGMA foreign_keys=ON")
        dropped = snapshot.executemany(
            "DELETE FROM artifacts WHERE sha256 = ?", [(digest.sha256,) for digest in digests]
        ).rowcount
    _sync(path)
    return dropped


def apply_withdrawals(path: Path, url: str, *, now: datetime) -> bool:
    """Apply the safety decisions of the current database to the snapshot that will replace it.

    Drops artifacts that the database withheld and has not released, unless the snapshot lists the
    withdrawal. Revokes tokens that the database revoked, and tokens that a later database of the
    same cache no longer has, because the servers delete revoked tokens after some time. Artifacts
    that were deleted or replaced come back: restoring is the way to get them.

    The snapshot lists each withdrawal as a new one, and each revoked token, so that the next
    restore applies them again. Each withdrawal gets a new mark, so that hosts notice that their
    copy of the list is of another history.

    Returns:
        False if the database cannot be read.
    """
    key = (*KEY_COLUMNS, "sha256")
    columns = [column.key for column in withdrawals.c]
    withheld = (
        select(withdrawals)
        .where(
            withdrawals.c.cause == "withheld",
            ~exists().where(
                *(artifacts.c[name] == withdrawals.c[name] for name in key),
                artifacts.c.withheld_at.is_(None),
            ),
        )
        .order_by(withdrawals.c.namespace, withdrawals.c.number)
    )
    try:
        found = [dict(zip(columns, row, strict=True)) for row in _read(url, withheld)]
        known = {id_ for (id_,) in _read(url, select(tokens.c.id))}
        ended = _read(url, select(*_REVOKED_COLUMNS).where(tokens.c.revoked_at.is_not(None)))
    except StartError:
        return False
    is_earlier = _is_earlier(path, url)
    with closing(_open(path)) as snapshot, snapshot:
        snapshot.execute("PRAGMA foreign_keys=ON")
        for row in found:
            _withdraw(snapshot, row, key)
        revoked = {row.id: row.revoked_at for row in ended}
        if is_earlier:
            listed = snapshot.execute("SELECT id FROM tokens WHERE revoked_at IS NULL")
            revoked |= {name: now for (name,) in listed.fetchall() if name not in known}
        snapshot.executemany(
            "UPDATE tokens SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL",
            [(_stored(at), name) for name, at in revoked.items()],
        )
        names = [column.key for column in _REVOKED_COLUMNS]
        snapshot.executemany(
            f"INSERT OR IGNORE INTO tokens ({', '.join(names)}) "  # noqa: S608 - names of columns
            f"VALUES ({', '.join('?' * len(names))})",
            [tuple(map(_stored, row)) for row in ended],
        )
    _sync(path)
    return True


def _is_earlier(path: Path, url: str) -> bool:
    """Return whether a snapshot is of the same cache as a database, and not of a later time: the
    database's audit log has the snapshot's last record, begins after that record, or is empty.
    """
    cache = select(identifiers.c.value).where(identifiers.c.name == "cache")
    records = select(audit.c.id, audit.c.at, audit.c.subject)
    snapshot = _url_of(path)
    try:
        own = _read(url, cache)
        first = _read(url, records.order_by(audit.c.id).limit(1))
    except StartError:  # the database is of a release without identifiers
        return False
    if not own or own != _read(snapshot, cache):
        return False
    last = _read(snapshot, records.order_by(audit.c.id.desc()).limit(1))
    if not first or not last:
        return True
    # An ID alone identifies no record: after a restore or in an emptied log, IDs repeat.
    is_there = last == _read(url, records.where(audit.c.id == last[0].id))
    return is_there or bool(first[0].at > last[0].at)


def _withdraw(snapshot: sqlite3.Connection, row: dict[str, Any], key: Sequence[str]) -> None:
    """Drop a withheld artifact from a snapshot, and add the withdrawal to its namespace's list.
    Do nothing if the list has the withdrawal.
    """
    at = (row["namespace"], row["number"], row["mark"])
    known = "SELECT 1 FROM withdrawals WHERE namespace = ? AND number = ? AND mark = ?"
    if snapshot.execute(known, at).fetchone():
        return
    matched = " AND ".join(f"{name} = :{name}" for name in key)
    snapshot.execute(f"DELETE FROM artifacts WHERE {matched}", row)  # noqa: S608 - names of columns
    row |= {
        "mark": secrets.token_hex(8),
        "withdrawn_at": _stored(row["withdrawn_at"]),
    }
    ((row["number"],),) = snapshot.execute(
        "INSERT INTO withdrawal_heads VALUES (:namespace, 1, :mark) ON CONFLICT (namespace) "
        "DO UPDATE SET number = number + 1, mark = excluded.mark RETURNING number",
        row,
    ).fetchall()
    values = ", ".join(f":{name}" for name in row)
    snapshot.execute(f"INSERT INTO withdrawals ({', '.join(row)}) VALUES ({values})", row)  # noqa: S608 - names of columns


def _stored(value: Any) -> Any:
    """Return a value as SQLite stores it."""
    return str(value.replace(tzinfo=None)) if isinstance(value, datetime) else value


async def _export(source: URL, path: Path) -> None:
    engine, copy = make_engine(source), make_engine(make_url(_url_of(path)))
    try:
        async with engine.connect() as reader, copy.begin() as writer:
            await reader.execution_options(isolation_level="REPEATABLE READ")
            (found,) = (await reader.execute(text("SELECT version_num FROM alembic_version"))).one()
            if found != newest_revision():
                raise BackupError(f"the database has moved to revision {found}: try again")
            await _copy_rows(reader, writer)
    finally:
        await engine.dispose()
        await copy.dispose()


async def _import(path: Path, target: URL) -> None:
    engine, copy = make_engine(target), make_engine(make_url(_url_of(path)))
    names = ", ".join(table.name for table in metadata.sorted_tables)
    try:
        async with engine.begin() as writer, copy.connect() as reader:
            await writer.execute(text(f"TRUNCATE {names}"))
            await _copy_rows(reader, writer)
            await writer.execute(
                text(
                    "SELECT setval(pg_get_serial_sequence('audit', 'id'), "
                    "(SELECT coalesce(max(id), 0) + 1 FROM audit), false)"
                )
            )
    finally:
        await engine.dispose()
        await copy.dispose()


async def _copy_rows(reader: AsyncConnection, writer: AsyncConnection) -> None:
    for table in metadata.sorted_tables:
        names = [column.key for column in table.columns]
        async for rows in (await reader.stream(select(table))).partitions(_CHUNK_ROWS):
            values = [dict(zip(names, row, strict=True)) for row in rows]
            await writer.execute(insert(table), values)


def _read(url: str, statement: Executable) -> Sequence[Any]:
    async def read() -> Sequence[Any]:
        engine = make_engine(make_url(url))
        try:
            async with engine.connect() as connection:
                return (await connection.execute(statement)).all()
        finally:
            await engine.dispose()

    with map_database_errors(url):
        return asyncio.run(read())


def _url_of(path: Path) -> str:
    return URL.create("sqlite+aiosqlite", database=str(path)).render_as_string()


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path)


def _check(path: Path, message: Callable[[str], str]) -> None:
    with _map_errors(path), closing(_open(path)) as snapshot:
        if (reason := first_problem(snapshot)) is not None:
            raise BackupError(message(reason))


def _sync(path: Path) -> None:
    """Merge the write-ahead log into the file, so that it is one file, and make it durable."""
    with closing(_open(path)) as snapshot:
        snapshot.execute("PRAGMA journal_mode=DELETE")
    with path.open("rb") as file:
        os.fsync(file.fileno())
    sync_directory(path.parent)


def remove_snapshot(path: Path, *, logs_only: bool = False) -> None:
    """Remove a snapshot, or only its logs."""
    for suffix in ("-wal", "-shm", "-journal", *([] if logs_only else [""])):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


@contextmanager
def _map_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if (reason := corruption_in(error)) is not None:
            raise BackupError(advice_for(reason)) from error
        raise BackupError(f"cannot write {path}: {error}") from error
