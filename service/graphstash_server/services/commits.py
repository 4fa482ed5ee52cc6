"""Committer: makes stored blobs visible as artifacts, many in one transaction.

A commit waits for the disk. Uploads that end while one is under way share the next one; alone, an
upload waits for nobody.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Digest, ErrorCode
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.notifications import notify
from graphstash_server.db.queries.artifacts import find_artifact, insert_artifact
from graphstash_server.db.queries.deletions import claimed_digests
from graphstash_server.db.queries.leases import end_leases
from graphstash_server.db.queries.locks import share_blobs
from graphstash_server.db.queries.usage import UsageChange, add_usage
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.services.waiting import Wake
from graphstash_server.storage import BlobStore

__all__ = ["Committer", "Upload"]

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
    """

    key: StoredKey
    digest: Digest
    metadata_header: str
    compile_seconds: float
    toolchain: str
    only_if_absent: bool


_Outcome: TypeAlias = Digest | Exception | None
"""The digest of the artifact that was faster, a failure, or None when this one was stored."""

_Waiting: TypeAlias = "tuple[Upload, asyncio.Future[Digest | None]]"


class Committer:
    """Used from the event loop only."""

    def __init__(self, *, database: Database, blobs: BlobStore, clock: Clock) -> None:
        self._database = database
        self._blobs = blobs
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def commit(self, upload: Upload) -> Digest | None:
        """Makes an artifact visible, counts it and ends its lease, all at once.

        Returns:
            The digest of the artifact that was faster; None when this one was stored.

        Raises:
            ServerError: 503 or 507; nothing was stored.
        """
        future: asyncio.Future[Digest | None] = asyncio.get_running_loop().create_future()
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
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if future.done():
                continue  # its caller was cancelled
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    async def _commit_all(self, uploads: Sequence[Upload]) -> list[_Outcome]:
        """One transaction; what an upload does wrong by itself is its own outcome."""
        now = self._clock()
        changes: dict[str, UsageChange] = {}
        stored: list[Upload] = []
        outcomes: list[_Outcome] = []
        async with self._database.writing() as connection:
            await share_blobs(connection, [upload.digest for upload in uploads])
            digests = [upload.digest for upload in uploads]
            claimed = await claimed_digests(connection, digests, now=now)
            sizes = await asyncio.gather(*(self._blobs.stat(digest) for digest in digests))
            for upload, size_bytes in zip(uploads, sizes, strict=True):
                outcome: _Outcome = _deleted_meanwhile()
                is_there = size_bytes == upload.digest.size_bytes
                if is_there and upload.digest.sha256 not in claimed:
                    outcome = await _insert(connection, upload, now)
                if outcome is None:
                    stored.append(upload)
                    change = UsageChange(artifacts=1, puts=1, size_bytes=upload.digest.size_bytes)
                    before = changes.get(upload.key.namespace, UsageChange())
                    changes[upload.key.namespace] = before.plus(change)
                outcomes.append(outcome)
            for namespace, change in sorted(changes.items()):
                await add_usage(connection, namespace, change)
            if stored:
                await end_leases(connection, [upload.key for upload in stored], now=now)
                news = [Wake.ready(upload.key, upload.digest).payload for upload in stored]
                await notify(connection, news)
        return outcomes


async def _insert(connection: AsyncConnection, upload: Upload, now: datetime) -> _Outcome:
    """Goes round when the artifact that was in the way is gone at the second look."""
    while True:
        is_new = await insert_artifact(
            connection,
            key=upload.key,
            digest=upload.digest,
            metadata_header=upload.metadata_header,
            compile_seconds=upload.compile_seconds,
            toolchain=upload.toolchain,
            now=now,
        )
        if is_new:
            return None
        existing = await find_artifact(connection, upload.key)
        if existing is not None:
            return existing.digest


def _deleted_meanwhile() -> ServerError:
    return ServerError(
        ErrorCode.UNAVAILABLE,
        "the same bytes were deleted while they were uploaded: nothing was stored, send the "
        "artifact again",
    )
