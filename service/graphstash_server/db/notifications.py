"""Notifications: what a transaction did, told to every server process at its commit.

PostgreSQL's LISTEN and NOTIFY. They are hints: a process that was not connected missed them, and
SQLite has none; whoever waits also looks from time to time.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import ARRAY, Text, bindparam, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_server.db.engine import Database, make_engine

__all__ = ["Listener", "notify"]

_LOGGER = logging.getLogger(__name__)

_CHANNEL = "graphstash"
_RETRY_SECONDS = 1.0

_PAYLOADS = func.unnest(bindparam("payloads", type_=ARRAY(Text))).column_valued("payload")
_NOTIFY = select(func.pg_notify(_CHANNEL, _PAYLOADS))


async def notify(connection: AsyncConnection, payloads: Sequence[str]) -> None:
    """Tells every listener, when and if the transaction commits.

    Args:
        connection: of the transaction.
        payloads: at most 7,999 bytes each.
    """
    if payloads and connection.dialect.name == "postgresql":
        await connection.execute(_NOTIFY, {"payloads": list(payloads)})


class Listener:
    """Listens on a connection of its own until it is cancelled."""

    def __init__(
        self,
        database: Database,
        *,
        heard: Callable[[str], None],
        is_listening: Callable[[bool], None],
    ) -> None:
        """Prepares it.

        Args:
            database: where to listen.
            heard: called with every payload, on the event loop.
            is_listening: called with True when notifications begin to come, and with False when
                they stop; what happened meanwhile was missed.
        """
        self._database = database
        self._heard = heard
        self._is_listening = is_listening

    async def run(self) -> None:
        """Connects, and connects again whenever the connection is lost."""
        if not self._database.is_postgresql:
            return
        engine = make_engine(self._database.url)
        try:
            while True:
                try:
                    async with engine.connect() as connection:
                        raw = await connection.get_raw_connection()
                        await self._listen(raw.driver_connection)
                except (OSError, SQLAlchemyError) as error:
                    _LOGGER.warning("not listening to the database: %s", error)
                except Exception as error:
                    if not type(error).__module__.startswith("asyncpg"):
                        raise
                    _LOGGER.warning("not listening to the database: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            await engine.dispose()

    async def _listen(self, connection: Any) -> None:
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        await connection.add_listener(_CHANNEL, lambda *heard: self._heard(str(heard[-1])))
        self._is_listening(True)
        try:
            await lost.wait()
        finally:
            self._is_listening(False)
