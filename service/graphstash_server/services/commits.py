"""Committer: makes stored blobs visible as artifacts, many in one transaction.

A commit waits for the disk. Uploads that end while one is under way share the next one; alone, an
upload waits for nobody.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import AuditAction, Digest, ErrorCode, NamespacePolicy, WriteMode
from graphstash_server.actor import Actor
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.notifications import notify
from graphstash_server.db.queries.artifacts import (
    find_stored,
    insert_artifact,
    replace_artifact,
)
from graphstash_server.db.queries.audit import AuditRecord, add_audit
from graphstash_server.db.queries.deletions import add_deletions, claimed_digests
from graphstash_server.db.queries.leases import end_leases
from graphstash_server.db.queries.locks import share_blobs
from graphstash_server.db.queries.usage import UsageChange, add_usage
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.services.waiting import Wake
from graphstash_server.storage import BlobStore

__all__ = ["Commit", "Committer", "Upload", "withheld"]

_MOST = 64
"""Uploads of one transaction: a few milliseconds of work beside one wait for the disk."""


@dataclass(frozen=True, slots=True)
class Upload:
    """What a publisher announces before the first byte.

    Attributes:
        key: where the artifact will be found.
        digest: what the bytes will be.
        metadata_header: kept as it came, and given back with every hit.
        compile_seconds: what a hit will save.
        toolchain: what compiled it; empty when it is not known.
        only_if_absent: refuse even the same bytes when the key has some (`If-None-Match: *`).
        actor: who publishes it.
        policy: the rules of the namespace.
    """

    key: StoredKey
    digest: Digest
    metadata_header: str
    compile_seconds: float
    toolchain: str
    only_if_absent: bool
    actor: Actor
    policy: NamespacePolicy

    @property
    def replaces(self) -> bool:
        """Whether it takes the place of an artifact with other bytes."""
        return self.policy.mode is WriteMode.OVERWRITE and not self.only_if_absent


class Commit(NamedTuple):
    """What became of an upload.

    Attributes:
        stays: of the artifact that was faster and stays; None when this one was stored.
        replaced: of the artifact whose place this one took.
    """

    stays: Digest | None = None
    replaced: Digest | None = None


class _Again(Enum):
    """A mark: another artifact is in the way than was seen before its blob was locked."""

    AGAIN = "again"


_Outcome: TypeAlias = Commit | Exception | _Again

_Waiting: TypeAlias = "tuple[Upload, asyncio.Future[Commit]]"


class Committer:
    """Used from the event loop only."""

    def __init__(self, *, database: Database, blobs: BlobStore, clock: Clock) -> None:
        self._database = database
        self._blobs = blobs
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def commit(self, upload: Upload) -> Commit:
        """Makes an artifact visible, counts it and ends its lease, all at once.

        Raises:
            ServerError: 503, 507 or 409; nothing was stored.
        """
        future: asyncio.Future[Commit] = asyncio.get_running_loop().create_future()
        self._waiting.append((upload, future))
        if self._task is None:
            self._task = asyncio.create_task(self._commit_waiting())
        return await future

    async def _commit_waiting(self) -> None:
        """Runs until nobody waits; an outermost frame, so every failure goes to its upload."""
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                batch.sort(key=lambda waiting: waiting[0].key.columns)
                await self._answer(batch)
        finally:
            self._task = None

    async def _answer(self, batch: "Sequence[_Waiting]") -> None:
        try:
            outcomes = await self._commit_all([upload for upload, _ in batch])
        except Exception as error:  # noqa: BLE001 - see above
            outcomes = [error] * len(batch)
        for (upload, future), outcome in zip(batch, outcomes, strict=True):
            if future.done():
                continue  # its caller was cancelled
            if isinstance(outcome, _Again):
                self._waiting.append((upload, future))
            elif isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    async def _commit_all(self, uploads: Sequence[Upload]) -> list[_Outcome]:
        """One transaction; what an upload does wrong by itself is its own outcome."""
        now = self._clock()
        changes: dict[str, UsageChange] = {}
        stored: list[tuple[Upload, Digest | None]] = []
        outcomes: list[_Outcome] = []
        digests = [upload.digest for upload in uploads]
        async with self._database.writing() as connection:
            # All locks at once: two transactions that take them in two steps could wait for each
            # other.
            locked = {*digests, *await _in_the_way(connection, uploads)}
            await share_blobs(connection, list(locked))
            claimed = await claimed_digests(connection, digests, now=now)
            sizes = await asyncio.gather(*(self._blobs.stat(digest) for digest in digests))
            for upload, size_bytes in zip(uploads, sizes, strict=True):
                outcome: _Outcome = _deleted_meanwhile()
                is_there = size_bytes == upload.digest.size_bytes
                if is_there and upload.digest.sha256 not in claimed:
                    outcome = await _store(connection, upload, now, locked=locked)
                if isinstance(outcome, Commit) and outcome.stays is None:
                    stored.append((upload, outcome.replaced))
                    before = changes.get(upload.key.namespace, UsageChange())
                    changes[upload.key.namespace] = before.plus(_change(upload, outcome.replaced))
                outcomes.append(outcome)
            for namespace, change in sorted(changes.items()):
                await add_usage(connection, namespace, change)
            if stored:
                await end_leases(connection, [upload.key for upload, _ in stored], now=now)
                news = [Wake.ready(upload.key, upload.digest).payload for upload, _ in stored]
                await notify(connection, news)
                gone = [digest for _, digest in stored if digest is not None]
                await add_deletions(connection, gone)
                await add_audit(connection, [_record(*each, now) for each in stored])
        return outcomes


async def _in_the_way(connection: AsyncConnection, uploads: Sequence[Upload]) -> list[Digest]:
    """Blobs of artifacts that uploads will replace, as far as that can be seen yet."""
    rows = [await find_stored(connection, upload.key) for upload in uploads if upload.replaces]
    return [row.digest for row in rows if row is not None]


async def _store(
    connection: AsyncConnection, upload: Upload, now: datetime, *, locked: Collection[Digest]
) -> _Outcome:
    """Goes round when the artifact that was in the way is not there at the second look.

    The blob of an artifact that is replaced is marked, which needs its lock, as everywhere.
    """
    artifact: dict[str, Any] = {
        "key": upload.key,
        "digest": upload.digest,
        "metadata_header": upload.metadata_header,
        "compile_seconds": upload.compile_seconds,
        "toolchain": upload.toolchain,
        "now": now,
    }
    while True:
        if await insert_artifact(connection, **artifact):
            return Commit()
        existing = await find_stored(connection, upload.key)
        if existing is None:
            continue
        if existing.withheld_at is not None:
            return withheld(upload, existing.digest)
        if existing.digest == upload.digest or not upload.replaces:
            return Commit(stays=existing.digest)
        if existing.digest not in locked:
            return _Again.AGAIN
        if await replace_artifact(connection, replaces=existing.digest, **artifact):
            return Commit(replaced=existing.digest)


def _change(upload: Upload, replaced: Digest | None) -> UsageChange:
    if replaced is None:
        return UsageChange(artifacts=1, puts=1, size_bytes=upload.digest.size_bytes)
    return UsageChange(puts=1, size_bytes=upload.digest.size_bytes - replaced.size_bytes)


def _record(upload: Upload, replaced: Digest | None, now: datetime) -> AuditRecord:
    action = AuditAction.PUT if replaced is None else AuditAction.OVERWRITE
    return AuditRecord.of_artifact(now, upload.actor, action, upload.key, upload.digest)


def withheld(upload: Upload, stays: Digest) -> ServerError:
    """Refuses an upload to a key whose artifact waits for an admin."""
    return ServerError(
        ErrorCode.WITHHELD,
        f"{upload.key.key} is withheld: the artifact with the digest {stays} was reported as "
        "wrong; an admin has to release or delete it first (graphstash quarantine)",
        digest=stays,
        given_digest=upload.digest,
    )


def _deleted_meanwhile() -> ServerError:
    return ServerError(
        ErrorCode.UNAVAILABLE,
        "the same bytes were deleted while they were uploaded: nothing was stored, send the "
        "artifact again",
    )
