"""S3BlobStore: blobs as objects `<prefix>blobs/sha256/ab/<hex>` in one bucket.

A bucket may execute a delete request long after the server has given up on it. If the same blob is
uploaded after such a request, the store also writes it as `<hex>.<generation>`, a name that the
request does not delete. The previous release reads only the first name, `<hex>`.

boto3 blocks, so every call runs in a thread. A retry cannot rewind a network stream, so the store
spools an upload to disk before it sends it. If a server is killed during an upload in parts, a
server that starts a day later aborts the upload.
"""

import asyncio
import base64
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

from botocore.exceptions import ClientError
from s3transfer.manager import TransferConfig, TransferManager

from graphstash_schema import Digest, ErrorCode, InvalidValueError
from graphstash_server.errors import NoSpaceError, ServerError, ShortBlobError
from graphstash_server.settings import Settings
from graphstash_server.storage.base import CHUNK_BYTES, BlobReader, BlobStore, ThrottledLog
from graphstash_server.storage.bucket import FAILURES, UPLOAD_REQUESTS, WRITE_THREADS, Bucket
from graphstash_server.storage.upload import SpaceGuard, Spool, feed

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef, ListObjectsV2OutputTypeDef
    from s3transfer.futures import TransferFuture

__all__ = [
    "LINK_SECONDS",
    "MULTIPART_BYTES",
    "PART_BYTES",
    "ObjectReader",
    "S3BlobStore",
    "size_of",
]

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")
ResponseT = TypeVar("ResponseT", bound=Mapping[str, Any])


class ObjectReader:
    """A `BlobReader` of an object. Sends a request only to jump to another position."""

    path: Path | None = None

    def __init__(
        self,
        found: "GetObjectOutputTypeDef",
        *,
        get: "Callable[..., GetObjectOutputTypeDef]",
        bucket: Bucket,
    ) -> None:
        """Take the response to a GET of the whole object, and read it if it is small. Blocks. Raise
        like `size_of`, or one of `FAILURES` if a small object breaks off.
        """
        self.size_bytes = size_of(found)
        self._body = found["Body"]
        self._position = 0
        self._is_closed = False
        # Guards the body: a cancelled call may still read in a thread.
        self._lock = threading.Lock()
        self._get = get
        self._bucket = bucket
        self._small: bytes | None = None
        if self.size_bytes <= CHUNK_BYTES:
            self._small = self._body.read()
            self._body.close()

    async def chunks(self, start: int, stop: int) -> AsyncIterator[bytes]:
        """Yield a part of the object, see `BlobReader.chunks`."""
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
        """Close the connection, even if the caller is cancelled."""
        with suppress(RuntimeError):  # the store was closed before
            await asyncio.shield(self._in_thread(self.close_now))

    def close_now(self) -> None:
        """Close the connection. Blocks while a thread reads from it."""
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
    """Return the object size in a response. Close the response before raising `unavailable`: an
    error page of a proxy must not look like a damaged blob.
    """
    if "ETag" not in found or "ContentLength" not in found:
        if "Body" in found:
            found["Body"].close()  # otherwise the connection stays open until garbage collection
        raise ServerError(
            ErrorCode.UNAVAILABLE,
            "the response of the blob store has no ETag or no length, so this is not an S3 server: "
            "fix GRAPHSTASH_S3_ENDPOINT_URL",
        )
    return int(found["ContentLength"])


MULTIPART_BYTES: Final = 16 * 1024**2
"""Size from which a blob is uploaded in parts."""

PART_BYTES: Final = 8 * 1024**2
"""Size of a part. S3 accepts 10,000 parts, so the transfer manager enlarges the parts of larger
blobs. All uploads together hold at most `UPLOAD_REQUESTS` parts in memory."""

LINK_SECONDS: Final = 900
"""Seconds for which a link is valid."""

_ABANDONED_AGE = timedelta(days=1)
"""Age from which an unfinished upload counts as abandoned. No upload takes this long."""


class S3BlobStore(BlobStore):
    """A `BlobStore` in a bucket. Any number of servers may share the bucket."""

    def __init__(self, settings: Settings) -> None:
        """Check the bucket. Blocks. Raises StartError, or OSError for the spool directory."""
        self._prefix = f"{settings.s3_prefix}blobs/sha256/"
        self._generations: dict[str, int] = {}
        self._redirect_bytes = settings.s3_redirect_bytes
        self._spool_dir = settings.spool_dir
        self._spool_dir.mkdir(parents=True, exist_ok=True)
        self._space = SpaceGuard(self._spool_dir, min_free_bytes=settings.min_free_bytes)
        self._log = ThrottledLog(_LOGGER)
        self._bucket = Bucket(settings)
        self._client = self._bucket.client
        # Uploads use their own threads, so that they do not delay a hit.
        self._writers = ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="s3-write")
        self._transfers = TransferManager(
            self._client,
            TransferConfig(
                multipart_threshold=MULTIPART_BYTES,
                multipart_chunksize=PART_BYTES,
                max_request_concurrency=UPLOAD_REQUESTS,
                max_in_memory_upload_chunks=UPLOAD_REQUESTS,
            ),
        )
        self._bucket.threads.submit(
            self._bucket.abort_abandoned, self._prefix, older_than=_ABANDONED_AGE
        )

    async def put(self, digest: Digest, chunks: AsyncIterator[bytes]) -> None:
        """See `BlobStore.put`."""
        spool = Spool(digest, directory=self._spool_dir, space=self._space)
        try:
            await self._write(spool.open)
            rest = await feed(chunks, lambda taken: self._write(partial(spool.write, taken)))
            blob = await self._write(partial(spool.finish, rest))
        except BaseException:
            await asyncio.shield(self._on_writer(spool.close))
            raise
        await self._send(_Sending(spool, blob), digest)

    async def full(self, size_bytes: int) -> NoSpaceError | None:
        """Return None. A bucket has no limit, and deleting blobs does not help a full spool."""
        return None

    async def open(self, digest: Digest) -> BlobReader | None:
        """See `BlobStore.open`. The thread that opens a small blob also reads it."""
        opening = self._bucket.threads.submit(self._open, digest)
        with self._bucket.failures_named("get a blob"):
            try:
                return await asyncio.shield(asyncio.wrap_future(opening))
            except asyncio.CancelledError:
                opening.add_done_callback(_close_unread)
                raise

    async def stat(self, digest: Digest, *, is_newest: bool = False) -> int | None:
        """See `BlobStore.stat`."""
        for key in self._keys(digest)[: 1 if is_newest else None]:
            stat = partial(self._stat, key, digest)
            size_bytes = await self._bucket.call("stat a blob", stat)
            if size_bytes is not None:
                return size_bytes
        return None

    async def delete(self, digest: Digest, *, generation: int = 0) -> bool:
        """See `BlobStore.delete`. A response to the last attempt does not tell whether an earlier
        attempt, which got none, is still under way.
        """
        is_final = True
        for each in range(generation + 1):
            request = partial(self._delete, self._key(digest, each))
            is_final &= await self._bucket.call("delete a blob", request)
        return is_final

    def use_generation(self, digest: Digest, generation: int) -> bool:
        """See `BlobStore.use_generation`."""
        if generation <= self._generations.get(digest.sha256, 0):
            return False
        self._generations[digest.sha256] = generation
        return True

    async def link(self, digest: Digest) -> str | None:
        """See `BlobStore.link`. The URL is presigned."""
        if self._redirect_bytes is None or digest.size_bytes < self._redirect_bytes:
            return None
        # Signing does not block, but renewing the credentials beforehand may.
        return await self._bucket.call(
            "sign a link",
            partial(
                self._client.generate_presigned_url,
                "get_object",
                Params={"Bucket": self._bucket.name, "Key": self._keys(digest)[0]},
                ExpiresIn=LINK_SECONDS,
            ),
        )

    async def list(self, *, before: datetime | None = None) -> AsyncIterator[Digest]:
        """See `BlobStore.list`. Each request lists a thousand objects."""
        pages = iter(
            self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket.name, Prefix=self._prefix
            )
        )
        last: Digest | None = None  # all names of a blob are adjacent in the listing
        while (
            page := await self._bucket.call("list blobs", lambda: next(pages, None))
        ) is not None:
            for digest in self._digests(page, before):
                if last is not None and last.sha256 != digest.sha256:
                    yield last
                last = digest
        if last is not None:
            yield last

    async def close(self) -> None:
        """Wait for the threads. The caller must not use the store afterwards."""
        await asyncio.to_thread(self._writers.shutdown)
        await asyncio.to_thread(self._transfers.shutdown)
        await asyncio.to_thread(self._bucket.close)

    async def _write(self, call: Callable[[], T]) -> T:
        try:
            return await self._on_writer(call)
        except OSError as error:
            detail = (
                f"the directory {self._spool_dir}, where this server spools uploads, failed "
                f"({error.strerror}): check its disk, or move GRAPHSTASH_DATA_DIR, then retry"
            )
            self._log.warning(detail)
            raise ServerError(ErrorCode.UNAVAILABLE, detail) from error

    def _on_writer(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._writers, call)

    async def _send(self, sending: "_Sending", digest: Digest) -> None:
        """Upload the spooled blob in a writer thread, which then closes the spool. If the caller is
        cancelled, the thread stops the upload if it can, and still closes the spool.
        """
        with self._bucket.failures_named("put a blob"):
            sent = self._on_writer(partial(self._upload, sending, digest))
            try:
                await asyncio.shield(sent)
            except asyncio.CancelledError:
                sending.cancel()
                # Retrieve the exception, or asyncio logs that nothing has retrieved it.
                sent.add_done_callback(lambda done: done.cancelled() or done.exception())
                raise

    def _upload(self, sending: "_Sending", digest: Digest) -> None:
        with closing(sending.spool):
            for key in self._keys(digest):
                sending.blob.seek(0)
                self._upload_as(key, sending, digest)

    def _upload_as(self, key: str, sending: "_Sending", digest: Digest) -> None:
        bucket = self._bucket.name
        if digest.size_bytes >= MULTIPART_BYTES:
            sending.follow(
                self._transfers.upload(
                    sending.blob, bucket, key, extra_args={"ChecksumAlgorithm": "SHA256"}
                )
            )
        elif not sending.is_cancelled:
            self._client.put_object(
                Bucket=bucket,
                Key=key,
                Body=sending.blob,
                ContentLength=digest.size_bytes,
                ChecksumSHA256=base64.b64encode(bytes.fromhex(digest.sha256)).decode(),
            )

    def _delete(self, key: str) -> bool:
        """Delete one object. Return whether one attempt sufficed. Blocks."""
        response: Mapping[str, Any] = {}

        def send() -> Mapping[str, Any]:
            nonlocal response
            try:
                response = self._client.delete_object(Bucket=self._bucket.name, Key=key)
            except ClientError as error:
                response = error.response
                raise
            return response

        self._bucket.unless_absent(send)
        return not response["ResponseMetadata"]["RetryAttempts"]

    def _open(self, digest: Digest) -> ObjectReader | None:
        for key in self._keys(digest):
            get = partial(self._client.get_object, Bucket=self._bucket.name, Key=key)
            found = self._found(partial(self._bucket.unless_absent, get), key, digest)
            if found is not None:
                return ObjectReader(found, get=get, bucket=self._bucket)
        return None

    def _stat(self, key: str, digest: Digest) -> int | None:
        """Return the size of one object, or None if it is absent. Blocks. A HEAD response has no
        body, so a 404 from a gateway or for a missing bucket looks like a lost blob. After a 404, a
        GET must confirm that the object itself is missing.
        """
        head = partial(self._client.head_object, Bucket=self._bucket.name, Key=key)
        described = self._found(partial(self._bucket.unless_404, head), key, digest)
        if described is not None:
            return size_of(described)
        get = partial(self._client.get_object, Bucket=self._bucket.name, Key=key)
        found = self._found(partial(self._bucket.unless_absent, get), key, digest)
        if found is None:
            return None
        found["Body"].close()
        return size_of(found)

    def _found(
        self, send: Callable[[], ResponseT | None], key: str, digest: Digest
    ) -> ResponseT | None:
        """Call `send`, which sends a GET or HEAD of a blob, and return its response. Blocks.

        A size other than the digest's may be a damaged header. If a second response has it too, the
        store lists the blob, because a listing has the size in its body. If that is the size of the
        digest, only the headers are damaged, and the store raises `unavailable`.
        """
        found = send()
        if found is None or size_of(found) == digest.size_bytes:
            return found
        if "Body" in found:
            found["Body"].close()
        found = send()
        if found is None or size_of(found) == digest.size_bytes:
            return found
        page = self._client.list_objects_v2(Bucket=self._bucket.name, Prefix=key, MaxKeys=1)
        if [(each["Key"], each["Size"]) for each in page.get("Contents", ())] == [
            (key, digest.size_bytes)
        ]:
            if "Body" in found:
                found["Body"].close()
            raise ServerError(
                ErrorCode.UNAVAILABLE,
                f"the blob store lists blob {digest} with {digest.size_bytes} bytes and announces "
                f"{size_of(found)}: headers are damaged on their way from it, so nothing was "
                "dropped; check the network and proxies between, then retry",
            )
        return found

    def _keys(self, digest: Digest) -> tuple[str, ...]:
        """Return the newest name, then the first name if it is another one."""
        generation = self._generations.get(digest.sha256, 0)
        return tuple(self._key(digest, each) for each in sorted({generation, 0}, reverse=True))

    def _key(self, digest: Digest, generation: int) -> str:
        suffix = f".{generation}" if generation else ""
        return f"{self._prefix}{digest.sha256[:2]}/{digest.sha256}{suffix}"

    def _digests(
        self, page: "ListObjectsV2OutputTypeDef", before: datetime | None
    ) -> Iterator[Digest]:
        """Yield the blobs of one page. Skip newer objects, and objects that are no blobs."""
        for found in page.get("Contents", ()):
            with suppress(InvalidValueError, ValueError):
                name, _, generation = found["Key"].rpartition("/")[2].partition(".")
                digest = Digest(name, found["Size"])
                is_old = before is None or found["LastModified"] < before
                if is_old and found["Key"] == self._key(digest, int(generation or 0)):
                    yield digest


def _close_unread(opening: "Future[ObjectReader | None]") -> None:
    """Close the reader that a cancelled caller did not receive."""
    reader = None if opening.exception() else opening.result()
    if reader is not None:
        reader.close_now()


class _Sending:
    """A spooled blob during its upload. Another thread may cancel it."""

    def __init__(self, spool: Spool, blob: BinaryIO) -> None:
        self.spool = spool
        self.blob = blob
        self.is_cancelled = False
        self._lock = threading.Lock()  # guards `is_cancelled` and the future
        self._future: TransferFuture | None = None

    def follow(self, future: "TransferFuture") -> None:
        """Wait until an upload in parts ends. If it fails, the transfer manager aborts it."""
        with self._lock:
            self._future = future
            if self.is_cancelled:
                future.cancel()
        future.result()

    def cancel(self) -> None:
        """Stop an upload in parts, or a single PUT that has not started."""
        with self._lock:
            self.is_cancelled = True
            if self._future is not None:
                self._future.cancel()
