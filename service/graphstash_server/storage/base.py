"""BlobStore: what every store of bytes can do, and what it promises.

`graphstash_server.testing.BlobStoreContract` is the test suite of these promises.
"""

from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Protocol

from graphstash_schema import Digest

__all__ = ["CHUNK_BYTES", "BlobReader", "BlobStore"]

CHUNK_BYTES = 1024**2
"""How many bytes are read or written at a time: a thread hop costs about as much as copying
64 KiB, and at 1 MiB it no longer shows."""


class BlobReader(Protocol):
    """An open blob: its bytes stay readable until it is closed, even when it is deleted meanwhile.

    Attributes:
        size_bytes: how many bytes the store has, which the caller compares with the digest.
        path: the local file that holds exactly these bytes, where there is one.
    """

    @property
    def size_bytes(self) -> int:
        """See above."""
        ...

    @property
    def path(self) -> Path | None:
        """See above."""
        ...

    def chunks(self, start: int, stop: int) -> AsyncIterator[bytes]:
        """The bytes from `start` (inclusive) to `stop` (exclusive).

        Raises:
            ShortBlobError: when the blob ends before `stop`.
        """
        ...

    async def close(self) -> None:
        """Lets go of the blob; more than once does no harm."""
        ...


class BlobStore(Protocol):
    """Keeps immutable blobs under their digests. Safe for concurrent calls.

    Every call raises `ServerError` with `unavailable` when the store does not answer; absent means
    that the store answered and has no such blob.
    """

    async def put(self, digest: Digest, chunks: AsyncIterator[bytes]) -> None:
        """Stores the bytes; after the return they survive a crash of the host.

        Room is made sure of before the first chunk is asked for. The chunks are always read and
        always checked, so that nobody can claim a blob that they do not have. A failed put leaves
        nothing behind, and nobody ever sees half a blob. Putting a blob again mends a damaged one.

        Raises:
            NoSpaceError: when there is no room.
            LengthMismatchError: when the chunks have another length than the digest says.
            DigestMismatchError: when the chunks have another digest.
        """
        ...

    async def open(self, digest: Digest) -> BlobReader | None:
        """Opens a blob; None when it is absent."""
        ...

    async def stat(self, digest: Digest) -> int | None:
        """The size in bytes of what is stored, which may be damaged; None when it is absent."""
        ...

    async def delete(self, digest: Digest) -> None:
        """Forgets a blob; one that is absent is no error."""
        ...

    async def forget_copy(self, digest: Digest) -> None:
        """Drops what is kept nearer than the durable bytes, so that the next read reads these."""
        ...

    async def link(self, digest: Digest) -> str | None:
        """A URL where a client that holds no credentials can fetch the blob for some minutes; None
        when the store has none for it, or when it is too small to be worth a redirect. Whether the
        blob is there is not looked at.
        """
        ...

    def list(self, *, before: datetime | None = None) -> AsyncIterator[Digest]:
        """All blobs in ascending order of their SHA-256.

        Args:
            before: leave out what was stored at this time or later; an aware time.
        """
        ...
