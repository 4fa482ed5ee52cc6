"""ObjectBlobStore: blobs as objects `<prefix>blobs/sha256/ab/<hex>` in one bucket.

A bucket may execute a delete request long after the server has given up on it. If the same blob is
uploaded after such a request, the store also writes it as `<hex>.<generation>`, a name that the
request does not delete. The previous release reads only the first name, `<hex>`.

The client libraries of buckets block, so every call runs in a thread. A retry cannot rewind a
network stream, so the store spools an upload to disk before it sends it.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from graphstash_schema import Digest, ErrorCode, InvalidValueError
from graphstash_server.errors import NoSpaceError, ServerError, ShortBlobError
from graphstash_server.settings import Settings
from graphstash_server.storage.base import CHUNK_BYTES, BlobReader, BlobStore, ThrottledLog
from graphstash_server.storage.bucket import THREADS, WRITE_THREADS, Bucket, Found, Listed, Sending
from graphstash_server.storage.upload import SpaceGuard, Spool, feed

__all__ = ["ObjectBlobStore"]

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


class _ObjectReader:
    """A `BlobReader` of an object. Sends a request only to jump to another position."""

    path: Path | None = None

    def __init__(
        self, found: Found, *, key: str, bucket: Bucket, threads: ThreadPoolExecutor
    ) -> None:
        """Take the response to a GET of the whole object, and read it if it is small. Blocks. Raise
        one of the bucket's `failures` if a small object breaks off.
        """
        self.size_bytes = found.size_bytes
        self._body = found.body
        self._position = 0
        self._is_closed = False
        # Guards the body: a cancelled call may still read in a thread.
        self._lock = threading.Lock()
        self._key = key
        self._bucket = bucket
        self._threads = threads
        self._small: bytes | None = None
        if self.size_bytes <= CHUNK_BYTES:
            self._small = b"".join(iter(lambda: self._body.read(CHUNK_BYTES), b""))
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
        with self._lock, suppress(*self._bucket.failures, ValueError):
            self._is_closed = True
            self._body.close()

    def _in_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _read(self, start: int, stop: int) -> bytes:
        with self._lock:
            return self._read_locked(start, stop)

    def _read_locked(self, start: int, stop: int) -> bytes:
        name = self._bucket.name
        if self._is_closed:
            raise ShortBlobError(f"an object of {name} was closed at {start}")
        try:
            if start != self._position:
                self._seek(start, stop)
            chunk = self._body.read(min(CHUNK_BYTES, stop - start))
        except self._bucket.failures as error:
            raise ShortBlobError(
                f"an object of {name} broke off at {start} of {self.size_bytes}: {error}"
            ) from error
        if not chunk:
            raise ShortBlobError(f"an object of {name} ended at {start}, not {stop}")
        self._position = start + len(chunk)
        return chunk

    def _seek(self, start: int, stop: int) -> None:
        self._body.close()
        found = self._bucket.get(self._key, start=start, stop=stop)
        if found is None:
            raise ShortBlobError(f"an object of {self._bucket.name} is gone at {start}")
        self._body = found.body


class ObjectBlobStore(BlobStore):
    """A `BlobStore` in a bucket. Any number of servers may share the bucket."""

    def __init__(self, bucket: Bucket, settings: Settings, *, prefix: str) -> None:
        """Take over a bucket that can be used. `close` closes the bucket. Blocks.

        Args:
            bucket: an open bucket.
            settings: names the spool directory and its free space.
            prefix: prefix of all keys.

        Raises:
            OSError: the spool directory cannot be created.
        """
        self._prefix = f"{prefix}blobs/sha256/"
        self._generations: dict[str, int] = {}
        self._spool_dir = settings.spool_dir
        self._spool_dir.mkdir(parents=True, exist_ok=True)
        self._space = SpaceGuard(self._spool_dir, min_free_bytes=settings.min_free_bytes)
        self._log = ThrottledLog(_LOGGER)
        self._bucket = bucket
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="bucket")
        # Uploads use their own threads, so that they do not delay a hit.
        self._writers = ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="bucket-write")
        self._threads.submit(bucket.tidy, self._prefix)

    async def put(self, digest: Digest, chunks: AsyncIterator[bytes]) -> None:
        """See `BlobStore.put`."""
        spool = Spool(digest, directory=self._spool_dir, space=self._space)
        try:
            await self._write(spool.open)
            rest = await feed(chunks, lambda taken: self._write(partial(spool.write, taken)))
            blob = await self._write(partial(spool.finish, rest))
        except BaseException:
            # Not in a writer's thread: all of them may be waiting for a silent bucket.
            await asyncio.shield(asyncio.to_thread(spool.close))
            raise
        await self._send(Sending(spool, blob), digest)

    async def full(self, size_bytes: int) -> NoSpaceError | None:
        """Return None. A bucket has no limit, and deleting blobs does not help a full spool."""
        return None

    async def open(self, digest: Digest) -> BlobReader | None:
        """See `BlobStore.open`. The thread that opens a small blob also reads it."""
        opening = self._threads.submit(self._open, digest)
        with self._map_errors("get a blob"):
            try:
                return await _shielded(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(_close_unread)
                raise

    async def stat(self, digest: Digest, *, is_newest: bool = False) -> int | None:
        """See `BlobStore.stat`."""
        for key in self._keys(digest)[: 1 if is_newest else None]:
            size_bytes = await self._call("stat a blob", partial(self._stat, key, digest))
            if size_bytes is not None:
                return size_bytes
        return None

    async def delete(self, digest: Digest, *, generation: int = 0) -> bool:
        """See `BlobStore.delete`."""
        is_final = True
        for each in range(generation + 1):
            request = partial(self._bucket.delete, self._key(digest, each))
            is_final &= await self._call("delete a blob", request)
        return is_final

    def use_generation(self, digest: Digest, generation: int) -> bool:
        """See `BlobStore.use_generation`."""
        if generation <= self._generations.get(digest.sha256, 0):
            return False
        self._generations[digest.sha256] = generation
        return True

    async def list(self, *, before: datetime | None = None) -> AsyncIterator[Digest]:
        """See `BlobStore.list`. Each request lists one page of objects."""
        pages = self._bucket.pages(self._prefix)
        last: Digest | None = None  # all names of a blob are adjacent in the listing
        while (page := await self._call("list blobs", lambda: next(pages, None))) is not None:
            for digest in self._digests(page, before):
                if last is not None and last.sha256 != digest.sha256:
                    yield last
                last = digest
        if last is not None:
            yield last

    async def close(self) -> None:
        """Wait for the threads. The caller must not use the store afterwards."""
        await asyncio.to_thread(self._writers.shutdown)
        await asyncio.to_thread(self._bucket.stop)
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._bucket.close)

    async def _call(self, operation: str, function: Callable[[], T]) -> T:
        """Run `function` in a thread. Raises `ServerError` if the bucket failed."""
        with self._map_errors(operation):
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    @contextmanager
    def _map_errors(self, operation: str) -> Iterator[None]:
        """Turn a failure of the bucket into `NoSpaceError` or `ServerError` (`unavailable`)."""
        try:
            yield
        except self._bucket.failures as error:
            failure = self._bucket.failure(error)
            detail = (
                f"the bucket {self._bucket.name} at {self._bucket.place} failed to {operation} "
                f"({failure.cause}): {failure.remedy}"
            )
            self._log.warning(detail)
            if failure.is_full:
                raise NoSpaceError(detail) from error
            raise ServerError(ErrorCode.UNAVAILABLE, detail) from error

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

    async def _send(self, sending: Sending, digest: Digest) -> None:
        """Upload the spooled blob in a writer thread, which then closes the spool. If the caller is
        cancelled, the thread stops the upload if it can, and still closes the spool. An upload that
        waits for a thread is dropped.
        """
        sent = self._writers.submit(self._upload, sending, digest)
        with self._map_errors("put a blob"):
            try:
                await _shielded(sent)
            except asyncio.CancelledError:
                sending.cancel()
                if sent.cancel():  # it waited for a thread
                    await asyncio.to_thread(sending.spool.close)
                raise

    def _upload(self, sending: Sending, digest: Digest) -> None:
        with closing(sending.spool):
            for key in self._keys(digest):
                sending.blob.seek(0)
                if not sending.is_cancelled:
                    self._bucket.put(key, sending, digest)

    def _open(self, digest: Digest) -> _ObjectReader | None:
        for key in self._keys(digest):
            found = self._send_checked(self._bucket.get, key, digest)
            if found is not None:
                return _ObjectReader(found, key=key, bucket=self._bucket, threads=self._threads)
        return None

    def _stat(self, key: str, digest: Digest) -> int | None:
        """Return the size of one object, or None if it is absent. Blocks. A HEAD response has no
        body, so a 404 from a gateway or for a missing bucket looks like a lost blob. After a 404, a
        GET must confirm that the object itself is missing.
        """
        found = self._send_checked(self._bucket.head, key, digest)
        if found is None:
            found = self._send_checked(self._bucket.get, key, digest)
        if found is None:
            return None
        found.body.close()
        return found.size_bytes

    def _send_checked(
        self, send: Callable[[str], Found | None], key: str, digest: Digest
    ) -> Found | None:
        """Call `send`, which sends a GET or HEAD of a blob, and return its response. Blocks.

        A size other than the digest's may be a damaged header. If a second response has it too, the
        store lists the blob, because a listing has the size in its body. If that is the size of the
        digest, only the headers are damaged, and the store raises `unavailable`.
        """
        found = send(key)
        if found is None or found.size_bytes == digest.size_bytes:
            return found
        found.body.close()
        found = send(key)
        if found is None or found.size_bytes == digest.size_bytes:
            return found
        listed = next(self._bucket.pages(key), ())
        if (key, digest.size_bytes) in [(each.key, each.size_bytes) for each in listed]:
            found.body.close()
            raise ServerError(
                ErrorCode.UNAVAILABLE,
                f"the blob store lists blob {digest} with {digest.size_bytes} bytes and announces "
                f"{found.size_bytes}: headers are damaged on their way from it, so nothing was "
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

    def _digests(self, page: Sequence[Listed], before: datetime | None) -> Iterator[Digest]:
        """Yield the blobs of one page. Skip newer objects, and objects that are no blobs."""
        for found in page:
            with suppress(InvalidValueError, ValueError):
                name, _, generation = found.key.rpartition("/")[2].partition(".")
                digest = Digest(name, found.size_bytes)
                is_old = before is None or found.modified_at < before
                if is_old and found.key == self._key(digest, int(generation or 0)):
                    yield digest


def _close_unread(opening: "Future[_ObjectReader | None]") -> None:
    """Close the reader that a cancelled caller did not receive."""
    reader = None if opening.exception() else opening.result()
    if reader is not None:
        reader.close_now()


def _shielded(work: "Future[T]") -> "asyncio.Future[T]":
    """Return a future of a thread's work, which goes on if the caller is cancelled. asyncio would
    log an error of such work, because no caller retrieves it.
    """
    future = asyncio.wrap_future(work)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return asyncio.shield(future)
