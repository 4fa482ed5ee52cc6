"""The environment of alembic: connects to the database that the server, or the settings, name."""

import asyncio
from typing import Any, Literal

from alembic import context
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from graphstash_server.db.engine import begin_immediate
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
        context.run_migrations()


async def connect_and_migrate(url: str) -> None:
    engine = create_async_engine(url, poolclass=NullPool)
    if engine.dialect.name == "sqlite":
        begin_immediate(engine)
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
