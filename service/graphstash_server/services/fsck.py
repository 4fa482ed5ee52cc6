"""Fsck: checks everything that the server promises to keep, and mends it when asked to."""

from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import NamedTuple

from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import list_artifacts_of, list_digests
from graphstash_server.db.queries.usage import recount_usage
from graphstash_server.services.artifacts import ArtifactService, StoredArtifact
from graphstash_server.services.blobs import BlobKeeper
from graphstash_server.services.tidy import Orphan, TidyService

__all__ = ["Finding", "FsckService"]

_PAGE = 500


class Finding(NamedTuple):
    """Something that is not as it should be.

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
        keeper: BlobKeeper,
        artifacts: ArtifactService,
        tidy: TidyService,
    ) -> None:
        self._database = database
        self._keeper = keeper
        self._artifacts = artifacts
        self._tidy = tidy

    async def check(
        self,
        *,
        blobs_before: datetime,
        is_deep: bool,
        is_repair: bool,
        checked: Callable[[int], None],
    ) -> AsyncIterator[Finding]:
        """Looks at every artifact and every blob.

        Args:
            blobs_before: younger blobs without an artifact are left alone: they may be uploads.
            is_deep: read every blob and compare its digest.
            is_repair: drop what is lost or damaged (the next job publishes it again), delete
                orphans and count anew.
            checked: told the size of every blob that was read.

        Raises:
            ServerError: 503.
        """
        async for found in self._tidy.compare(blobs_before=blobs_before):
            if isinstance(found, Orphan):
                if is_repair and not await self._keeper.collect(found.digest):
                    continue  # an upload was faster
                yield Finding("orphan", str(found.digest), found.digest.size_bytes)
            else:
                yield await self._drop(found.artifact, "lost", is_repair=is_repair)
        if is_deep:
            async for damaged in self._damaged(checked):
                yield await self._drop(damaged, "damaged", is_repair=is_repair)
        for namespace in await self._miscounted(is_repair=is_repair):
            yield Finding("miscounted", namespace, 0)

    async def _drop(self, row: StoredArtifact, problem: str, *, is_repair: bool) -> Finding:
        if is_repair:
            await self._artifacts.heal(row)
        return Finding(problem, row.key.artifact_path, row.digest.size_bytes)

    async def _damaged(self, checked: Callable[[int], None]) -> AsyncIterator[StoredArtifact]:
        after = ""
        while True:
            async with self._database.reading() as connection:
                digests = await list_digests(
                    connection, after_sha256=after, until_sha256=None, limit=_PAGE
                )
            for digest in digests:
                if await self._keeper.is_whole(digest) is False:
                    async with self._database.reading() as connection:
                        rows = await list_artifacts_of(connection, digest)
                    for row in rows:
                        yield row
                checked(digest.size_bytes)
            if len(digests) < _PAGE:
                return
            after = digests[-1].sha256

    async def _miscounted(self, *, is_repair: bool) -> list[str]:
        """Namespaces whose counters differ from their artifacts."""
        opened = self._database.writing() if is_repair else self._database.reading()
        async with opened as connection:
            return list(await recount_usage(connection, is_repair=is_repair))
