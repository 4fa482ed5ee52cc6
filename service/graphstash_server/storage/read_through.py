"""ReadThroughFill: copies a blob from the store behind the tier (the back) into the tier.

The fill requests the blob from the back once, and any number of readers follow the growing file.
They receive its last bytes only after the fill has verified the digest, so a damaged blob never
looks whole. If all readers leave before that, the fill is cancelled.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from graphstash_schema import Digest
from graphstash_server.errors import (
    DigestMismatchError,
    NoSpaceError,
    ServerError,
    ShortBlobError,
)
from graphstash_server.logs import in_background
from graphstash_server.storage.base import CHUNK_BYTES, BlobReader, BlobStore
from graphstash_server.storage.upload import DiskUpload

__all__ = ["ReadThroughFill", "TierError"]

T = TypeVar("T")


class TierError(Exception):
    """The tier cannot hold the blob. Read it from the back."""


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
        file: DiskUpload,
        destination: str,
        threads: ThreadPoolExecutor,
        on_end: "Callable[[ReadThroughFill], None]",
    ) -> None:
        """Start copying into `file`, which finally gets the name `destination`. `on_end` is called
        when the copy has succeeded, failed or been cancelled.
        """
        self.digest = digest
        self.back = back
        self.is_wanted = True
        self.is_given_up = False
        self.is_damaged = False
        self.failure: Exception | None = None
        self._file = file
        self._destination = destination
        self._threads = threads
        self._on_end = on_end
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
            self._on_end(self)
            try:
                await asyncio.shield(self._on_thread(self._file.discard))
                await self._notify()
            finally:
                if not self._follower_count:
                    self._file.close()

    async def _copy(self) -> None:
        size_bytes = self.digest.size_bytes
        await self._in_tier(self._file.check_space)
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
        if self.is_wanted:
            await self._in_tier(partial(self._file.keep, self._destination))
        if not self.is_wanted:
            await self._in_tier(partial(Path(self._destination).unlink, missing_ok=True))

    async def _copy_from(self, reader: BlobReader) -> None:
        position = 0
        async for chunk in reader.chunks(0, self.digest.size_bytes):
            await self._in_tier(partial(self._file.write, [chunk]))
            position += len(chunk)
            if position < self.digest.size_bytes:
                self._readable_bytes = position
                await self._notify()
        try:
            await self._in_tier(partial(self._file.finish, ()))
        except DigestMismatchError as error:
            self.is_damaged = True
            raise ShortBlobError(
                f"the bytes of {self.digest} are those of {error.digest}"
            ) from error
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
        return asyncio.get_running_loop().run_in_executor(self._threads, call)


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
