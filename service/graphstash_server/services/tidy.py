"""Tidy: makes the rows and the blobs agree again.

A crash leaves at most two things: a blob without a row (it died between the rename and the commit),
and, when files were lost from outside, rows without a blob. Both are harmless to readers; this puts
them away. Rows and blobs are compared in the order of their digests, a page at a time, while the
server serves; each is looked at once more before it goes.
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
from graphstash_server.db.queries.usage import stored_bytes
from graphstash_server.errors import StartError
from graphstash_server.services.artifacts import ArtifactService, StoredArtifact
from graphstash_server.services.blobs import BlobKeeper
from graphstash_server.storage import BlobStore

__all__ = ["Lost", "Orphan", "Tidied", "TidyService"]

_LOGGER = logging.getLogger(__name__)

_PAGE = 500

_LEASES_KEPT = timedelta(days=1)
"""How long an ended lease's fencing number is remembered exactly."""


class Orphan(NamedTuple):
    """A blob that no artifact has."""

    digest: Digest


class Lost(NamedTuple):
    """An artifact whose blob is absent or has another size."""

    artifact: StoredArtifact


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

    async def refuse_an_empty_store(self) -> None:
        """Before a server starts: a store without any blob, beside a database with artifacts, is
        not the store of this database. Served, it would heal all of them away.

        Raises:
            StartError: then.
            ServerError: 503.
        """
        async with self._database.reading() as connection:
            stored = await stored_bytes(connection)
        if not stored:
            return
        async for _ in self._blobs.list():
            return
        raise StartError(
            f"the database has artifacts of {stored} bytes and the blob store has no blob: mount "
            "the right directory, name the right bucket and prefix, or let `graphstash fsck "
            "--repair` drop these artifacts"
        )

    async def compare(self, *, blobs_before: datetime) -> AsyncIterator[Orphan | Lost]:
        """Finds what does not agree, and changes nothing.

        Args:
            blobs_before: leave younger blobs alone: their upload may be under way in another
                process.

        Raises:
            ServerError: 503.
        """
        after = ""
        async for page in self._pages(blobs_before):
            until = page[-1].sha256 if len(page) == _PAGE else None
            sizes = {digest.sha256: digest.size_bytes for digest in page}
            referenced: set[str] = set()
            async for digest in self._used_digests(after=after, until=until):
                referenced.add(digest.sha256)
                if sizes.get(digest.sha256) != digest.size_bytes:
                    for artifact in await self._lost(digest):
                        yield Lost(artifact)
            for digest in page:
                if digest.sha256 not in referenced:
                    yield Orphan(digest)
            after = page[-1].sha256 if page else ""

    async def tidy(self, *, blobs_before: datetime) -> Tidied:
        """Puts away what `compare` finds."""
        blobs = rows = 0
        async for found in self.compare(blobs_before=blobs_before):
            if isinstance(found, Orphan):
                blobs += await self._keeper.collect(found.digest)
            else:
                await self._artifacts.heal(found.artifact)
                rows += 1
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

    async def _lost(self, digest: Digest) -> list[StoredArtifact]:
        """The artifacts of a blob that is not merely younger than the list."""
        if await self._blobs.stat(digest) == digest.size_bytes:
            return []
        async with self._database.reading() as connection:
            return await list_artifacts_of(connection, digest)

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
