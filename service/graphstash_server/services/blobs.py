"""BlobKeeper: deletes a blob exactly when no artifact needs it, whatever else goes on.

Two artifacts may share a blob, an upload may bring a blob while the last artifact that had it is
deleted, and another server may do any of this at the same time. The rules:

- A row is committed only in a transaction that saw the blob (`services.uploads`).
- A blob is deleted only inside a transaction that saw that no row has it; while it is open no row
  can be committed, in any process.
- A blob that this process is uploading is left to the upload, which looks again when it ends.

So a committed row always has its blob. The one thing that can go wrong is that an upload finds the
blob it stored deleted by another process; it is refused with 503 then: nothing was acknowledged.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from graphstash_schema import Digest
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import is_blob_used
from graphstash_server.storage import BlobStore

__all__ = ["BlobKeeper"]


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

    async def collect(self, digest: Digest) -> bool:
        """Deletes a blob if no artifact has it and no upload brings it.

        Returns:
            Whether a blob was deleted.
        """
        if digest.sha256 in self._uploading:
            return False
        async with self._database.writing() as connection:
            if await is_blob_used(connection, digest) or digest.sha256 in self._uploading:
                return False
            await self._blobs.delete(digest)
        return True
