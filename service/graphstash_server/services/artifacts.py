"""ArtifactService: finds, opens and deletes artifacts, and drops those that lost their blob."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeAlias

from graphstash_schema import AuditAction, Digest, Namespace, VerifyResponse
from graphstash_schema.protocol import LOOKUP_PIN_SECONDS
from graphstash_server.actor import Actor
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import (
    ArtifactRow,
    delete_artifact,
    find_artifact,
    find_artifacts,
    find_stored,
)
from graphstash_server.db.queries.audit import AuditRecord, add_audit
from graphstash_server.db.queries.deletions import add_deletions
from graphstash_server.db.queries.keeping import pin_artifacts
from graphstash_server.db.queries.locks import share_blobs
from graphstash_server.db.queries.reports import drop_report
from graphstash_server.db.queries.usage import UsageChange, add_usage
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.blobs import BlobKeeper
from graphstash_server.services.recent import RecentRows
from graphstash_server.storage import BlobReader, BlobStore

__all__ = ["ArtifactService", "OpenArtifact", "StoredArtifact"]

_LOGGER = logging.getLogger(__name__)

_PIN = timedelta(seconds=LOOKUP_PIN_SECONDS)

_MOST_VERIFIED = 2
"""Blobs that are read at a time because somebody asked for it: whoever may read may ask, with a few
bytes for gigabytes."""

_LOOKS = 3
"""At an artifact whose blob is gone because another one took its place a moment ago."""

StoredArtifact: TypeAlias = ArtifactRow
"""What a service tells about an artifact."""


@dataclass(frozen=True, slots=True)
class OpenArtifact:
    """An artifact whose bytes can be read to their end, whatever happens to it meanwhile.

    Whoever got it closes `reader`.
    """

    row: ArtifactRow
    reader: BlobReader


class ArtifactService:
    """Everything but uploads (`UploadService`). Used from the event loop only."""

    def __init__(
        self,
        *,
        database: Database,
        blobs: BlobStore,
        keeper: BlobKeeper,
        accounting: Accounting,
        clock: Clock,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._keeper = keeper
        self._accounting = accounting
        self._clock = clock
        self._recent = RecentRows(clock=clock)
        self._verifying: dict[Digest, asyncio.Task[bool | None]] = {}
        self._verifiers = asyncio.Semaphore(_MOST_VERIFIED)

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

    async def link(self, key: StoredKey) -> tuple[ArtifactRow, str] | None:
        """Where a client can fetch an artifact by itself; None: `open` it, if it is there at all.

        The blob is not looked at: a client that does not find it comes back without this way.
        """
        row = self._recent.get(key) or await self._read(key)
        url = await self._blobs.link(row.digest) if row is not None else None
        return (row, url) if row is not None and url is not None else None

    async def find(self, key: StoredKey) -> ArtifactRow | None:
        """What is known about an artifact whose blob is there; None otherwise."""
        for _ in range(_LOOKS):
            row = await self._read(key)
            if row is None or await self._is_there(row):
                return row
            if await self.heal(row):
                return None
        return None

    async def find_stored(self, key: StoredKey) -> ArtifactRow | None:
        """The same, of an artifact that may be withheld: what an upload finds in its way."""
        for _ in range(_LOOKS):
            async with self._database.reading() as connection:
                row = await find_stored(connection, key)
            if row is None or await self._is_there(row):
                return row
            if await self.heal(row):
                return None
        return None

    async def verify(self, key: StoredKey) -> VerifyResponse:
        """Reads an artifact's blob and compares its digest; drops the artifact when it is damaged.

        Nothing is taken on the caller's word, so anybody may ask.

        Raises:
            ServerError: 503.
        """
        row = await self._read(key)
        if row is None:
            return VerifyResponse(found=False, healed=False)
        is_healed = not await self._is_whole(row.digest)
        if is_healed:
            await self.heal(row)
        return VerifyResponse(found=True, healed=is_healed)

    async def _is_whole(self, digest: Digest) -> bool | None:
        """Reads a blob once for all who ask meanwhile."""
        verifying = self._verifying.get(digest)
        if verifying is None:
            verifying = asyncio.create_task(self._read_whole(digest))
            self._verifying[digest] = verifying
            verifying.add_done_callback(lambda _: self._verifying.pop(digest))
        return await asyncio.shield(verifying)

    async def _read_whole(self, digest: Digest) -> bool | None:
        async with self._verifiers:
            return await self._keeper.is_whole(digest)

    async def lookup(
        self, namespace: Namespace, keys: Sequence[StoredKey]
    ) -> dict[StoredKey, Digest]:
        """Those of many artifacts that exist; they are pinned for `LOOKUP_PIN_SECONDS` at least.

        A pin lasts for twice that time, so that asking again soon writes nothing. Blobs are not
        looked at: a lost one shows at the GET.
        """
        async with self._database.reading() as connection:
            found = await find_artifacts(connection, namespace, keys)
        promised = self._clock() + _PIN
        loose = [
            key
            for key, artifact in found.items()
            if artifact.pinned_until is None or artifact.pinned_until < promised
        ]
        if loose:
            async with self._database.writing() as connection:
                await pin_artifacts(connection, loose, until=promised + _PIN)
        return {key: artifact.digest for key, artifact in found.items()}

    async def delete(self, key: StoredKey, *, actor: Actor) -> bool:
        """Removes an artifact, be it withheld, and its blob unless another artifact has it; False
        when it is absent.

        Raises:
            ServerError: 503.
        """
        while True:  # another one may take its place meanwhile
            async with self._database.reading() as connection:
                row = await find_stored(connection, key)
            if row is None:
                self.forget(key)
                return False
            if await self._delete(key, row.digest, actor=actor):
                return True

    async def heal(self, row: ArtifactRow) -> bool:
        """Drops an artifact whose blob is lost or damaged, if it is still the same one; False when
        it is not.

        When the database cannot do it now, a later request tries again: reading goes on.
        """
        try:
            is_dropped = await self._delete(row.key, row.digest, created_at=row.created_at)
        except ServerError as error:
            _LOGGER.warning("%s lost its blob and cannot be dropped now: %s", row.key.key, error)
            return False
        if is_dropped:
            self._accounting.count_healed()
        return is_dropped

    def forget(self, key: StoredKey) -> None:
        """Lets the next request ask the database: the artifact is not what it was."""
        self._recent.drop(key)

    async def _read(self, key: StoredKey) -> ArtifactRow | None:
        read_at = self._clock()
        async with self._database.reading() as connection:
            row = await find_artifact(connection, key)
        if row is not None:
            self._recent.add(row, read_at=read_at)
        return row

    async def _open_whole(self, digest: Digest) -> BlobReader | None:
        """Opens a blob; None when it is lost or has another size."""
        reader = await self._blobs.open(digest)
        if reader is None or reader.size_bytes == digest.size_bytes:
            return reader
        await reader.close()
        return None

    async def _is_there(self, row: ArtifactRow) -> bool:
        return await self._blobs.stat(row.digest) == row.digest.size_bytes

    async def _delete(
        self,
        key: StoredKey,
        digest: Digest,
        *,
        actor: Actor | None = None,
        created_at: datetime | None = None,
    ) -> bool:
        """Removes what is still as it was found; written down when somebody wanted it."""
        async with self._database.writing() as connection:
            await share_blobs(connection, [digest])
            is_gone = await delete_artifact(connection, key, digest=digest, created_at=created_at)
            if is_gone:
                change = UsageChange(artifacts=-1, size_bytes=-digest.size_bytes)
                await add_usage(connection, key.namespace, change)
                await drop_report(connection, key)
                await add_deletions(connection, [digest])
            if is_gone and actor is not None:
                record = AuditRecord.of_artifact(
                    self._clock(), actor, AuditAction.DELETE, key, digest
                )
                await add_audit(connection, [record])
        self.forget(key)
        if is_gone:
            await self._keeper.collect(digest, only_marked=True)
        return is_gone
