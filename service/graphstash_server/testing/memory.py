"""MemoryBlobStore: a `BlobStore` in memory, with the contract of the real stores."""

from collections.abc import AsyncIterator
from datetime import datetime
from io import BytesIO
from pathlib import Path

from graphstash_schema import Digest
from graphstash_server.clock import system_clock
from graphstash_server.errors import NoSpaceError, ShortBlobError
from graphstash_server.storage import BlobReader, BlobStore
from graphstash_server.storage.upload import Incoming

__all__ = ["MemoryBlobStore"]


class MemoryBlobStore(BlobStore):
    """Stores blobs in memory.

    Attributes:
        blobs: bytes by SHA-256. Tests may change them.
        capacity_bytes: maximum size of all blobs together. None: no limit.
    """

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        self.blobs: dict[str, bytes] = {}
        self.capacity_bytes = capacity_bytes
        self._incoming_bytes = 0
        self._stored_at: dict[str, datetime] = {}

    async def put(self, digest: Digest, chunks: AsyncIterator[bytes]) -> None:
        incoming, taken = Incoming(digest), BytesIO()
        try:
            async for chunk in chunks:
                if (refusal := await self.full(len(chunk))) is not None:
                    raise refusal
                incoming.take([chunk], write=taken.write)
                self._incoming_bytes += len(chunk)
            incoming.finish()
        finally:
            self._incoming_bytes -= taken.tell()
        self.blobs[digest.sha256] = taken.getvalue()
        self._stored_at[digest.sha256] = system_clock()

    async def full(self, size_bytes: int) -> NoSpaceError | None:
        if self.capacity_bytes is None:
            return None
        used_bytes = sum(map(len, self.blobs.values())) + self._incoming_bytes
        room_bytes = self.capacity_bytes - used_bytes
        if size_bytes <= room_bytes:
            return None
        return NoSpaceError(
            f"{size_bytes} bytes do not fit into {room_bytes}",
            limit=room_bytes,
            missing_bytes=size_bytes - room_bytes,
        )

    async def open(self, digest: Digest) -> BlobReader | None:
        blob = self.blobs.get(digest.sha256)
        return _MemoryReader(blob) if blob is not None else None

    async def stat(self, digest: Digest, *, is_newest: bool = False) -> int | None:
        blob = self.blobs.get(digest.sha256)
        return len(blob) if blob is not None else None

    async def delete(self, digest: Digest, *, generation: int = 0) -> bool:
        self.blobs.pop(digest.sha256, None)
        return True

    async def list(self, *, before: datetime | None = None) -> AsyncIterator[Digest]:
        for sha256, blob in sorted(self.blobs.items()):
            if before is None or self._stored_at[sha256] < before:
                yield Digest(sha256, len(blob))


class _MemoryReader:
    path: Path | None = None

    def __init__(self, blob: bytes) -> None:
        self._blob = blob
        self.size_bytes = len(blob)

    async def chunks(self, start: int, stop: int) -> AsyncIterator[bytes]:
        if stop > len(self._blob):
            raise ShortBlobError(f"the blob ends at {len(self._blob)}, not {stop}")
        if start < stop:
            yield self._blob[start:stop]

    async def close(self) -> None:
        return
