"""BlobStore: the interface of every blob store, and the guarantees that callers rely on.
`graphstash_server.testing.BlobStoreContract` tests these guarantees.
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
    """An open blob. Its bytes stay readable until `close`, even if the blob is deleted meanwhile.

    Attributes:
        size_bytes: number of stored bytes. The caller compares it with the digest.
        path: local file that holds exactly these bytes. None if there is no such file.
    """

    @property
    def size_bytes(self) -> int:
        """Number of stored bytes."""
        ...

    @property
    def path(self) -> Path | None:
        """Local file that holds exactly these bytes, or None."""
        ...

    def chunks(self, start: int, stop: int) -> AsyncIterator[bytes]:
        """Yield the bytes from `start` (inclusive) to `stop` (exclusive).

        Raises:
            ShortBlobError: the blob ends before `stop`.
        """
        ...

    async def close(self) -> None:
        """Release the blob. Further calls do nothing."""
        ...


class BlobStore(Protocol):
    """Store immutable blobs by digest. Safe for concurrent calls.

    Every call raises `ServerError` with `unavailable` if the store does not respond. A blob counts
    as absent only if the store responds that it has no such blob. The non-abstract methods have
    defaults for stores without local files, without URLs, or whose deletions end with the call.
    """

    @abstractmethod
    async def put(self, digest: Digest, chunks: AsyncIterator[bytes]) -> None:
        """Store the bytes durably: once `put` returns, they survive a crash of the host.

        The store checks free space for the bytes that have arrived, and reserves none for the rest.
        It always reads and checks the chunks, so a client cannot claim a blob that it does not
        have. A failed put leaves nothing behind, and a partial blob is never visible. Putting a
        blob again repairs a damaged one.

        Raises:
            NoSpaceError: there is not enough space.
            LengthMismatchError: the chunks have another length than the digest.
            DigestMismatchError: the chunks have another hash than the digest.
        """
        ...

    @abstractmethod
    async def full(self, size_bytes: int) -> NoSpaceError | None:
        """Return the error that a put of `size_bytes` would raise now, with the number of missing
        bytes. Return None if the bytes fit, or if deleting blobs would not help.
        """
        ...

    @abstractmethod
    async def open(self, digest: Digest) -> BlobReader | None:
        """Open a blob. Return None if it is absent."""
        ...

    def read_now(self, digest: Digest) -> bytearray | None:
        """Return a whole blob of at most `SMALL_BYTES` if it can be read without blocking and its
        size matches the digest. None does not mean that the blob is absent.
        """
        return None

    def open_now(self, digest: Digest) -> FileReader | None:
        """Open a blob that is a local file, if that does not block. None does not mean that the
        blob is absent.
        """
        return None

    @abstractmethod
    async def stat(self, digest: Digest, *, is_newest: bool = False) -> int | None:
        """Return the stored size in bytes, or None if the blob is absent. The bytes may be damaged.
        With `is_newest`, check only the newest name of the blob (see `use_generation`).
        """
        ...

    @abstractmethod
    async def delete(self, digest: Digest, *, generation: int = 0) -> None:
        """Delete a blob under all its names up to `generation`. An absent blob is not an error."""
        ...

    def use_generation(self, digest: Digest, generation: int) -> bool:
        """Set the generation of a blob's name, and return whether it changed.

        A delete request in flight may still remove the older names. The store therefore puts and
        looks up the blob under the new name. A store whose deletions end with the call needs only
        one name.
        """
        return False

    @abstractmethod
    async def is_whole(self, digest: Digest) -> bool | None:
        """Return whether the durable bytes match the digest, or None if the blob is absent. The
        store reads all bytes (see `storage.whole`) and drops a cached copy.
        """
        ...

    async def link(self, digest: Digest) -> str | None:
        """Return a URL that serves the blob without credentials for some minutes.

        Return None if the store offers no URL, or if the blob is too small to be worth a redirect.
        The URL does not guarantee that the blob exists.
        """
        return None

    @abstractmethod
    def list(self, *, before: datetime | None = None) -> AsyncIterator[Digest]:
        """Yield all blobs in ascending order of their SHA-256.

        Args:
            before: aware time. Blobs stored at this time or later are left out.
        """
        ...


_QUIET_SECONDS = 10.0


class ThrottledLog:
    """Log at most one warning every ten seconds. Safe for concurrent threads."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()  # guards the fields below
        self._quiet_until = 0.0
        self._unsaid_count = 0

    def warning(self, line: str) -> None:
        """Log a line, or suppress it and report the count with the next line."""
        with self._lock:
            now = monotonic()
            if now < self._quiet_until:
                self._unsaid_count += 1
                return
            self._quiet_until = now + _QUIET_SECONDS
            unsaid, self._unsaid_count = self._unsaid_count, 0
        more = f" ({unsaid} more since the last line)" if unsaid else ""
        self._logger.warning("%s%s", line, more)
