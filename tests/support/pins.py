"""Pin artifacts until they are unpinned, as `graphstash pin` does for a job."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import pin_artifacts
from graphstash_server.keys import StoredKey
from graphstash_server.settings import load_settings


def pin(database_url: str, keys: Sequence[StoredKey]) -> None:
    async def work() -> None:
        database = Database(load_settings(database_url=database_url).database_url)
        try:
            await pin_in(database, keys)
        finally:
            await database.close()

    asyncio.run(work())


async def pin_in(database: Database, keys: Sequence[StoredKey]) -> None:
    async with database.writing() as connection:
        await pin_artifacts(connection, keys, until=datetime(3000, 1, 1, tzinfo=UTC))
