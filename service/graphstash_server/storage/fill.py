"""Fill: one blob on its way from the back into the tier, and everybody who reads it meanwhile.

The blob is asked for once. Readers follow the growing file; they get its last bytes only when all
of it was compared with its digest, so a damaged blob never looks whole. A fill that nobody follows
any more is given up.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from graphstash_schema import Digest
from graphstash_server.errors import NoSpaceError, ServerError, ShortBlobError
from graphstash_server.storage.base import CHUNK_BYTES, BlobReader, BlobStore
from graphstash_server.storage.growing import GrowingFile
from graphstash_server.storage.space import SpaceGuard

__all__ = ["Fill", "Place", "TierError"]

T = TypeVar("T")


class TierError(Exception):
    """The tier cannot hold the blob; the back has it all the same."""


class Place(NamedTuple):
    """Where a fill puts its blob.

    Attributes:
        temporary: directory of files that are not whole yet.
        destination: the blob's own name.
        space: of their disk.
        threads: for everything that touches the files.
    """

    temporary: Path
    destination: Path
    space: SpaceGuard
    threads: ThreadPoolExecutor


class Fill:
    """Used from the event loop only.

    Attributes:
        digest: of the blob.
        back: who has it.
        is_wanted: whether the blob is kept at the end; a deletion meanwhile says no.
        is_given_up: whether the fill ends because nobody follows it.
        is_damaged: whether the back's bytes were not those of the digest.
        failure: why it did not come to its end, if it did not.
    """

    def __init__(
        self, digest: Digest, *, back: BlobStore, place: Place, ended: "Callable[[Fill], None]"
    ) -> None:
        """Starts copying; `ended` is called when nobody can follow any more."""
        self.digest = digest
        self.back = back
        self.is_wanted = True
        self.is_given_up = False
        self.is_damaged = False
        self.failure: Exception | None = None
        self._place = place
        self._file = GrowingFile(place.temporary)
        self._ended = ended
        self._changed = asyncio.Condition()
        self._follower_count = 0
        self._is_found: bool | None = None
        self._readable_bytes = 0
        self._task = asyncio.create_task(self._run())

    async def follow(self) -> BlobReader | None:
        """A reader of the growing file; None when the back has no such blob.

        Raises:
            TierError: when the tier cannot hold it.
            ServerError: when the back does not answer.
        """
        self._follower_count += 1
        try:
            is_found = await self._look()
        except BaseException:
            self.leave()
            raise
        if is_found:
            return _Follower(self)
        self.leave()
        return None

    def leave(self) -> None:
        """One who followed goes away."""
        self._follower_count -= 1
        if self._follower_count:
            return
        if self._task.done():
            self._file.close()
        elif self._readable_bytes < self.digest.size_bytes and self.failure is None:
            self.is_given_up = True
            self._task.cancel()

    async def read(self, start: int, stop: int) -> bytes:
        """Some bytes from `start` on, at most to `stop`; waits until there are any.

        Raises:
            TierError: when the tier gave up; the back may be asked for the rest.
            ShortBlobError: when the back broke off, or its bytes are damaged.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._readable_bytes > start or self.failure is not None
            )
        if self._readable_bytes > start:
            wanted = min(CHUNK_BYTES, stop - start, self._readable_bytes - start)
            chunk = await self._in_tier(partial(self._file.read, start, wanted))
            if not chunk:
                raise TierError(f"the file of {self.digest} was cut at {start}")
            return chunk
        if isinstance(self.failure, TierError):
            raise self.failure
        raise ShortBlobError(f"{self.digest} ends at {start}, not {stop}: {self.failure}")

    async def cancel(self) -> None:
        """Ends it, whoever follows."""
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _look(self) -> bool:
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._is_found is not None or self.failure is not None
            )
        if self._is_found is None and self.failure is not None:
            raise self.failure
        return bool(self._is_found)

    async def _run(self) -> None:
        """The outermost frame of its task: a failure goes to those who follow."""
        try:
            await self._copy()
        except asyncio.CancelledError:
            self.failure = ShortBlobError(f"{self.digest} was given up")
            raise
        except Exception as error:  # noqa: BLE001 - see above
            self.failure = error
        finally:
            self._ended(self)
            try:
                await asyncio.shield(self._on_thread(self._file.discard))
            finally:
                if not self._follower_count:
                    self._file.close()
            await self._tell()

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
                    raise TierError(f"{self.digest} has {reader.size_bytes} bytes in the back")
                self._is_found = True
                await self._tell()
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
        """Takes the room; one that is given up meanwhile gives it back."""
        space = self._place.space
        taking = asyncio.ensure_future(self._in_tier(partial(space.reserve, size_bytes)))

        def give_back(taken: "asyncio.Future[None]") -> None:
            if not taken.cancelled() and taken.exception() is None:
                space.release(size_bytes)

        try:
            await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(give_back)
            raise

    async def _copy_from(self, reader: BlobReader) -> None:
        position = 0
        async for chunk in reader.chunks(0, self.digest.size_bytes):
            await self._in_tier(partial(self._file.write, chunk))
            position += len(chunk)
            if position < self.digest.size_bytes:
                self._readable_bytes = position
                await self._tell()
        received = self._file.digest()
        if received != self.digest:
            self.is_damaged = True
            raise ShortBlobError(f"the bytes of {self.digest} are those of {received}")
        self._readable_bytes = position
        await self._tell()

    async def _tell(self) -> None:
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
    """A `BlobReader` of a growing file; goes on in the back when the tier cannot."""

    path: Path | None = None

    def __init__(self, fill: Fill) -> None:
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
