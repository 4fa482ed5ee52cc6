"""ArtifactService: finds, opens and deletes artifacts, and drops those that lost their blob."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from graphstash_schema import AuditAction, Digest, Namespace, VerifyResponse
from graphstash_schema.protocol import LOOKUP_PIN_SECONDS, MAX_MANIFEST_ENTRIES
from graphstash_server.actor import Actor
from graphstash_server.artifact import Artifact
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import (
    FoundArtifacts,
    delete_artifact,
    find_artifact,
    find_artifact_now,
    find_artifacts,
    find_stored,
    note_look_up,
)
from graphstash_server.db.queries.audit import AuditRecord, add_audit
from graphstash_server.db.queries.deletions import add_deletions
from graphstash_server.db.queries.locks import share_blobs
from graphstash_server.db.queries.reports import drop_report
from graphstash_server.db.queries.usage import UsageChange, add_usage
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.logs import in_background
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.artifacts.blobs import BlobCollector
from graphstash_server.services.buckets import Buckets
from graphstash_server.storage import SMALL_BYTES, BlobReader, BlobStore, FileReader

__all__ = ["ArtifactService", "OpenArtifact", "RecentRows"]

_MAX_ROWS = 1024
"""At most 16 MiB: a row is as large as its metadata header, up to 16 KiB."""

_NO_AGE = timedelta(0)
_MAX_AGE = timedelta(seconds=2)


@dataclass(kw_only=True, eq=False)
class RecentRows:
    """The rows of artifacts that were served a moment ago, so that a hot hit needs no query. The
    least recently used row goes first.

    Why this can never serve wrong bytes: the bytes are opened by the row's digest, and their size
    is compared on every hit. Only the row as a whole can be stale: it was deleted, withheld, or
    replaced where the namespace's policy allows that. When this process does it, it drops the row
    here first. When another one does, the blob is mostly gone, too (opening it fails, and the
    database is queried); where it is not (the artifact is withheld, an equal one has the blob, a
    disk tier keeps a copy), the old artifact is served for at most two seconds (`_MAX_AGE`).
    """

    clock: Clock

    def __post_init__(self) -> None:
        self._rows: OrderedDict[StoredKey, tuple[datetime, Artifact | None]] = OrderedDict()

    def get(self, key: StoredKey) -> Artifact | None:
        """The row, unless it is absent or too old."""
        kept = self._rows.get(key)
        if kept is None:
            return None
        since, row = kept
        if not _NO_AGE <= self.clock() - since <= _MAX_AGE:
            del self._rows[key]
            return None
        self._rows.move_to_end(key)
        return row

    def add(self, row: Artifact, *, read_at: datetime) -> None:
        """Keeps a row that was read at a time, unless it was dropped or read again since."""
        since, kept = self._rows.get(row.key, (read_at, row))
        if since > read_at or (kept is None and since == read_at):
            return
        self._keep(row.key, read_at, row)

    def drop(self, key: StoredKey) -> None:
        """Forgets a row that has changed; one that is being read now may be the old one."""
        self._keep(key, self.clock(), None)

    def drop_used(self, keys: Iterable[StoredKey]) -> None:
        """Forgets those of these rows that are kept: their hits have changed."""
        for key in keys:
            if key in self._rows:
                self.drop(key)

    def _keep(self, key: StoredKey, at: datetime, row: Artifact | None) -> None:
        self._rows[key] = (at, row)
        self._rows.move_to_end(key)
        if len(self._rows) > _MAX_ROWS:
            self._rows.popitem(last=False)


_LOGGER = logging.getLogger(__name__)

_PIN = timedelta(seconds=LOOKUP_PIN_SECONDS)

_MAX_PROTECTED_OF_CALLER = 2 * MAX_MANIFEST_ENTRIES
_MAX_PROTECTED = 4 * _MAX_PROTECTED_OF_CALLER
"""Artifacts of a namespace that look-ups protect at a time, in this process: those of two large
jobs of each caller, and of four such callers."""

_MAX_VERIFIED = 2
"""Blobs that are verified at a time: a request of a few bytes makes the server read gigabytes."""

_LOOKS = 3
"""Tries at an artifact whose blob is gone because it was replaced a moment ago."""


@dataclass(frozen=True, slots=True)
class OpenArtifact:
    """An artifact whose bytes stay readable, whatever happens to it; the caller closes `reader`."""

    row: Artifact
    reader: BlobReader


@dataclass(kw_only=True, eq=False)
class ArtifactService:
    """Everything but uploads (`UploadService`)."""

    database: Database
    blobs: BlobStore
    collector: BlobCollector
    accounting: Accounting
    clock: Clock

    def __post_init__(self) -> None:
        self._recent = RecentRows(clock=self.clock)
        self.accounting.when_written = self._recent.drop_used
        self._protected = Buckets()
        self._verifying: dict[Digest, asyncio.Task[bool | None]] = {}
        self._verifiers = asyncio.Semaphore(_MAX_VERIFIED)

    async def open(self, key: StoredKey) -> OpenArtifact | None:
        """Opens an artifact for reading; None when it is absent or was healed away."""
        row = self._recent.get(key)
        if row is not None:
            reader = await self._open_whole(row.digest)
            if reader is not None:
                return OpenArtifact(row, reader)
            self._recent.drop(key)
        for _ in range(_LOOKS):
            row = await self._read(key)
            if row is None:
                return None
            reader = await self._open_whole(row.digest)
            if reader is not None:
                return OpenArtifact(row, reader)
            if await self.heal(row):
                return None
        return None

    def find_now(self, key: StoredKey) -> Sequence[Artifact] | None:
        """An artifact's row without waiting, whether its blob is there or not: none or one; None
        when it has to be waited for.
        """
        row = self._recent.get(key)
        if row is not None:
            return (row,)
        read_at = self.clock()
        found = find_artifact_now(self.database, key)
        for row in found or ():
            self._recent.add(row, read_at=read_at)
        return found

    def read_now(self, row: Artifact) -> bytearray | None:
        """All bytes of a small artifact, where they are in memory; None otherwise."""
        if row.digest.size_bytes > SMALL_BYTES:
            return None
        return self.blobs.read_now(row.digest)

    def open_now(self, row: Artifact) -> FileReader | None:
        """An artifact's file, where its name is in memory; None otherwise. The caller closes it."""
        file = self.blobs.open_now(row.digest)
        if file is not None and file.size_bytes != row.digest.size_bytes:
            file.close_now()
            return None
        return file

    async def link(self, key: StoredKey) -> tuple[Artifact, str] | None:
        """Where a client can fetch an artifact by itself; None: `open` it, if it is there at all.

        The blob is not checked: a client that does not find it comes back without a redirect.
        """
        row = self._recent.get(key) or await self._read(key)
        url = await self.blobs.link(row.digest) if row is not None else None
        return (row, url) if row is not None and url is not None else None

    async def find(self, key: StoredKey) -> Artifact | None:
        """An artifact whose blob is there; None otherwise."""
        return await self._with_blob(partial(self._read, key))

    async def find_stored(self, key: StoredKey) -> Artifact | None:
        """The same, withheld or not: what an upload would conflict with."""
        return await self._with_blob(partial(find_stored, self.database, key))

    async def verify(self, key: StoredKey) -> VerifyResponse:
        """Reads an artifact's blob and compares its digest; drops the artifact when it is damaged.

        It trusts nothing that the caller says, so everyone who may read may call it.
        """
        row = await self._read(key)
        if row is None:
            return VerifyResponse(found=False, healed=False)
        is_healed = not await self._is_whole(row.digest) and await self.heal(row)
        return VerifyResponse(found=True, healed=is_healed)

    async def read_start(self, row: Artifact, *, most_bytes: int) -> bytes:
        """The first bytes of an artifact's blob; fewer when it is shorter, none when it is lost."""
        reader = await self._open_whole(row.digest)
        if reader is None:
            return b""
        try:
            stop = min(most_bytes, reader.size_bytes)
            return b"".join([chunk async for chunk in reader.chunks(0, stop)])
        finally:
            await reader.close()

    async def _is_whole(self, digest: Digest) -> bool | None:
        """Reads a blob once for all callers that wait for it."""
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
        self, namespace: Namespace, keys: Sequence[StoredKey], *, caller: str
    ) -> FoundArtifacts:
        """Those of many artifacts that exist; most of them are protected from eviction for
        `LOOKUP_PIN_SECONDS` at least.

        Those of one caller, and of one namespace, are protected up to a limit: who only reads must
        not decide what stays. The protection lasts for twice that time, so that a second lookup
        soon after writes nothing. Blobs are not checked: a lost one shows at the GET.
        """
        promised = self.clock() + _PIN
        found = await find_artifacts(self.database, namespace, keys, until=promised)
        loose = found.unprotected
        if loose := loose[: self._allowance(namespace, caller, len(loose))]:
            async with self.database.writing() as connection:
                await note_look_up(connection, loose, until=promised + _PIN)
        return found

    def _allowance(self, namespace: Namespace, caller: str, wanted: int) -> int:
        """How many artifacts a caller's look-up may protect now."""
        for name, most in (
            (f"{namespace} {caller}", _MAX_PROTECTED_OF_CALLER),
            (namespace, _MAX_PROTECTED),
        ):
            per_second = most / (2 * _PIN).total_seconds()
            wanted, _ = self._protected.take(name, wanted, most=most, per_second=per_second)
        return wanted

    async def delete(self, key: StoredKey, *, actor: Actor) -> bool:
        """Removes an artifact, withheld or not, and its blob unless another artifact has it; False
        when it is absent.
        """
        while True:  # it may be replaced in between
            row = await find_stored(self.database, key)
            if row is None:
                self.forget(key)
                return False
            if await self._delete(key, row.digest, actor=actor):
                return True

    async def heal(self, row: Artifact) -> bool:
        """Drops an artifact whose blob is lost or damaged, if it is still the same one; False when
        it is not, or when another server has given the blob a name that was not looked for.

        When the database does not answer, a later request tries again; reads continue.
        """
        try:
            if await self.collector.learn(row.digest):
                return False
            is_dropped = await self._delete(row.key, row.digest, created_at=row.created_at)
        except ServerError as error:
            _LOGGER.warning(
                "could not drop %s, which lost its blob; will retry: %s", row.key.key, error
            )
            return False
        if is_dropped:
            self.accounting.count_healed()
            _LOGGER.warning(
                "dropped %s of %s: its blob %s is lost or damaged; the next job stores it again",
                row.key.key,
                row.key.namespace,
                row.digest,
            )
        return is_dropped

    def remember(self, row: Artifact) -> None:
        """Serves an artifact that this process has just stored without a query: many may be waiting
        for it.
        """
        self._recent.add(row, read_at=row.created_at)

    def forget(self, key: StoredKey) -> None:
        """Makes the next request query the database: the artifact has changed."""
        self._recent.drop(key)

    async def _read(self, key: StoredKey) -> Artifact | None:
        read_at = self.clock()
        row = await find_artifact(self.database, key)
        if row is not None:
            self._recent.add(row, read_at=read_at)
        return row

    async def _open_whole(self, digest: Digest) -> BlobReader | None:
        """Opens a blob; None when it is lost or has another size."""
        reader = await self.blobs.open(digest)
        if reader is None or reader.size_bytes == digest.size_bytes:
            return reader
        await reader.close()
        return None

    async def _with_blob(self, read: Callable[[], Awaitable[Artifact | None]]) -> Artifact | None:
        for _ in range(_LOOKS):
            row = await read()
            if row is None or await self.blobs.stat(row.digest) == row.digest.size_bytes:
                return row
            if await self.heal(row):
                return None
        return None

    async def _delete(
        self,
        key: StoredKey,
        digest: Digest,
        *,
        actor: Actor | None = None,
        created_at: datetime | None = None,
    ) -> bool:
        """Removes an artifact if it is unchanged; logged in the audit log when it has an actor."""
        async with self.database.writing() as connection:
            await share_blobs(connection, [digest])
            freed_bytes = await delete_artifact(
                connection, key, digest=digest, created_at=created_at
            )
            is_gone = freed_bytes is not None
            if freed_bytes is not None:
                change = UsageChange(
                    artifacts=-1, size_bytes=-digest.size_bytes, metadata_bytes=-freed_bytes
                )
                await add_usage(connection, key.namespace, change)
                await drop_report(connection, key)
                await add_deletions(connection, [digest])
            if is_gone and actor is not None:
                record = AuditRecord.of_artifact(
                    self.clock(), actor, AuditAction.DELETE, key, digest
                )
                await add_audit(connection, [record])
        self.forget(key)
        if is_gone:
            await self.collector.collect(digest, only_marked=True)
        return is_gone
