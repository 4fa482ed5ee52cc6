"""Tidy: after a start, makes the rows and the blobs agree again.

A crash leaves at most two things: a blob without a row (it died between the rename and the commit),
and, when files were lost from outside, rows without a blob. Both are harmless to readers; this puts
them away. Rows and blobs are compared in the order of their digests, a page at a time, while the
server already serves; each is looked at once more before it goes.
"""

import logging
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import NamedTuple

from graphstash_schema import Digest
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import list_artifacts_of, list_digests
from graphstash_server.db.queries.leases import drop_ended_leases
from graphstash_server.services.artifacts import ArtifactService
from graphstash_server.services.blobs import BlobKeeper
from graphstash_server.storage import BlobStore

__all__ = ["Tidied", "TidyService"]

_LOGGER = logging.getLogger(__name__)

_PAGE = 500

_LEASES_KEPT = timedelta(days=1)
"""How long an ended lease's fencing number is remembered exactly."""


class Tidied(NamedTuple):
    """What was put away."""

    blobs: int
    rows: int


class TidyService:
    """Runs in the background; cancelling it loses nothing."""

    def __init__(
        self,
        *,
        database: Database,
        blobs: BlobStore,
        keeper: BlobKeeper,
        artifacts: ArtifactService,
        clock: Clock,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._keeper = keeper
        self._artifacts = artifacts
        self._clock = clock

    async def compare(self, *, blobs_before: datetime) -> Tidied:
        """Compares everything.

        Args:
            blobs_before: leave younger blobs alone: their upload may be under way in another
                process. The start of this server when it was alone then, else an hour ago.
        """
        blobs = rows = 0
        after = ""
        async for page in self._pages(blobs_before):
            until = page[-1].sha256 if len(page) == _PAGE else None
            sizes = {digest.sha256: digest.size_bytes for digest in page}
            referenced: set[str] = set()
            async for digest in self._used_digests(after=after, until=until):
                referenced.add(digest.sha256)
                if sizes.get(digest.sha256) != digest.size_bytes:
                    rows += await self._look_again(digest)
            for digest in page:
                if digest.sha256 not in referenced:
                    blobs += await self._keeper.collect(digest)
            after = page[-1].sha256 if page else ""
        tidied = Tidied(blobs, rows)
        if any(tidied):
            _LOGGER.info(
                "tidied: %d blobs without an artifact, %d artifacts without a blob", *tidied
            )
        return tidied

    async def drop_old_leases(self) -> int:
        """Forgets leases that ended long ago; says how many."""
        async with self._database.writing() as connection:
            return await drop_ended_leases(connection, before=self._clock() - _LEASES_KEPT)

    async def _look_again(self, digest: Digest) -> int:
        """Drops the rows of a blob that is not merely younger than the list; says how many."""
        if await self._blobs.stat(digest) == digest.size_bytes:
            return 0
        async with self._database.reading() as connection:
            rows = await list_artifacts_of(connection, digest)
        for row in rows:
            await self._artifacts.heal(row)
        return len(rows)

    async def _pages(self, before: datetime) -> AsyncIterator[list[Digest]]:
        """Blobs by `_PAGE`; the last page is shorter, and empty if need be."""
        page: list[Digest] = []
        async for digest in self._blobs.list(before=before):
            page.append(digest)
            if len(page) == _PAGE:
                yield page
                page = []
        yield page

    async def _used_digests(self, *, after: str, until: str | None) -> AsyncIterator[Digest]:
        while True:
            async with self._database.reading() as connection:
                digests = await list_digests(
                    connection, after_sha256=after, until_sha256=until, limit=_PAGE
                )
            for digest in digests:
                yield digest
            if len(digests) < _PAGE:
                return
            after = digests[-1].sha256
