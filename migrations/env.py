"""The environment of alembic: connects to the database that the server, or the settings, name."""

import asyncio
import logging
import time
from typing import Any, Literal

from alembic import context
from sqlalchemy import text
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.ext.asyncio import AsyncEngine

from graphstash_server.db import migrate as limits
from graphstash_server.db.engine import make_engine
from graphstash_server.db.tables import UtcTime, metadata
from graphstash_server.settings import load_settings

LOGGER = logging.getLogger("migrations")

LOOK_SECONDS = 1.0

LOOKS = 10  # attempts to take the lock between two looks at the session that holds it

IDLE_HOLDERS = text("""
SELECT pid, pg_terminate_backend(pid) AS is_ended FROM pg_stat_activity WHERE state = 'idle'
AND state_change < clock_timestamp() - make_interval(secs => :seconds)
AND pid = (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND classid = 0
    AND objid = 8077 AND objsubid = 1
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
""")

BLOCKERS = text("""
SELECT pid, application_name, usename, round(extract(epoch FROM now() - xact_start)) AS seconds
FROM pg_stat_activity WHERE pid = ANY (pg_blocking_pids(:pid)) ORDER BY xact_start, pid
""")


def render_type(kind: str, item: Any, _: object) -> str | Literal[False]:
    """A revision must not import the product: what a time is may change, the revision may not."""
    return "sa.DateTime(timezone=True)" if kind == "type" and isinstance(item, UtcTime) else False


def take_turn(connection: Connection) -> None:
    """Waits for servers that migrate the same database; the lock goes with the connection.

    A revision that builds an index CONCURRENTLY commits in between, and waits for every statement
    that began before. So no transaction may hold the lock or wait for it. A migrator that is
    frozen between two statements would keep the lock for ever, so the waiting servers end its
    session. A statement may take as long as it needs.
    """
    waited = 0
    while not connection.exec_driver_sql("SELECT pg_try_advisory_lock(8077)").scalar_one():
        connection.commit()
        if not waited:
            LOGGER.warning("another server migrates the database: waiting until it is done")
        elif waited % LOOKS == 0:
            for holder in connection.execute(IDLE_HOLDERS, {"seconds": limits.IDLE_SECONDS}):
                LOGGER.warning(
                    "session %d has been idle for more than %d s in the middle of a migration: %s",
                    holder.pid,
                    limits.IDLE_SECONDS,
                    "ended it" if holder.is_ended else "could not end it",
                )
            connection.commit()
        waited += 1
        time.sleep(0.1)
    connection.commit()


def migrate(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        take_turn(connection)  # SQLite's transaction is exclusive
        connection.exec_driver_sql(f"SET lock_timeout = '{limits.LOCK_SECONDS}s'")
        connection.commit()
    context.configure(
        connection=connection,
        target_metadata=metadata,
        render_item=render_type,
        render_as_batch=connection.dialect.name == "sqlite",
        transactional_ddl=True,  # both databases can; alembic assumes that SQLite cannot
    )
    with context.begin_transaction():
        context.run_migrations()


async def report_blockers(engine: AsyncEngine, pid: int) -> None:
    """Log each transaction for which the migration in session `pid` waits.

    The session of this query is never in a transaction, for which an index build would wait.
    """
    known = set()
    watcher = engine.execution_options(isolation_level="AUTOCOMMIT")
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        async with watcher.connect() as connection:
            blockers = (await connection.execute(BLOCKERS, {"pid": pid})).all()
        for blocker in blockers:
            if blocker.pid not in known:
                known.add(blocker.pid)
                LOGGER.warning(
                    "the migration waits for a transaction that began %d s ago: session %d of %s, "
                    "user %s",
                    blocker.seconds or 0,
                    blocker.pid,
                    blocker.application_name or "an unnamed program",
                    blocker.usename,
                )


async def connect_and_migrate(url: str) -> None:
    engine = make_engine(make_url(url))
    try:
        async with engine.connect() as connection:
            watching = None
            if connection.dialect.name == "postgresql":
                pid = (await connection.exec_driver_sql("SELECT pg_backend_pid()")).scalar_one()
                await connection.rollback()
                watching = asyncio.create_task(report_blockers(engine, pid))
            try:
                await connection.run_sync(migrate)
            finally:
                if watching is not None:
                    watching.cancel()
                    await asyncio.wait([watching])
    finally:
        await engine.dispose()


if context.is_offline_mode():
    raise SystemExit("revisions need a database to run on: offline mode is not supported")
asyncio.run(
    connect_and_migrate(context.config.attributes.get("url") or load_settings().database_url)
)
