"""BlobStore: the interface of blob stores, which `testing.BlobStoreContract` tests."""

import asyncio
import logging
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Protocol

from graphstash_schema import Digest, DigestHasher, ErrorCode
from graphstash_server.errors import NoSpaceError, ServerError, ShortBlobError
from graphstash_server.storage.files import CHUNK_BYTES, FileReader

__all__ = ["CHUNK_BYTES", "BlobReader", "BlobStore", "ThrottledLog"]


class BlobReader(Protocol):
    """An open blob. Its bytes stay readable until `close`, even if the blob is deleted."""

    @property
    def size_bytes(self) -> int:
        """Number of stored bytes. The caller compares it with the digest."""
        ...

    @property
    def path(self) -> Path | None:
        """Local file that holds exactly these bytes, or None."""
        ...

    def chunks(self, start: int, stop: int) -> AsyncIterator[bytes]:
        """Yield the bytes in `[start, stop)`. Raise ShortBlobError if the blob is shorter."""
        ...

    async def close(self) -> None:
        """Release the blob. Idempotent."""
        ...


class BlobStore(Protocol):
    """Stores immutable blobs by digest. Safe for concurrent calls. If the store does not respond, a
    call raises `ServerError` with `unavailable`, and the blob does not count as absent.
    """

    @abstractmethod
    async def put(self, digest: Digest, chunks: AsyncIterator[bytes]) -> None:
        """Store the bytes durably: once `put` returns, they survive a crash of the host.

        Checks space only for the bytes that have arrived. Reads and verifies the chunks even if the
        blob exists. So a client cannot claim a blob that it does not have, and a put repairs a
        damaged blob. A failed put leaves nothing behind, and a partial blob is never visible.

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
        """Return the stored size in bytes, or None if the blob is absent. Does not read the bytes.
        With `is_newest`, check only the newest name of the blob (see `use_generation`).
        """
        ...

    @abstractmethod
    async def delete(self, digest: Digest, *, generation: int = 0) -> bool:
        """Delete a blob, if it exists, under all its names up to `generation`. Return whether no
        request is left that may still delete these names later.
        """
        ...

    def use_generation(self, digest: Digest, generation: int) -> bool:
        """Use the name with this generation for a blob from now on, because an unfinished delete
        may still remove older names. Return whether the generation is newer than the last one. A
        store whose deletes finish within the call has one name per blob, and returns False.
        """
        return False

    async def is_whole(self, digest: Digest) -> bool | None:
        """Read all durable bytes, and return whether they match the digest, or None if the blob is
        absent. A store that keeps local copies of blobs drops the copy first.

        Bytes that are damaged on their way from the store differ in the next read. So a blob counts
        as damaged only if `_READS` reads return the same wrong bytes. One read of the right bytes
        suffices.

        Raises:
            ServerError: `unavailable`, if a read breaks off, or the reads differ. The blob may be
                intact.
        """
        wrong: set[Digest] = set()
        for _ in range(_READS):
            found = await _digest_of(self, digest)
            if found is None or found == digest:
                return None if found is None else True
            wrong.add(found)
        if len(wrong) > 1:
            raise ServerError(
                ErrorCode.UNAVAILABLE,
                f"{_READS} reads of the blob {digest} gave {len(wrong)} different wrong results, "
                "so its bytes are damaged on their way from the store: check the network and the "
                "memory of the hosts between, then retry",
            )
        return False

    async def link(self, digest: Digest) -> str | None:
        """Return a URL from which a client can download the blob, if it exists, without credentials
        for some minutes. Return None if the store has no such URLs, or the blob is too small.
        """
        return None

    @abstractmethod
    def list(self, *, before: datetime | None = None) -> AsyncIterator[Digest]:
        """Yield the blobs stored before an aware time (default: all), ordered by SHA-256."""
        ...


_READS = 3


async def _digest_of(store: BlobStore, digest: Digest) -> Digest | None:
    """Read a blob and return the digest of its bytes, or None if the blob is absent."""
    reader = await store.open(digest)
    if reader is None:
        return None
    hasher = DigestHasher()
    try:
        async for chunk in reader.chunks(0, reader.size_bytes):
            await asyncio.to_thread(hasher.update, chunk)
    except ShortBlobError as error:
        raise ServerError(
            ErrorCode.UNAVAILABLE, f"blob {digest} could not be read completely: retry later"
        ) from error
    finally:
        await reader.close()
    return hasher.digest()


_QUIET_SECONDS = 10.0


class ThrottledLog:
    """Log at most one warning every ten seconds. Safe for concurrent threads."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()  # guards the fields below
        self._quiet_until = 0.0
        self._suppressed = 0

    def warning(self, line: str) -> None:
        """Log a line with the number of lines suppressed before it, or suppress it."""
        with self._lock:
            now = monotonic()
            if now < self._quiet_until:
                self._suppressed += 1
                return
            self._quiet_until = now + _QUIET_SECONDS
            suppressed, self._suppressed = self._suppressed, 0
        more = f" ({suppressed} more since the last line)" if suppressed else ""
        self._logger.warning("%s%s", line, more)
