"""Retention: artifacts go because of their age or their toolchain, whatever room there is."""

from collections.abc import AsyncIterator
from datetime import timedelta
from fnmatch import fnmatchcase
from itertools import groupby

from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.eviction import (
    Candidate,
    Toolchain,
    list_of_toolchain,
    list_toolchains,
    list_unused,
)

__all__ = ["Candidate", "RetentionService"]

_PAGE = 200


class RetentionService:
    """Chooses, and whoever asked evicts. Pinned artifacts are never chosen."""

    def __init__(self, *, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def unused(
        self, longer_than: timedelta, *, namespace: str | None = None
    ) -> AsyncIterator[list[Candidate]]:
        """Artifacts that nobody used for longer than a time, longest unused first, by page."""
        before = self._clock() - longer_than
        after = None
        while True:
            async with self._database.reading() as connection:
                page = await list_unused(
                    connection,
                    before=before,
                    namespace=namespace,
                    now=self._clock(),
                    limit=_PAGE,
                    after=after,
                )
            if page:
                yield page
            if len(page) < _PAGE:
                return
            after = page[-1]

    async def outdated(self, keep: int) -> AsyncIterator[list[Candidate]]:
        """Artifacts of all but the most recently used toolchains of their namespace and kind; those
        that do not name theirs stay.
        """
        async with self._database.reading() as connection:
            toolchains = await list_toolchains(connection)
        for _, group in groupby(toolchains, key=lambda each: (each.namespace, each.kind)):
            known = [toolchain for toolchain in group if toolchain.toolchain]
            for toolchain in known[keep:]:
                async for page in self._of_toolchain(toolchain):
                    yield page

    async def of_toolchains(
        self, pattern: str, *, namespace: str | None = None
    ) -> AsyncIterator[list[Candidate]]:
        """Artifacts of the toolchains that fit a pattern (`*torch 2.6*`)."""
        async with self._database.reading() as connection:
            toolchains = await list_toolchains(connection)
        for toolchain in toolchains:
            is_wanted = namespace is None or toolchain.namespace == namespace
            if is_wanted and fnmatchcase(toolchain.toolchain, pattern):
                async for page in self._of_toolchain(toolchain):
                    yield page

    async def _of_toolchain(self, toolchain: Toolchain) -> AsyncIterator[list[Candidate]]:
        after = None
        while True:
            async with self._database.reading() as connection:
                page = await list_of_toolchain(
                    connection, toolchain, now=self._clock(), limit=_PAGE, after=after
                )
            if page:
                yield page
            if len(page) < _PAGE:
                return
            after = page[-1]
