"""ObjectReader: reads an object of a bucket while it comes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from graphstash_schema import ErrorCode
from graphstash_server.errors import ServerError, ShortBlobError
from graphstash_server.storage.base import CHUNK_BYTES
from graphstash_server.storage.bucket import FAILURES, Bucket

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef

__all__ = ["ObjectReader", "size_of"]

T = TypeVar("T")


class ObjectReader:
    """A `BlobReader`. The answer that opened it is read once, from its beginning; any other part
    takes a request of its own.
    """

    path: Path | None = None

    def __init__(
        self,
        found: "GetObjectOutputTypeDef",
        *,
        get: "Callable[..., GetObjectOutputTypeDef]",
        bucket: Bucket,
    ) -> None:
        """Reads a small object at once. Blocks.

        Args:
            found: the answer to a GET of the whole object.
            get: asks again, for the `Range` that it is given.
            bucket: of the object.

        Raises:
            FAILURES: when a small object breaks off.
            ServerError: `unavailable`, when the answer is not that of an S3.
        """
        self.size_bytes = size_of(found)
        self._body = found["Body"]
        self._position = 0
        self._is_closed = False
        # Guards the body: what was cancelled may still read in a thread.
        self._lock = threading.Lock()
        self._get = get
        self._bucket = bucket
        self._small: bytes | None = None
        if self.size_bytes <= CHUNK_BYTES:
            self._small = self._body.read()
            self._body.close()

    async def chunks(self, start: int, stop: int) -> AsyncIterator[bytes]:
        """A part of the object, see `BlobReader.chunks`."""
        if stop > self.size_bytes:
            raise ShortBlobError(f"the object ends at {self.size_bytes}, not {stop}")
        if self._small is not None:
            if start < stop:
                yield self._small[start:stop]
            return
        while start < stop:
            chunk = await self._in_thread(partial(self._read, start, stop))
            start += len(chunk)
            yield chunk

    async def close(self) -> None:
        """Lets go of the connection, whether or not anybody waits for it."""
        with suppress(RuntimeError):  # the store was closed before
            await asyncio.shield(self._in_thread(self.close_now))

    def close_now(self) -> None:
        """Lets go of the connection. Blocks while a thread reads from it."""
        with self._lock, suppress(*FAILURES, ValueError):
            self._is_closed = True
            self._body.close()

    def _in_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._bucket.threads, call)

    def _read(self, start: int, stop: int) -> bytes:
        with self._lock:
            return self._read_locked(start, stop)

    def _read_locked(self, start: int, stop: int) -> bytes:
        if self._is_closed:
            raise ShortBlobError(f"an object of {self._bucket.name} was closed at {start}")
        try:
            if start != self._position:
                self._seek(start, stop)
            chunk = self._body.read(min(CHUNK_BYTES, stop - start))
        except FAILURES as error:
            raise ShortBlobError(
                f"an object of {self._bucket.name} broke off at {start} of {self.size_bytes}: "
                f"{error}"
            ) from error
        if not chunk:
            raise ShortBlobError(f"an object of {self._bucket.name} ended at {start}, not {stop}")
        self._position = start + len(chunk)
        return chunk

    def _seek(self, start: int, stop: int) -> None:
        self._body.close()
        found = self._get(Range=f"bytes={start}-{stop - 1}")
        self._body = found["Body"]
        self._position = start
        if not found.get("ContentRange", "").startswith(f"bytes {start}-"):
            raise ShortBlobError(f"{self._bucket.name} sent another part than {start}-{stop}")


def size_of(found: Mapping[str, Any]) -> int:
    """The size that an answer tells.

    Raises:
        ServerError: `unavailable`, when the answer is not that of an S3: a stranger's page must
            not look like a damaged blob.
    """
    if "ETag" not in found or "ContentLength" not in found:
        raise ServerError(
            ErrorCode.UNAVAILABLE,
            "the blob store's answer has no ETag or no length, so it is no S3: mend "
            "GRAPHSTASH_S3_ENDPOINT_URL",
        )
    return int(found["ContentLength"])
