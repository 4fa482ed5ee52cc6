"""BlobStore: what every store of bytes can do, and what it promises.

`graphstash_server.testing.BlobStoreContract` is the test suite of these promises.
"""

import logging
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Protocol

from graphstash_schema import Digest
from graphstash_server.errors import NoSpaceError
from graphstash_server.storage.files import CHUNK_BYTES, FileReader

__all__ = ["CHUNK_BYTES", "BlobReader", "BlobStore", "ThrottledLog"]


class BlobReader(Protocol):
    """An open blob: its bytes stay readable until it is closed, even when it is deleted meanwhile.

    Attributes:
        size_bytes: number of stored bytes, which the caller compares with the digest.
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
        """Releases the blob; calling it again does nothing."""
        ...


class BlobStore(Protocol):
    """Keeps immutable blobs under their digests. Safe for concurrent calls.

    Every call raises `ServerError` with `unavailable` when the store does not answer; absent means
    that the store answered and has no such blob. What is not abstract is for a store without local
    files, URLs, or deletions that outlive their calls.
    """

    @abstractmethod
    async def put(self, digest: Digest, chunks: AsyncIterator[bytes]) -> None:
        """Stores the bytes; after the return they survive a crash of the host.

        Room is needed for the bytes that have arrived, and nothing is kept for those to come. The
        chunks are always read and checked, so that no client can claim a blob that it does not
        have. A failed put leaves nothing behind,
        and half a blob is never visible. Putting a blob again repairs a damaged one.

        Raises:
            NoSpaceError: when there is not enough space.
            LengthMismatchError: when the chunks have another length than the digest says.
            DigestMismatchError: when the chunks have another digest.
        """
        ...

    @abstractmethod
    async def full(self, size_bytes: int) -> NoSpaceError | None:
        """Why so many bytes more do not fit now, and how many are missing; None when they do, or
        when deleting blobs would not help.
        """
        ...

    @abstractmethod
    async def open(self, digest: Digest) -> BlobReader | None:
        """Opens a blob; None when it is absent."""
        ...

    def read_now(self, digest: Digest) -> bytearray | None:  # noqa: ARG002
        """All bytes of a blob of at most `SMALL_BYTES`, where that takes no waiting and they have
        the length that the digest says; None says nothing about the blob.
        """
        return None

    def open_now(self, digest: Digest) -> FileReader | None:  # noqa: ARG002
        """Opens a blob that is a local file, where that takes no waiting; None says nothing about
        the blob.
        """
        return None

    @abstractmethod
    async def stat(self, digest: Digest, *, is_newest: bool = False) -> int | None:
        """The size in bytes of what is stored, which may be damaged; None when it is absent. With
        `is_newest` only under the newest name, see `use_generation`.
        """
        ...

    @abstractmethod
    async def delete(self, digest: Digest, *, generation: int = 0) -> None:
        """Deletes a blob under its names up to a generation; an absent one is not an error."""
        ...

    def use_generation(self, digest: Digest, generation: int) -> bool:  # noqa: ARG002
        """Says what generation the name of a blob has: the older names may still be deleted by a
        request that is under way, so the blob is put and looked for under this one. Returns whether
        that is news. A store whose deletions end with their calls needs no other names.
        """
        return False

    @abstractmethod
    async def is_whole(self, digest: Digest) -> bool | None:
        """Whether the durable bytes are those of the digest; None when there are none. Reads all of
        them, see `storage.whole`; a cached copy is dropped.
        """
        ...

    async def link(self, digest: Digest) -> str | None:  # noqa: ARG002
        """A URL where a client that holds no credentials can fetch the blob for some minutes; None
        when the store has none for it, or when the blob is too small to be worth a redirect. The
        URL is no promise that the blob exists.
        """
        return None

    @abstractmethod
    def list(self, *, before: datetime | None = None) -> AsyncIterator[Digest]:
        """All blobs in ascending order of their SHA-256.

        Args:
            before: leave out what was stored at this time or later; an aware time.
        """
        ...


_QUIET_SECONDS = 10.0


class ThrottledLog:
    """Logs warnings, at most one in ten seconds; safe for many threads."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()  # guards the fields below
        self._quiet_until = 0.0
        self._unsaid_count = 0

    def warning(self, line: str) -> None:
        """Logs a line, or counts it for the next one."""
        with self._lock:
            now = monotonic()
            if now < self._quiet_until:
                self._unsaid_count += 1
                return
            self._quiet_until = now + _QUIET_SECONDS
            unsaid, self._unsaid_count = self._unsaid_count, 0
        more = f" ({unsaid} more since the last line)" if unsaid else ""
        self._logger.warning("%s%s", line, more)
