"""Reconciler: makes rows and blobs agree again; FsckService: checks everything on demand.

A crash between the rename and the commit leaves a blob without a row; files that are lost from
outside leave rows without a blob. Both are harmless to readers, and are removed here. Rows and
blobs are compared in the order of their digests, a page at a time, while the server serves; each is
checked once more before it is removed.
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from graphstash_schema import Digest
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import list_artifacts_of, list_digests
from graphstash_server.db.queries.leases import drop_ended_leases
from graphstash_server.db.queries.usage import recount_usage, stored_bytes
from graphstash_server.errors import StartError
from graphstash_server.services.artifacts.blobs import BlobCollector
from graphstash_server.services.artifacts.service import ArtifactService, StoredArtifact
from graphstash_server.storage import BlobStore

__all__ = ["Finding", "FsckService", "Lost", "Orphan", "Reconciler"]

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


class Reconciler:
    """Runs in the background; cancelling it loses nothing."""

    def __init__(
        self,
        *,
        database: Database,
        blobs: BlobStore,
        collector: BlobCollector,
        artifacts: ArtifactService,
        clock: Clock,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._collector = collector
        self._artifacts = artifacts
        self._clock = clock

    async def check_store_not_empty(self) -> None:
        """Before a server starts: an empty store is not that of a database with artifacts. If it
        were served, healing would drop all of them.

        Raises:
            StartError: then.
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
        """Finds rows and blobs that do not agree, and changes nothing. Blobs that are younger than
        `blobs_before` are left alone: another process may be uploading them.
        """
        after = ""
        async for page in self._pages(blobs_before):
            until = page[-1].sha256 if len(page) == _PAGE else None
            sizes = {digest.sha256: digest.size_bytes for digest in page}
            referenced: set[str] = set()
            async for digest in _used_digests(self._database, after=after, until=until):
                referenced.add(digest.sha256)
                if sizes.get(digest.sha256) != digest.size_bytes:
                    for artifact in await self._lost(digest):
                        yield Lost(artifact)
            for digest in page:
                if digest.sha256 not in referenced:
                    yield Orphan(digest)
            after = page[-1].sha256 if page else ""

    async def reconcile(self, *, blobs_before: datetime) -> None:
        """Removes what `compare` finds, and corrects the counters: a server of the release before
        does not count what it does not know.
        """
        blobs = rows = 0
        async for found in self.compare(blobs_before=blobs_before):
            if isinstance(found, Orphan):
                blobs += await self._collector.collect(found.digest)
            else:
                await self._artifacts.heal(found.artifact)
                rows += 1
        if blobs or rows:
            _LOGGER.info(
                "cleaned up: %d blobs without an artifact, %d artifacts without a blob", blobs, rows
            )
        await self.recount(is_repair=True)

    async def recount(self, *, is_repair: bool) -> Sequence[str]:
        """Namespaces whose counters differ from what they have; each is corrected by itself."""
        async with self._database.reading() as connection:  # it reads every row
            wrong = await recount_usage(connection)
        if is_repair:
            for namespace in wrong:
                async with self._database.writing() as connection:
                    await recount_usage(connection, corrected=namespace)
        return wrong

    async def drop_old_leases(self) -> None:
        """Deletes leases that ended long ago."""
        async with self._database.writing() as connection:
            await drop_ended_leases(connection, before=self._clock() - _LEASES_KEPT)

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


async def _used_digests(
    database: Database, *, after: str = "", until: str | None = None
) -> AsyncIterator[Digest]:
    while True:
        async with database.reading() as connection:
            digests = await list_digests(
                connection, after_sha256=after, until_sha256=until, limit=_PAGE
            )
        for digest in digests:
            yield digest
        if len(digests) < _PAGE:
            return
        after = digests[-1].sha256


class Finding(NamedTuple):
    """Something that fsck found wrong.

    Attributes:
        problem: `orphan` (a blob that no artifact has), `lost` (an artifact without its blob),
            `damaged` (an artifact whose blob has other bytes) or `miscounted` (a namespace).
        name: of the blob, the artifact or the namespace.
        size_bytes: of the blob; 0 for a namespace.
    """

    problem: str
    name: str
    size_bytes: int


class FsckService:
    """Safe while servers run."""

    def __init__(
        self,
        *,
        database: Database,
        blobs: BlobStore,
        collector: BlobCollector,
        artifacts: ArtifactService,
        reconciler: Reconciler,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._collector = collector
        self._artifacts = artifacts
        self._reconciler = reconciler

    async def check(
        self,
        *,
        blobs_before: datetime,
        is_deep: bool,
        is_repair: bool,
        checked: Callable[[int], None],
    ) -> AsyncIterator[Finding]:
        """Checks every artifact and every blob.

        Args:
            blobs_before: ignore younger blobs without an artifact: they may be uploads.
            is_deep: read every blob and compare its digest.
            is_repair: drop what is lost or damaged (the next job publishes it again), delete
                orphans and recount.
            checked: told the size of every blob that was read.
        """
        async for found in self._reconciler.compare(blobs_before=blobs_before):
            if isinstance(found, Orphan):
                if is_repair and not await self._collector.collect(found.digest):
                    continue  # an upload was faster
                yield Finding("orphan", str(found.digest), found.digest.size_bytes)
            else:
                yield await self._drop(found.artifact, "lost", is_repair=is_repair)
        if is_deep:
            async for damaged in self._damaged(checked):
                yield await self._drop(damaged, "damaged", is_repair=is_repair)
        for namespace in await self._reconciler.recount(is_repair=is_repair):
            yield Finding("miscounted", namespace, 0)

    async def _drop(self, row: StoredArtifact, problem: str, *, is_repair: bool) -> Finding:
        if is_repair:
            await self._artifacts.heal(row)
        return Finding(problem, row.key.artifact_path, row.digest.size_bytes)

    async def _damaged(self, checked: Callable[[int], None]) -> AsyncIterator[StoredArtifact]:
        async for digest in _used_digests(self._database):
            if await self._blobs.is_whole(digest) is False:
                async with self._database.reading() as connection:
                    rows = await list_artifacts_of(connection, digest)
                for row in rows:
                    yield row
            checked(digest.size_bytes)
