"""Reconciler: finds and removes blobs without a row and rows without a blob.

A crash between storing a blob and the commit leaves a blob without a row. A blob that is deleted
from outside leaves a row. Each finding is checked again before it is removed.

A blob store may also be incomplete for a while, because a part of it is not mounted or restored
yet. So a read or a comparison that misses a blob only notes that (table `absences`). An hourly look
drops the artifact if the blob is absent for at least `_RETURN`, and deletes the note if it is back.
If many blobs are absent, nothing is dropped. After an artifact was dropped, all blobs without an
artifact are kept for `_RETURN`.
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from graphstash_schema import Digest
from graphstash_server.artifact import Artifact
from graphstash_server.db.corruption import find_corruption
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.absences import drop_absences, list_absences
from graphstash_server.db.queries.artifacts import list_artifacts_of, list_digests
from graphstash_server.db.queries.identifiers import claim_recount, last_recount
from graphstash_server.db.queries.leases import drop_ended_leases
from graphstash_server.db.queries.recorded_times import last_healing
from graphstash_server.db.queries.usage import (
    add_usage,
    count_stored,
    recount_usage,
    stored_bytes,
)
from graphstash_server.errors import StartError
from graphstash_server.services.artifacts.blobs import BlobCollector
from graphstash_server.services.artifacts.service import ArtifactService
from graphstash_server.services.plausible_clock import PlausibleClock
from graphstash_server.shared_text import SharedText
from graphstash_server.storage import BlobStore

__all__ = ["Finding", "Lost", "Orphan", "Reconciler"]

_LOGGER = logging.getLogger(__name__)

_PAGE = 500

_MAX_PENDING = 10_000
"""Maximum findings that one `reconcile` or `look_again` removes. The next one continues."""

_NOTED_AT_ONCE = 50

_RETURN = timedelta(hours=1)
"""Time for which a blob must be absent until its artifacts are dropped. Blobs without an artifact
are then kept for as long, because the blob may return when the store is complete again."""

_LEASES_KEPT = timedelta(days=1)
"""Age at which an ended lease is deleted. The key's next fencing number then comes from the clock
alone."""


class Orphan(NamedTuple):
    """A blob without an artifact."""

    digest: Digest


class Lost(NamedTuple):
    """An artifact whose blob is absent or has another size."""

    artifact: Artifact


class Finding(NamedTuple):
    """A problem of a row, a blob or the database.

    Attributes:
        problem: `orphan` (a blob without an artifact), `lost` (an artifact without its blob),
            `damaged` (an artifact whose blob has other bytes), `miscounted` (a namespace), or
            `corrupt` (the database: the only finding, never repaired).
        name: digest of the blob, path of the artifact, namespace, or damage of the database.
        size_bytes: size of the blob. 0 for a namespace and the database.
    """

    problem: str
    name: str
    size_bytes: int


@dataclass(slots=True)
class Compared:
    """Numbers of objects that a comparison has read.

    Attributes:
        stored: blobs in the store.
        used: different blobs that the artifacts have.
    """

    stored: int = 0
    used: int = 0


@dataclass(kw_only=True, eq=False)
class Reconciler:
    """Compare rows with blobs. Safe while servers run. Safe to cancel."""

    database: Database
    blobs: BlobStore
    collector: BlobCollector
    artifacts: ArtifactService
    clock: PlausibleClock
    doubt: SharedText

    async def check_store_not_empty(self) -> None:
        """Raise StartError if the store is empty but the database has artifacts: it is probably the
        wrong store, with which healing would drop all artifacts.
        """
        async with self.database.reading() as connection:
            stored = await stored_bytes(connection)
        if not stored:
            return
        async for _ in self.blobs.list():
            return
        raise StartError(
            f"the database has artifacts of {stored} bytes and the blob store has no blob: mount "
            "the right directory, name the right bucket and prefix, or let `graphstash fsck "
            "--repair` drop these artifacts"
        )

    async def compare(
        self, *, blobs_before: datetime, compared: Compared | None = None
    ) -> AsyncIterator[list[Orphan | Lost]]:
        """Yield pages of rows and blobs that disagree. Ignore blobs younger than `blobs_before`,
        which may be uploads. Add the numbers of objects to `compared`.
        """
        compared = compared or Compared()
        after = ""
        async for page in self._pages(blobs_before):
            compared.stored += len(page)
            until = page[-1].sha256 if len(page) == _PAGE else None
            sizes = {digest.sha256: digest.size_bytes for digest in page}
            referenced: set[str] = set()
            async for digests in _used_digests(self.database, after=after, until=until):
                referenced.update(digest.sha256 for digest in digests)
                compared.used += len(digests)
                yield await self._lost(
                    [each for each in digests if sizes.get(each.sha256) != each.size_bytes]
                )
            yield [Orphan(digest) for digest in page if digest.sha256 not in referenced]
            after = page[-1].sha256 if page else ""

    async def reconcile(self, *, blobs_before: datetime) -> None:
        """Remove the findings of `compare`, and correct the counters. Only note that blobs are
        absent, see `look_again`.

        Remove nothing and report a doubt in two cases. If more than half of the blobs have no
        artifact, the database probably belongs to another store. If the store lacks more than one
        blob and more than a tenth of them, a part of it is probably not mounted.

        Keep the blobs without an artifact if another artifact lost its blob less than `_RETURN`
        ago.
        """
        compared = Compared()
        orphans = lost = 0
        pending: list[Orphan | Lost] = []
        keeps_orphans = await self._lost_blobs_since(self.clock.ago(_RETURN))
        async for found in self.compare(blobs_before=blobs_before, compared=compared):
            orphans += sum(isinstance(each, Orphan) for each in found)
            lost += len({each.artifact.digest for each in found if isinstance(each, Lost)})
            chosen = [each for each in found if isinstance(each, Lost) or not keeps_orphans]
            pending += chosen[: _MAX_PENDING - len(pending)]
        doubts = []
        if 2 * orphans > compared.stored:
            doubts.append(
                f"{orphans} of {compared.stored} blobs have no artifact in this database, and are "
                "kept: is it the database of this blob store? If so, `graphstash gc` deletes them"
            )
        if lost > 1 and 10 * lost > compared.used:
            doubts.append(
                f"{lost} of {compared.used} blobs that artifacts have are absent from the blob "
                "store, and the artifacts are kept: is all of it mounted or restored? If so, "
                "`graphstash gc` drops these artifacts"
            )
        for doubt in doubts:
            _LOGGER.error("%s", doubt)
        self.doubt.set("; ".join(doubts) or None)
        if doubts:
            pending.clear()
        absent = await self._note_lost(
            [each.artifact for each in pending if isinstance(each, Lost)]
        )
        removed = await self.remove([each for each in pending if isinstance(each, Orphan)])
        if removed or absent:
            _LOGGER.info(
                "cleaned up: %d blobs without an artifact; %d artifacts without a blob are dropped "
                "if it is still absent in an hour",
                len(removed),
                absent,
            )
        await self.recount(is_repair=True)

    async def look_again(self) -> None:
        """Drop the artifacts whose blobs are absent since `_RETURN` or longer. Forget the absences
        of blobs that are back. Drop nothing if these are more than one artifact and more than a
        tenth of all. Drop at most `_MAX_PENDING` at a time.
        """
        long_ago = self.clock.ago(_RETURN)
        lost: list[Artifact] = []
        count = 0
        after: str | None = ""
        while after is not None:
            async with self.database.reading() as connection:
                page = await list_absences(connection, after_sha256=after, limit=_PAGE)
            after = page[-1][0].sha256 if len(page) == _PAGE else None
            absent = [
                (digest, since)
                for digest, since in page
                if await self.blobs.stat(digest) != digest.size_bytes
            ]
            rows = await self._artifacts_of([digest for digest, _ in absent])
            used = {row.digest for row in rows}
            async with self.database.writing() as connection:
                await drop_absences(connection, [each for each, _ in page if each not in used])
            old = {digest for digest, since in absent if since <= long_ago}
            gone = [row for row in rows if row.digest in old]
            count += len(gone)
            lost += gone[: _MAX_PENDING - len(lost)]
        async with self.database.reading() as connection:
            stored = await count_stored(connection)
        if count > 1 and 10 * count > stored:
            _LOGGER.error(
                "the blobs of %d of %d artifacts are absent for an hour, and the artifacts are "
                "kept: is all of the blob store mounted or restored? If so, `graphstash gc` drops "
                "these artifacts",
                count,
                stored,
            )
            return
        await self.artifacts.heal_all(lost)

    async def remove(self, found: Sequence[Orphan | Lost]) -> list[Orphan | Lost]:
        """Remove findings. Return them without the blobs that are in use by now."""
        await self.artifacts.heal_all([each.artifact for each in found if isinstance(each, Lost)])
        collected = await self.collector.collect_all(
            [each.digest for each in found if isinstance(each, Orphan)]
        )
        return [each for each in found if isinstance(each, Lost) or each.digest in collected]

    async def check(
        self,
        *,
        blobs_before: datetime,
        is_deep: bool,
        is_repair: bool,
        checked: Callable[[int], None],
    ) -> AsyncIterator[Finding]:
        """Check every artifact and blob. Ignore orphans younger than `blobs_before`, which may be
        uploads. If `is_deep`, read every blob, and call `checked` with its size.
        """
        reason = await find_corruption(self.database.url)
        if reason is not None:
            self.database.note_corruption(reason)
            yield Finding("corrupt", reason, 0)
            return  # a corrupt database may name blobs in use as orphans
        async for found in self.compare(blobs_before=blobs_before):
            for each in await self.remove(found) if is_repair else found:
                if isinstance(each, Orphan):
                    yield Finding("orphan", str(each.digest), each.digest.size_bytes)
                else:
                    yield _about("lost", each.artifact)
        if is_deep:
            async for damaged in self._damaged(checked):
                if is_repair:
                    await self.artifacts.heal_all(damaged)
                for artifact in damaged:
                    yield _about("damaged", artifact)
        for namespace in await self.recount(is_repair=is_repair):
            yield Finding("miscounted", namespace, 0)

    async def recount(self, *, is_repair: bool) -> Sequence[str]:
        """Return the namespaces with wrong counters. If `is_repair`, repair each in a short
        transaction, unless another process repairs them.
        """
        async with self.database.reading() as connection:  # reads every row, so block no writer
            mark = await last_recount(connection)
            wrong = await recount_usage(connection)
        for namespace, change in wrong.items() if is_repair else ():
            async with self.database.writing() as connection:
                mark = await claim_recount(connection, mark)
                if mark is None:
                    break
                await add_usage(connection, namespace, change)
        return list(wrong)

    async def drop_old_leases(self) -> None:
        """Delete leases that ended more than `_LEASES_KEPT` ago."""
        async with self.database.writing() as connection:
            await drop_ended_leases(connection, before=self.clock.ago(_LEASES_KEPT))

    async def _note_lost(self, rows: Sequence[Artifact]) -> int:
        """Note the absent blobs of artifacts, and drop artifacts whose blobs have another size.
        Return the number of artifacts with absent blobs.
        """
        absent = [row for row in rows if await self.blobs.stat(row.digest) is None]
        for start in range(0, len(absent), _NOTED_AT_ONCE):
            await self.artifacts.note_absent(absent[start : start + _NOTED_AT_ONCE])
        kept = set(absent)
        await self.artifacts.heal_all([row for row in rows if row not in kept])
        return len(absent)

    async def _lost_blobs_since(self, since: datetime) -> bool:
        """Return whether an artifact was dropped since then because its blob was absent."""
        async with self.database.reading() as connection:
            healed_at = await last_healing(connection)
        return healed_at is not None and healed_at >= since

    async def _lost(self, digests: Sequence[Digest]) -> list[Orphan | Lost]:
        """Return the artifacts of blobs that are still absent or have another size."""
        return [
            Lost(artifact)
            for artifact in await self._artifacts_of(
                [each for each in digests if await self.blobs.stat(each) != each.size_bytes]
            )
        ]

    async def _damaged(self, checked: Callable[[int], None]) -> AsyncIterator[list[Artifact]]:
        async for digests in _used_digests(self.database):
            damaged = []
            for digest in digests:
                if await self.blobs.is_whole(digest) is False:
                    damaged.append(digest)
                checked(digest.size_bytes)
            yield await self._artifacts_of(damaged)

    async def _artifacts_of(self, digests: Sequence[Digest]) -> list[Artifact]:
        if not digests:
            return []
        async with self.database.reading() as connection:
            return await list_artifacts_of(connection, digests)

    async def _pages(self, before: datetime) -> AsyncIterator[list[Digest]]:
        """Yield pages of blobs. The last one is shorter than `_PAGE`, and may be empty."""
        page: list[Digest] = []
        async for digest in self.blobs.list(before=before):
            page.append(digest)
            if len(page) == _PAGE:
                yield page
                page = []
        yield page


async def _used_digests(
    database: Database, *, after: str = "", until: str | None = None
) -> AsyncIterator[Sequence[Digest]]:
    while True:
        async with database.reading() as connection:
            digests = await list_digests(
                connection, after_sha256=after, until_sha256=until, limit=_PAGE
            )
        yield digests
        if len(digests) < _PAGE:
            return
        after = digests[-1].sha256


def _about(problem: str, artifact: Artifact) -> Finding:
    return Finding(problem, artifact.key.artifact_path, artifact.digest.size_bytes)
