"""ReadThroughFill: copies a blob from the store behind the tier (the back) into the tier.

The fill requests the blob from the back once, and any number of readers follow the growing file.
They receive its last bytes only after the fill has verified the digest, so a damaged blob never
looks whole. If all readers leave before that, the fill is cancelled.
"""

import asyncio
import fcntl
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from graphstash_schema import Digest, DigestHasher
from graphstash_server.errors import NoSpaceError, ServerError, ShortBlobError
from graphstash_server.logs import in_background
from graphstash_server.storage.base import CHUNK_BYTES, BlobReader, BlobStore
from graphstash_server.storage.upload import SpaceGuard

__all__ = ["Place", "ReadThroughFill", "TailableFile", "TierError"]


class TailableFile:
    """A temporary file that is read while it is written. Every method blocks.

    An flock on the open file makes `remove_abandoned` skip it. A mutex serializes changes, because
    a cancelled call may still run in a thread.
    """

    def __init__(self, directory: Path) -> None:
        """Choose the directory. `open` creates the file."""
        self._directory = directory
        self._path: Path | None = None
        self._fd = -1
        self._size_bytes = 0
        self._hasher = DigestHasher()
        self._is_discarded = False
        self._lock = threading.Lock()  # guards the descriptor and the name

    def open(self) -> None:
        """Create and lock the file, unless `discard` has run. If a starting server removes the file
        before it is locked, its bytes stay readable, and `keep` raises.
        """
        with self._lock:
            if self._is_discarded:
                return
            self._fd, name = tempfile.mkstemp(dir=self._directory)
            self._path = Path(name)
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def write(self, chunk: bytes) -> None:
        """Append bytes, unless the file is closed."""
        with self._lock:
            view = memoryview(chunk)
            while view and self._fd >= 0:
                written = os.pwrite(self._fd, view, self._size_bytes)
                self._hasher.update(view[:written])
                self._size_bytes += written
                view = view[written:]

    def digest(self) -> Digest:
        """Return the digest of all bytes written so far."""
        return self._hasher.digest()

    def read(self, start: int, length: int) -> bytes:
        """Return at most `length` bytes from `start`."""
        return os.pread(self._fd, length, start)

    def keep(self, destination: Path) -> None:
        """Fsync the complete file and rename it to `destination`, unless `discard` has run.

        Later hits are sent unchecked, so a power cut must not leave the name without the bytes. It
        may lose the name, which costs another fill.
        """
        with self._lock:
            if self._path is None:
                return
            os.fsync(self._fd)
            destination.parent.mkdir(exist_ok=True)
            self._path.rename(destination)
            self._path = None

    def discard(self) -> None:
        """Remove the file unless `keep` has run. The bytes stay readable until `close`."""
        with self._lock:
            self._is_discarded = True
            if self._path is not None:
                self._path.unlink(missing_ok=True)
                self._path = None

    def close(self) -> None:
        """Close the file descriptor."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


T = TypeVar("T")


class TierError(Exception):
    """The tier cannot hold the blob. Read it from the back."""


class Place(NamedTuple):
    """Where a fill writes: a file in `temporary`, which it finally renames to `destination`."""

    temporary: Path
    destination: Path
    space: SpaceGuard
    threads: ThreadPoolExecutor


class ReadThroughFill:
    """Copies one blob into the tier. Use it only from the event loop.

    Attributes:
        digest: digest of the blob.
        back: store from which the blob is read.
        is_wanted: whether the tier keeps the blob. False once the tier has dropped it during the
            fill, for example because it was deleted or stored again.
        is_given_up: whether the fill was cancelled because its last reader left.
        is_damaged: whether the bytes from the back did not match the digest.
        failure: why the fill failed or was cancelled, or None.
    """

    def __init__(
        self,
        digest: Digest,
        *,
        back: BlobStore,
        place: Place,
        ended: "Callable[[ReadThroughFill], None]",
    ) -> None:
        """Start copying. `ended` is called when the copy succeeds, fails or is cancelled."""
        self.digest = digest
        self.back = back
        self.is_wanted = True
        self.is_given_up = False
        self.is_damaged = False
        self.failure: Exception | None = None
        self._place = place
        self._file = TailableFile(place.temporary)
        self._ended = ended
        self._changed = asyncio.Condition()
        self._follower_count = 0
        self._is_found: bool | None = None
        self._readable_bytes = 0
        self._task = in_background(self._run())

    async def follow(self) -> BlobReader | None:
        """Return a reader of the growing file, or None if the back has no such blob.

        Raises:
            TierError: the tier cannot hold the blob.
            ServerError: the back does not respond.
            ShortBlobError: the fill was cancelled.
        """
        self._follower_count += 1
        try:
            is_found = await self._has_blob()
        except BaseException:
            self.leave()
            raise
        if is_found:
            return _Follower(self)
        self.leave()
        return None

    def leave(self) -> None:
        """Remove a follower. After the last one, cancel the fill if it still copies."""
        self._follower_count -= 1
        if self._follower_count:
            return
        if self._task.done():
            self._file.close()
        elif self._readable_bytes < self.digest.size_bytes and self.failure is None:
            self.is_given_up = True
            self._task.cancel()

    async def read(self, start: int, stop: int) -> bytes:
        """Wait for bytes from `start` on, and return some of those before `stop`.

        Raises:
            TierError: the tier failed. Read the rest from the back.
            ShortBlobError: the fill failed otherwise: the back broke off, or the digest differs.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._readable_bytes > start or self.failure is not None
            )
        if self._readable_bytes > start:
            length = min(CHUNK_BYTES, stop - start, self._readable_bytes - start)
            chunk = await self._in_tier(partial(self._file.read, start, length))
            if not chunk:
                raise TierError(f"the file of {self.digest} was cut at {start}")
            return chunk
        if isinstance(self.failure, TierError):
            raise self.failure
        raise ShortBlobError(f"{self.digest} ends at {start}, not {stop}: {self.failure}")

    async def cancel(self) -> None:
        """Cancel the fill, even if it has followers, and wait until it has ended."""
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _has_blob(self) -> bool:
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._is_found is not None or self.failure is not None
            )
        if self._is_found is None and self.failure is not None:
            raise self.failure
        return bool(self._is_found)

    async def _run(self) -> None:
        """Copy the blob. Keep an exception for the followers to raise."""
        try:
            await self._copy()
        except asyncio.CancelledError:
            self.failure = ShortBlobError(f"{self.digest} was given up")
            raise
        except Exception as error:  # noqa: BLE001 - the followers raise it
            self.failure = error
        finally:
            self._ended(self)
            try:
                await asyncio.shield(self._on_thread(self._file.discard))
            finally:
                if not self._follower_count:
                    self._file.close()
            await self._notify()

    async def _copy(self) -> None:
        size_bytes = self.digest.size_bytes
        await self._reserve(size_bytes)
        try:
            await self._in_tier(self._file.open)
            reader = await self.back.open(self.digest)
            if reader is None:
                self._is_found = False
                return
            try:
                if reader.size_bytes != size_bytes:
                    raise TierError(
                        f"{self.digest} has {reader.size_bytes} bytes in the store behind the tier"
                    )
                self._is_found = True
                await self._notify()
                await self._copy_from(reader)
            finally:
                await reader.close()
        finally:
            self._place.space.release(size_bytes)
        if self.is_wanted:
            await self._in_tier(partial(self._file.keep, self._place.destination))
        if not self.is_wanted:
            await self._in_tier(partial(self._place.destination.unlink, missing_ok=True))

    async def _reserve(self, size_bytes: int) -> None:
        """Reserve the space. If the fill is cancelled meanwhile, release the space again."""
        space = self._place.space
        reserving = asyncio.ensure_future(self._in_tier(partial(space.reserve, size_bytes)))

        def release(reserved: "asyncio.Future[None]") -> None:
            if not reserved.cancelled() and reserved.exception() is None:
                space.release(size_bytes)

        try:
            await asyncio.shield(reserving)
        except asyncio.CancelledError:
            reserving.add_done_callback(release)
            raise

    async def _copy_from(self, reader: BlobReader) -> None:
        position = 0
        async for chunk in reader.chunks(0, self.digest.size_bytes):
            await self._in_tier(partial(self._file.write, chunk))
            position += len(chunk)
            if position < self.digest.size_bytes:
                self._readable_bytes = position
                await self._notify()
        received = self._file.digest()
        if received != self.digest:
            self.is_damaged = True
            raise ShortBlobError(f"the bytes of {self.digest} are those of {received}")
        self._readable_bytes = position
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _in_tier(self, call: Callable[[], T]) -> T:
        try:
            return await self._on_thread(call)
        except (OSError, NoSpaceError) as error:
            raise TierError(str(error)) from error

    def _on_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._place.threads, call)


class _Follower:
    """A `BlobReader` of a growing file. If the tier fails, it reads the rest from the back."""

    path: Path | None = None

    def __init__(self, fill: ReadThroughFill) -> None:
        self._fill = fill
        self._is_open = True
        self.size_bytes = fill.digest.size_bytes

    async def chunks(self, start: int, stop: int) -> AsyncIterator[bytes]:
        if stop > self.size_bytes:
            raise ShortBlobError(f"{self._fill.digest} ends at {self.size_bytes}, not {stop}")
        while start < stop:
            try:
                chunk = await self._fill.read(start, stop)
            except TierError:
                break
            start += len(chunk)
            yield chunk
        if start < stop:
            async for chunk in self._rest(start, stop):
                yield chunk

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._fill.leave()

    async def _rest(self, start: int, stop: int) -> AsyncIterator[bytes]:
        try:
            reader = await self._fill.back.open(self._fill.digest)
        except ServerError as error:
            raise ShortBlobError(f"{self._fill.digest} ends at {start}: {error}") from error
        if reader is None:
            raise ShortBlobError(f"{self._fill.digest} is gone at {start} of {stop}")
        try:
            async for chunk in reader.chunks(start, stop):
                yield chunk
        finally:
            await reader.close()
