"""Observe the sessions of a PostgreSQL database from a separate session."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import asyncpg

BOUND_SECONDS: Final = 60.0
"""Far longer than any wait takes, so that a busy machine does not decide a test."""


@asynccontextmanager
async def connected(database: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(database.replace("+asyncpg", ""))
    try:
        yield connection
    finally:
        await connection.close()


async def eventually(ask: Callable[[], Awaitable[Any]]) -> Any:
    """Wait until `ask` returns a true value, and return that value."""
    deadline = time.monotonic() + BOUND_SECONDS
    while not (found := await ask()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return found


async def waiting(watch: Any) -> Any:
    """Return the sessions that wait for a lock."""
    return await watch.fetch(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
        "AND wait_event_type = 'Lock'"
    )
