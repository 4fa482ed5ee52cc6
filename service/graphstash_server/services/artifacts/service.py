"""ArtifactService: finds, opens and deletes artifacts, and drops an artifact without a blob.

A blob may be absent for a while, because a part of the store is not mounted or a bucket is slow to
show it. So a read that misses a blob notes that, and answers as if the artifact were absent. The
reconciler looks again an hour later, and drops the artifact if the blob is still absent. An upload
for the key replaces the artifact, in its commit.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic
from typing import NamedTuple, TypeVar

from graphstash_schema import AuditAction, Digest, Namespace, VerifyResponse
from graphstash_schema.protocol import LOOKUP_PIN_SECONDS, MAX_MANIFEST_ENTRIES
from graphstash_schema.withdrawals import WithdrawalCause
from graphstash_server.actor import Actor
from graphstash_server.artifact import Artifact
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.absences import drop_absences, note_absences
from graphstash_server.db.queries.artifacts import (
    FoundArtifacts,
    delete_artifacts,
    find_artifact,
    find_artifact_now,
    find_artifacts,
    find_stored,
    list_stored_rows,
    note_look_up,
)
from graphstash_server.db.queries.audit import AuditRecord, add_audit
from graphstash_server.db.queries.deletions import add_deletions, find_marked
from graphstash_server.db.queries.locks import share_blobs
from graphstash_server.db.queries.recorded_times import record_healing
from graphstash_server.db.queries.reports import drop_reports, find_unconfirmed
from graphstash_server.db.queries.usage import UsageChange, add_usage
from graphstash_server.db.queries.withdrawals import add_withdrawals
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.logs import in_background
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.artifacts.blobs import BlobCollector
from graphstash_server.storage import SMALL_BYTES, BlobReader, BlobStore, FileReader

__all__ = ["MAX_ROWS", "ArtifactService", "OpenArtifact", "RecentRows"]

V = TypeVar("V")

MAX_ROWS = 1024
"""Maximum number of cached rows, of remembered drops, and of entries in each cache of responses.
The rows take at most 16 MiB, because metadata headers have up to 16 KiB; a cache of responses, 32.
"""

_NO_AGE = timedelta(0)
_MAX_AGE = timedelta(seconds=2)

_DELETE_SECONDS = _MAX_AGE.total_seconds() + 0.5
"""Seconds until the server answers a deletion if another process may still read the blob: the
store has not deleted it, another artifact has it, or a host has a copy of it (`storage.tier`). By
then, no process has the row in memory, so none serves the blob."""

_COLLECT_SECONDS = 30.0
"""Seconds that `ArtifactService.delete_all` waits for the store to delete some blobs."""

_COLLECTED_AT_ONCE = 20
"""Number of blobs in one such wait."""


@dataclass(kw_only=True, eq=False)
class RecentRows:
    """LRU cache of recently served rows, so that a hot hit needs no query.

    A cached row never leads to wrong bytes: the blob is opened by the row's digest, and its size is
    compared. But the row may be stale, after its artifact was deleted, withheld or, if the policy
    allows it, replaced.

    A change by this process drops the row. After a change by another process, opening the blob
    usually fails, and the database is queried. If the blob stays, the old artifact is served for at
    most two seconds (`_MAX_AGE`). It stays if the artifact is withheld, another artifact has the
    same blob, or a disk tier keeps a copy. The server answers a deletion after that time. `clock`
    is never set back.
    """

    clock: Clock

    def __post_init__(self) -> None:
        self._rows: OrderedDict[StoredKey, tuple[datetime, Artifact]] = OrderedDict()
        self._dropped_at: OrderedDict[StoredKey, datetime] = OrderedDict()

    def get(self, key: StoredKey) -> Artifact | None:
        """Return the row, or None if it is absent or too old."""
        kept = self._rows.get(key)
        if kept is None:
            return None
        since, row = kept
        if self.clock() - since > _MAX_AGE:
            del self._rows[key]
            return None
        self._rows.move_to_end(key)
        return row

    def add(self, row: Artifact, *, read_at: datetime) -> None:
        """Cache a row that was read at `read_at`, unless it was dropped or read again since."""
        dropped_at = self._dropped_at.get(row.key)
        if dropped_at is not None and read_at <= dropped_at:
            return
        since, _ = self._rows.get(row.key, (read_at, row))
        if since <= read_at:
            _keep(self._rows, row.key, (read_at, row))

    def drop(self, key: StoredKey) -> None:
        """Drop a row that changed. `add` then refuses the row of a read that began before."""
        self._rows.pop(key, None)
        _keep(self._dropped_at, key, self.clock())

    def drop_used(self, keys: Iterable[StoredKey]) -> None:
        """Drop the cached rows of artifacts whose hits changed."""
        for key in keys:
            if key in self._rows:
                self.drop(key)


def _keep(kept: OrderedDict[StoredKey, V], key: StoredKey, value: V) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > MAX_ROWS:
        kept.popitem(last=False)


_LOGGER = logging.getLogger(__name__)

_PIN = timedelta(seconds=LOOKUP_PIN_SECONDS)

_MAX_PROTECTED_OF_CALLER = 2 * MAX_MANIFEST_ENTRIES
_MAX_PROTECTED = 4 * _MAX_PROTECTED_OF_CALLER
"""Artifacts that look-ups on this server protect at a time: two large jobs per caller, and four
such callers per namespace."""

_NOTED = timedelta(minutes=10)
"""Time for which a process remembers that it has noted an absent blob."""

_MAX_VERIFIED = 2
"""Blobs verified at a time. A small request makes the server read gigabytes."""

_DELETION_PAGE = 200

_ATTEMPTS = 3
"""Attempts to find an artifact with its blob, which is gone if the artifact was just replaced."""


class Cleared(NamedTuple):
    """The number of artifacts that were deleted, and of their blobs that the store still has."""

    artifacts: int
    blobs_left: int


@dataclass(frozen=True, slots=True)
class OpenArtifact:
    """An artifact whose bytes stay readable even if it is deleted. The caller closes `reader`."""

    row: Artifact
    reader: BlobReader


@dataclass(kw_only=True, eq=False)
class ArtifactService:
    """All operations on artifacts except uploads (`UploadService`).

    Attributes:
        steady_clock: clock that is never set back.
        has_tiers: whether hosts may have copies of blobs in disk tiers.
    """

    database: Database
    blobs: BlobStore
    collector: BlobCollector
    accounting: Accounting
    clock: Clock
    steady_clock: Clock
    plausible_clock: Clock
    has_tiers: bool

    def __post_init__(self) -> None:
        self._recent = RecentRows(clock=self.steady_clock)
        self._protected = self.accounting.counters.host.protected
        self._noted: OrderedDict[StoredKey, datetime] = OrderedDict()
        self._collecting: set[asyncio.Task[set[Digest]]] = set()
        self._verifying: dict[Digest, asyncio.Task[bool | None]] = {}
        self._verifiers = asyncio.Semaphore(_MAX_VERIFIED)

    async def open(self, key: StoredKey) -> OpenArtifact | None:
        """Open an artifact for reading. Return None if it or its blob is absent."""
        row = self._recent.get(key)
        if row is not None:
            reader = await self._open_whole(row.digest)
            if reader is not None:
                return OpenArtifact(row, reader)
            self._recent.drop(key)
        for _ in range(_ATTEMPTS):
            row = await self._read(key)
            if row is None:
                return None
            reader = await self._open_whole(row.digest)
            if reader is not None:
                return OpenArtifact(row, reader)
            if await self._is_lost(row):
                return None
        return None

    def find_now(self, key: StoredKey) -> Sequence[Artifact] | None:
        """Return a sequence with a key's row, if any, or None if the query would block."""
        row = self._recent.get(key)
        if row is not None:
            return (row,)
        read_at = self.steady_clock()
        found = find_artifact_now(self.database, key)
        for row in found or ():
            self._recent.add(row, read_at=read_at)
        return found

    def read_now(self, row: Artifact) -> bytearray | None:
        """Return all bytes of a small artifact, or None if reading them would block."""
        if row.digest.size_bytes > SMALL_BYTES:
            return None
        return self.blobs.read_now(row.digest)

    def open_now(self, row: Artifact) -> FileReader | None:
        """Return an artifact's open file, or None if opening it would block."""
        file = self.blobs.open_now(row.digest)
        if file is not None and file.size_bytes != row.digest.size_bytes:
            file.close_now()
            return None
        return file

    async def link(self, key: StoredKey) -> tuple[Artifact, str] | None:
        """Return a row and a URL of its blob for clients, or None if `open` has to serve it.

        The blob is not checked. A client that cannot download it retries without a redirect.
        """
        row = self._recent.get(key) or await self._read(key)
        url = await self.blobs.link(row.digest) if row is not None else None
        return (row, url) if row is not None and url is not None else None

    async def find(self, key: StoredKey) -> Artifact | None:
        """Return an artifact, or None if it or its blob is absent."""
        for _ in range(_ATTEMPTS):
            row = await self._read(key)
            if row is None or await self.blobs.stat(row.digest) == row.digest.size_bytes:
                return row
            if await self._is_lost(row):
                return None
        return None

    async def is_replaceable(self, row: Artifact) -> bool:
        """Return whether an upload may replace an artifact in a namespace that keeps the first one:
        its blob is absent or damaged, or a region has set it aside.
        """
        if row.withheld_at is not None:
            return bool(await find_unconfirmed(self.database, [row.key]))
        size_bytes = await self.blobs.stat(row.digest)
        if size_bytes is None and await self.collector.learn_generations([row.digest]):
            size_bytes = await self.blobs.stat(row.digest)
        return size_bytes != row.digest.size_bytes

    async def find_row(self, key: StoredKey) -> Artifact | None:
        """Return an artifact, even if it is withheld or its blob is absent."""
        return await find_stored(self.database, key)

    async def verify(self, key: StoredKey) -> VerifyResponse:
        """Compare an artifact's blob with its digest. Drop the artifact if they differ. It also
        counts as healed if its blob is absent: it is not served, and an upload replaces it.

        Every reader may call this, because it trusts nothing that the caller sends.
        """
        row = await self._read(key)
        if row is None:
            return VerifyResponse(found=False, healed=False)
        is_healed = not await self._is_whole(row.digest) and await self._is_lost(row)
        return VerifyResponse(found=True, healed=is_healed)

    async def read_start(self, row: Artifact, *, most_bytes: int) -> bytes:
        """Return up to `most_bytes` from the start of a blob, and none if it is lost."""
        reader = await self._open_whole(row.digest)
        if reader is None:
            return b""
        try:
            stop = min(most_bytes, reader.size_bytes)
            return b"".join([chunk async for chunk in reader.chunks(0, stop)])
        finally:
            await reader.close()

    async def _is_whole(self, digest: Digest) -> bool | None:
        """Return whether a blob matches its digest. Concurrent callers share one read."""
        verifying = self._verifying.get(digest)
        if verifying is None:
            verifying = in_background(self._read_whole(digest))
            self._verifying[digest] = verifying
            verifying.add_done_callback(lambda _: self._verifying.pop(digest))
        return await asyncio.shield(verifying)

    async def _read_whole(self, digest: Digest) -> bool | None:
        async with self._verifiers:
            return await self.blobs.is_whole(digest)

    async def lookup(
        self, namespace: Namespace, keys: Sequence[StoredKey], *, caller: str | None
    ) -> FoundArtifacts:
        """Find the artifacts of many keys, withheld ones separately. Blobs are not checked.

        The look-up protects the other artifacts from eviction for at least `LOOKUP_PIN_SECONDS`,
        up to a limit per caller and per namespace: read access must not determine what stays. A new
        protection lasts twice that time, so that a second look-up soon after writes nothing.
        Without a caller, the look-up protects none.
        """
        promised = self.plausible_clock() + _PIN
        found = await find_artifacts(self.database, namespace, keys, until=promised)
        if caller is None:
            return found
        unprotected = found.unprotected
        if chosen := unprotected[: self._allowance(namespace, caller, len(unprotected))]:
            async with self.database.writing() as connection:
                await note_look_up(connection, chosen, until=promised + _PIN)
        return found

    def _allowance(self, namespace: Namespace, caller: str, count: int) -> int:
        for name, most in (
            (f"{namespace} {caller}", _MAX_PROTECTED_OF_CALLER),
            (namespace, _MAX_PROTECTED),
        ):
            per_second = most / (2 * _PIN).total_seconds()
            count, _ = self._protected.take(name, count, most=most, per_second=per_second)
        return count

    async def delete(self, key: StoredKey, *, actor: Actor, digest: str | None = None) -> bool:
        """Delete an artifact, withheld or not. Return False if it is absent, or has another digest
        than the given one. When it returns, no server serves the artifact. If the store hangs, its
        blob stays marked for deletion, and is deleted later.
        """
        withdrawn = await self.withdraw(key, actor=actor, digest=digest)
        if withdrawn is None:
            return False
        began = monotonic()
        collecting = self.collect_soon(withdrawn)
        done, _ = await asyncio.wait({collecting}, timeout=_DELETE_SECONDS)
        await self._await_stale_rows(
            began, is_deleted=bool(done) and withdrawn in collecting.result()
        )
        return True

    async def _await_stale_rows(self, began: float, *, is_deleted: bool) -> None:
        """Wait until no process has the row of an artifact that was deleted at `began` in memory.
        Do not wait if no process can read the blob any more.
        """
        if self.has_tiers or not is_deleted:
            await asyncio.sleep(began + _DELETE_SECONDS - monotonic())

    def collect_soon(self, digest: Digest) -> "asyncio.Task[set[Digest]]":
        """Begin to delete the blob of a deleted artifact, see `collect`."""
        collecting = in_background(self.collect([digest]))
        self._collecting.add(collecting)
        collecting.add_done_callback(self._collecting.discard)
        return collecting

    async def close(self) -> None:
        """Cancel the deletion of blobs. Another process continues it."""
        for task in list(self._collecting):
            task.cancel()
        await asyncio.gather(*self._collecting, return_exceptions=True)

    async def withdraw(
        self,
        key: StoredKey,
        *,
        actor: Actor,
        digest: str | None = None,
        cause: WithdrawalCause = WithdrawalCause.DELETED,
    ) -> Digest | None:
        """Delete an artifact as `delete` does, but not its blob. Return the blob, for `collect`."""
        while True:  # retry if the artifact is replaced between the two statements
            row = await find_stored(self.database, key)
            if row is None:
                self.forget(key)
                return None
            if digest is not None and str(row.digest) != digest:
                return None
            if await self._delete([row], actor=actor, cause=cause):
                return row.digest

    async def evict(self, rows: Sequence[Artifact], *, actor: Actor, reason: str) -> int:
        """Evict artifacts of one namespace, withheld or not. Return their number. Hosts keep their
        copies, and maintenance deletes the blobs.
        """
        return len(await self._delete(rows, actor=actor, eviction=reason))

    async def delete_all(self, namespace: Namespace, *, actor: Actor) -> Cleared:
        """Delete all artifacts of a namespace, withheld or not.

        Their blobs are deleted last, because that may take long. If the store does not delete two
        pages of them within `_COLLECT_SECONDS` each, the others are left to maintenance.
        """
        withdrawn: list[Digest] = []
        after = None
        while True:
            async with self.database.reading() as connection:
                page = await list_stored_rows(
                    connection, namespace, after=after, limit=_DELETION_PAGE
                )
            if not page:
                break
            gone = await self._delete(page, actor=actor)
            withdrawn += (row.digest for row in gone)
            kept = {row.key for row in page}.difference(row.key for row in gone)
            for key in kept:  # replaced since the page was read
                if (digest := await self.withdraw(key, actor=actor)) is not None:
                    withdrawn.append(digest)
            after = page[-1].key
        began = monotonic()
        deleted, left = await self._collect_pages(list(dict.fromkeys(withdrawn)))
        await self._await_stale_rows(began, is_deleted=deleted >= set(withdrawn))
        return Cleared(len(withdrawn), left)

    async def _collect_pages(self, digests: Sequence[Digest]) -> tuple[set[Digest], int]:
        """Delete the blobs of `delete_all`, page by page. Return the deleted blobs, and the number
        of the blobs that maintenance still has to delete.
        """
        deleted: set[Digest] = set()
        left = late_pages = 0
        for start in range(0, len(digests), _COLLECTED_AT_ONCE):
            page = digests[start : start + _COLLECTED_AT_ONCE]
            if late_pages < 2:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_COLLECT_SECONDS):
                        deleted |= await self.collect(page)
            async with self.database.reading() as connection:
                marked = len(await find_marked(connection, page))
            late_pages = late_pages + 1 if marked or late_pages == 2 else 0
            left += marked
        return deleted, left

    async def collect(self, digests: Sequence[Digest]) -> set[Digest]:
        """Delete the blobs of deleted artifacts, unless other artifacts need them. Return the
        deleted blobs, or none if the store failed for one of them. Maintenance then deletes the
        rest.
        """
        try:
            return await self.collector.collect_all(digests, only_marked=True)
        except ServerError as error:
            _LOGGER.warning(
                "artifacts are deleted, but not all of their blobs; maintenance will retry: %s",
                error,
            )
            return set()

    async def note_absent(self, rows: Sequence[Artifact]) -> list[Artifact]:
        """Note that the blobs of artifacts are absent. Return the noted artifacts. Skip an artifact
        that has changed meanwhile, or whose blob this process looked for under an old name.
        """
        renamed = await self.collector.learn_generations([row.digest for row in rows])
        async with self.database.writing() as connection:
            found = [await find_stored(connection, row.key) for row in rows]
            absent = [
                row
                for row, now in zip(rows, found, strict=True)
                if now is not None and now.digest == row.digest and row.digest not in renamed
            ]
            digests = [row.digest for row in absent]
            await note_absences(connection, digests, now=self.plausible_clock())
        return absent

    async def _is_lost(self, row: Artifact) -> bool:
        """Note that an artifact's blob is absent, or drop the artifact if the blob is damaged.
        Return False if the caller has to look again.
        """
        if await self.blobs.stat(row.digest) is not None:
            return bool(await self.heal_all([row]))
        noted_at = self._noted.get(row.key)
        if noted_at is not None and _NO_AGE <= self.clock() - noted_at <= _NOTED:
            now = await self.find_row(row.key)
            return now is not None and now.digest == row.digest
        try:
            is_lost = bool(await self.note_absent([row]))
        except ServerError as error:
            _LOGGER.warning("could not note that the blob of %s is absent: %s", row.key.key, error)
            return True
        if is_lost:
            _keep(self._noted, row.key, self.clock())
            _LOGGER.warning(
                "the blob %s of %s in %s is absent: the artifact is not served, and is dropped if "
                "the blob is still absent in an hour",
                row.digest,
                row.key.key,
                row.key.namespace,
            )
        return is_lost

    async def heal_all(self, rows: Sequence[Artifact]) -> list[Artifact]:
        """Drop artifacts whose blobs are lost or damaged. Return those that were dropped.

        An artifact stays if it changed meanwhile. It also stays if this process looked for its blob
        under an old name, which another server has changed. If the database fails, a later request
        tries again.
        """
        dropped: list[Artifact] = []
        for page in _pages_by_namespace(rows):
            try:
                renamed = await self.collector.learn_generations([row.digest for row in page])
                gone = await self._delete([row for row in page if row.digest not in renamed])
                await self.collect([row.digest for row in gone])
            except ServerError as error:
                _LOGGER.warning(
                    "could not drop %d artifacts, such as %s, which lost their blobs; will retry: "
                    "%s",
                    len(page),
                    page[0].key.key,
                    error,
                )
                continue
            for row in gone:
                self.accounting.count_healed()
                _LOGGER.warning(
                    "dropped %s of %s: its blob %s is lost or damaged; the next job stores it "
                    "again",
                    row.key.key,
                    row.key.namespace,
                    row.digest,
                )
            dropped += gone
        return dropped

    def remember(self, row: Artifact, *, read_at: datetime) -> None:
        """Cache the row of an artifact that was just stored, because many may wait for it.
        `read_at` is a time before the commit by `steady_clock`.
        """
        self._recent.add(row, read_at=read_at)

    def forget(self, key: StoredKey) -> None:
        """Make the next request for a changed artifact query the database."""
        self._recent.drop(key)

    def forget_used(self, keys: Iterable[StoredKey]) -> None:
        """Forget the cached rows of artifacts whose hits changed."""
        self._recent.drop_used(keys)

    async def _read(self, key: StoredKey) -> Artifact | None:
        read_at = self.steady_clock()
        row = await find_artifact(self.database, key)
        if row is not None:
            self._recent.add(row, read_at=read_at)
        return row

    async def _open_whole(self, digest: Digest) -> BlobReader | None:
        """Open a blob. Return None if it is lost or has a wrong size."""
        reader = await self.blobs.open(digest)
        if reader is None or reader.size_bytes == digest.size_bytes:
            return reader
        await reader.close()
        return None

    async def _delete(
        self,
        rows: Sequence[Artifact],
        *,
        actor: Actor | None = None,
        cause: WithdrawalCause = WithdrawalCause.DELETED,
        eviction: str = "",
    ) -> list[Artifact]:
        """Delete the artifacts of one namespace that are unchanged, and return them. With an actor,
        write to the audit log and, unless there is a reason for an eviction, record withdrawals.
        Without an actor, the artifacts have lost their blobs. The blobs are marked, for `collect`.
        """
        if not rows:
            return []
        digests = [row.digest for row in rows]
        async with self.database.writing() as connection:
            await share_blobs(connection, digests)
            gone, metadata_bytes = await delete_artifacts(connection, rows)
            if gone:
                digests = [row.digest for row in gone]
                change = UsageChange(
                    artifacts=-len(gone),
                    size_bytes=-sum(digest.size_bytes for digest in digests),
                    metadata_bytes=-metadata_bytes,
                )
                await add_usage(connection, gone[0].key.namespace, change)
                await drop_reports(connection, [row.key for row in gone])
                await add_deletions(connection, digests)
            if gone and actor is None:
                await drop_absences(connection, digests)
                await record_healing(connection, self.plausible_clock())
            if gone and actor is not None:
                now = self.clock()
                action = AuditAction.EVICT if eviction else AuditAction.DELETE
                records = [
                    AuditRecord.of_artifact(
                        now, actor, action, row.key, f"{eviction} {row.digest}".lstrip()
                    )
                    for row in gone
                ]
                await add_audit(connection, records)
                withdrawn = [] if eviction else [(row.key, row.digest) for row in gone]
                await add_withdrawals(connection, withdrawn, cause=cause, now=now)
        for row in rows:
            self.forget(row.key)
        return gone


def _pages_by_namespace(rows: Sequence[Artifact]) -> Iterator[list[Artifact]]:
    """Yield pages for one transaction each, which changes the counters of one namespace."""
    of_namespaces: dict[str, list[Artifact]] = {}
    for row in rows:
        of_namespaces.setdefault(row.key.namespace, []).append(row)
    for of_namespace in of_namespaces.values():
        for start in range(0, len(of_namespace), _DELETION_PAGE):
            yield of_namespace[start : start + _DELETION_PAGE]
