"""Changes of a database without its servers."""

import asyncio

import sqlalchemy as sa

from graphstash_server.db.engine import make_engine
from graphstash_server.settings import load_settings


def execute(url: str, statement: str) -> None:
    """Run a statement. Default: in the database of the settings."""

    async def change() -> None:
        engine = make_engine(sa.make_url(load_settings(database_url=url).database_url))
        async with engine.begin() as connection:
            await connection.execute(sa.text(statement))
        await engine.dispose()

    asyncio.run(change())
