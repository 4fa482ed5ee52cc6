"""TracedDatabase: a span for each database call, from its wait for a connection or turn on."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_server.db.engine import Database, Steps
from graphstash_server.db.prepared import NOTHING, Parameters, Prepared, Row
from graphstash_server.shared_text import SharedText
from graphstash_server.tracing import Tracing

__all__ = ["TracedDatabase"]


class TracedDatabase(Database):
    """A `Database` that records reads and transactions as spans."""

    def __init__(
        self, url: str, *, connections: int, corruption: SharedText, tracing: Tracing
    ) -> None:
        super().__init__(url, connections=connections, corruption=corruption)
        self._tracing = tracing
        self._system = {"db.system.name": "postgresql" if self.is_postgresql else "sqlite"}

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Trace `Database.reading`."""
        with self._tracing.span("database.read", **self._system):
            async with super().reading() as connection:
                yield connection

    async def fetch(self, statement: Prepared, given: Parameters = NOTHING) -> Sequence[Row]:
        """Trace `Database.fetch`."""
        with self._tracing.span("database.read", **self._system):
            return await super().fetch(statement, given)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Trace `Database.writing`."""
        with self._tracing.span("database.write", **self._system):
            async with super().writing() as connection:
                yield connection

    @asynccontextmanager
    async def writing_in_steps(self, *, at_once: bool = False) -> AsyncIterator[Steps]:
        """Trace `Database.writing_in_steps`."""
        with self._tracing.span("database.write", **self._system):
            async with super().writing_in_steps(at_once=at_once) as steps:
                yield steps
