"""The environment of alembic: connects to the database that the server, or the settings, name."""

import asyncio
from typing import Any, Literal

from alembic import context
from sqlalchemy.engine import Connection, make_url

from graphstash_server.db.engine import make_engine
from graphstash_server.db.tables import UtcTime, metadata
from graphstash_server.settings import load_settings


def render_type(kind: str, item: Any, _: object) -> str | Literal[False]:
    """A revision must not import the product: what a time is may change, the revision may not."""
    return "sa.DateTime(timezone=True)" if kind == "type" and isinstance(item, UtcTime) else False


def migrate(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        render_item=render_type,
        render_as_batch=connection.dialect.name == "sqlite",
        transactional_ddl=True,  # both databases can; alembic assumes that SQLite cannot
    )
    with context.begin_transaction():
        if connection.dialect.name == "postgresql":
            # Servers that start at the same time take turns; SQLite's transaction is exclusive.
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(8077)")
        context.run_migrations()


async def connect_and_migrate(url: str) -> None:
    engine = make_engine(make_url(url))
    try:
        async with engine.connect() as connection:
            await connection.run_sync(migrate)
    finally:
        await engine.dispose()


if context.is_offline_mode():
    raise SystemExit("revisions need a database to run on: offline mode is not supported")
asyncio.run(
    connect_and_migrate(context.config.attributes.get("url") or load_settings().database_url)
)
