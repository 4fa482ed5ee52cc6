"""BlobKeeper: deletes a blob exactly when no artifact needs it, whatever else goes on.

Two artifacts may share a blob, an upload may bring a blob while the last artifact that had it is
deleted, and another server may do any of this at the same time. The rules:

- An artifact is removed in three phases: its row goes and its blob is marked (`deletions`), in one
  transaction; the blob is deleted; the mark goes. A server may die between any two of them: the
  mark stays, and any server goes on.
- A row is committed only in a transaction that shares the blob's lock and saw the blob
  (`services.commits`).
- A blob is deleted only inside a transaction that has the blob's lock for itself and saw that no
  row has it.
- A blob that this process is uploading is left to the upload, which looks again when it ends. An
  upload of a blob that is marked takes the mark off first.

So a committed row always has its blob. The one thing that can go wrong is that an upload finds the
blob it stored deleted by another process; it is refused with 503 then: nothing was acknowledged.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from graphstash_schema import Digest, DigestHasher
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import is_blob_used
from graphstash_server.db.queries.deletions import claim_deletions, drop_deletion, has_deletion
from graphstash_server.db.queries.locks import lock_blob
from graphstash_server.errors import ShortBlobError
from graphstash_server.storage import BlobStore

__all__ = ["BlobKeeper"]

_CLAIM = timedelta(minutes=5)
_CLAIMED = 100


class BlobKeeper:
    """Used from the event loop only."""

    def __init__(self, *, database: Database, blobs: BlobStore) -> None:
        self._database = database
        self._blobs = blobs
        self._uploading: Counter[str] = Counter()
        self._uploading_bytes = 0

    @property
    def uploading_bytes(self) -> int:
        """Announced sizes of the uploads of this process that are under way."""
        return self._uploading_bytes

    @contextmanager
    def uploading(self, digest: Digest) -> Iterator[None]:
        """Keeps a blob from being collected while it is uploaded."""
        self._uploading[digest.sha256] += 1
        self._uploading_bytes += digest.size_bytes
        try:
            yield
        finally:
            self._uploading_bytes -= digest.size_bytes
            self._uploading[digest.sha256] -= 1
            if not self._uploading[digest.sha256]:
                del self._uploading[digest.sha256]

    async def is_whole(self, digest: Digest) -> bool | None:
        """Whether the stored bytes are those of a digest; None when there are none. Reads them all.

        Raises:
            ServerError: 503.
        """
        reader = await self._blobs.open(digest)
        if reader is None:
            return None
        hasher = DigestHasher()
        try:
            async for chunk in reader.chunks(0, digest.size_bytes):
                await asyncio.to_thread(hasher.update, chunk)
        except ShortBlobError:
            return False
        finally:
            await reader.close()
        return reader.size_bytes == digest.size_bytes and hasher.digest() == digest

    async def settle(self, digest: Digest) -> None:
        """Before an upload: takes the mark off a blob, so that what is about to be stored is not
        deleted for an artifact that had it before. Waits for a deletion that is under way.
        """
        async with self._database.reading() as connection:
            if not await has_deletion(connection, digest):
                return
        async with self._database.writing() as connection:
            await lock_blob(connection, digest)
            await drop_deletion(connection, digest)

    async def collect(self, digest: Digest, *, only_marked: bool = False) -> bool:
        """Deletes a blob if no artifact has it and no upload of this process brings it.

        Args:
            digest: which blob.
            only_marked: leave it alone unless it is still marked.

        Returns:
            Whether a blob was deleted.
        """
        if digest.sha256 in self._uploading:
            return False
        async with self._database.writing() as connection:
            await lock_blob(connection, digest)
            is_left = digest.sha256 in self._uploading or (
                only_marked and not await has_deletion(connection, digest)
            )
            if is_left:
                return False
            is_needed = await is_blob_used(connection, digest)
            if not is_needed:
                await self._blobs.delete(digest)
            await drop_deletion(connection, digest)
        return not is_needed

    async def collect_marked(self, *, now: datetime, claimed_too: bool = False) -> int:
        """Deletes every marked blob that no other server is at; says how many.

        Args:
            now: the time.
            claimed_too: also what another server says it is at, which may be dead. Done twice, a
                deletion does no harm.

        Raises:
            ServerError: 503; what is left stays marked.
        """
        deleted = 0
        after = ""
        while True:
            async with self._database.writing() as connection:
                digests = await claim_deletions(
                    connection,
                    after_sha256=after,
                    now=now,
                    keep=_CLAIM,
                    limit=_CLAIMED,
                    claimed_too=claimed_too,
                )
            for digest in digests:
                deleted += await self.collect(digest, only_marked=True)
            if len(digests) < _CLAIMED:
                return deleted
            after = digests[-1].sha256
