"""Notifications: send a transaction's payloads to every server process when it commits.

Notifications use PostgreSQL's LISTEN and NOTIFY, and are only hints: a disconnected process misses
them, and SQLite sends none. A waiting request therefore also polls the database.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import ARRAY, Text, bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_server.db.engine import Database, make_engine
from graphstash_server.db.prepared import Transaction

__all__ = ["Listener", "notify"]

_LOGGER = logging.getLogger(__name__)

_CHANNEL = "graphstash"
_RETRY_SECONDS = 1.0
_CHECK_SECONDS = 10.0
_ANSWER_SECONDS = 5.0
"""Seconds within which the check query must return. A connection whose peer vanished stays silent,
so only a query detects it."""

_PAYLOADS = func.unnest(bindparam("payloads", type_=ARRAY(Text))).column_valued("payload")
_NOTIFY = select(func.pg_notify(_CHANNEL, _PAYLOADS))


async def notify(connection: Transaction, payloads: Sequence[str]) -> None:
    """Send the payloads when the transaction commits. Each has at most 7,999 bytes."""
    if not isinstance(connection, AsyncConnection):  # SQLite's own transaction
        return
    if payloads and connection.dialect.name == "postgresql":
        await connection.execute(_NOTIFY, {"payloads": list(payloads)})


class Listener:
    """Listens for notifications on a connection of its own.

    Calls `heard(payload)` for each notification, on the event loop. Calls `is_listening(True)` when
    the connection listens, and `is_listening(False)` when it is lost. Notifications sent while the
    connection is lost are never delivered.
    """

    def __init__(
        self,
        database: Database,
        *,
        heard: Callable[[str], None],
        is_listening: Callable[[bool], None],
    ) -> None:
        self._database = database
        self._heard = heard
        self._is_listening = is_listening

    async def run(self) -> None:
        """Listen until cancelled, and reconnect after errors. On SQLite, return at once."""
        if not self._database.is_postgresql:
            return
        engine = make_engine(self._database.url)
        try:
            while True:
                try:
                    async with engine.connect() as connection:
                        raw = await connection.get_raw_connection()
                        await self._listen(raw.driver_connection)
                except Exception as error:  # noqa: BLE001 - the outermost frame of a task
                    _LOGGER.warning(
                        "lost the notifications of the database, reconnecting: %r", error
                    )
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            await engine.dispose()

    async def _listen(self, connection: Any) -> None:
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        await connection.add_listener(_CHANNEL, lambda *heard: self._heard(str(heard[-1])))
        self._is_listening(True)
        try:
            while not lost.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_SECONDS):
                        await lost.wait()
                if not lost.is_set():
                    await connection.execute("SELECT 1", timeout=_ANSWER_SECONDS)
        finally:
            self._is_listening(False)
            connection.terminate()  # closing would wait for a reply, which may never come
