"""BlobStoreContract: the guarantees of `BlobStore`, as tests that every store inherits.

    class TestDiskBlobStore(BlobStoreContract):
        @pytest.fixture
        def store(self, tmp_path): ...

Each test runs an event loop, so no pytest plug-in is needed.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest

from graphstash_schema import Digest
from graphstash_server.errors import DigestMismatchError, LengthMismatchError, ShortBlobError
from graphstash_server.storage import BlobStore

__all__ = ["BlobStoreContract", "as_chunks", "read_blob"]

T = TypeVar("T")

_LARGE = bytes(range(256)) * 12_000  # 3 MB: more than one chunk


async def as_chunks(*chunks: bytes) -> AsyncIterator[bytes]:
    """Yield chunks, like the body of an upload."""
    for chunk in chunks:
        yield chunk


async def read_blob(
    store: BlobStore, digest: Digest, start: int = 0, stop: int | None = None
) -> bytes | None:
    """Return the bytes of a blob from `start` to `stop`, or None if it is absent."""
    reader = await store.open(digest)
    if reader is None:
        return None
    try:
        end = reader.size_bytes if stop is None else stop
        return b"".join([chunk async for chunk in reader.chunks(start, end)])
    finally:
        await reader.close()


async def _put(store: BlobStore, blob: bytes) -> None:
    await store.put(Digest.of(blob), as_chunks(blob))


async def _all(store: BlobStore, *, before: datetime | None = None) -> list[Digest]:
    return [digest async for digest in store.list(before=before)]


class BlobStoreContract:
    """Inherit from this class and provide the fixture `store`."""

    @pytest.fixture
    def store(self) -> BlobStore:
        """An empty store."""
        raise NotImplementedError

    @staticmethod
    def run(test: Coroutine[Any, Any, T]) -> T:
        """Run one test's coroutine. A store that needs its own loop overrides this."""
        return asyncio.run(test)

    @pytest.mark.parametrize("blob", [b"", b"x", _LARGE], ids=["empty", "one", "large"])
    def test_stored_blob_is_read_back(self, store: BlobStore, blob: bytes) -> None:
        async def test() -> tuple[bytes | None, int | None]:
            await _put(store, blob)
            digest = Digest.of(blob)
            return await read_blob(store, digest), await store.stat(digest)

        assert self.run(test()) == (blob, len(blob))

    def test_upload_in_other_chunks_stores_the_same_bytes(self, store: BlobStore) -> None:
        pieces = [_LARGE[start : start + 70_001] for start in range(0, len(_LARGE), 70_001)]

        async def test() -> bytes | None:
            await store.put(Digest.of(_LARGE), as_chunks(*pieces, b""))
            return await read_blob(store, Digest.of(_LARGE))

        assert self.run(test()) == _LARGE

    def test_putting_again_changes_nothing(self, store: BlobStore) -> None:
        async def test() -> tuple[list[Digest], bytes | None]:
            await _put(store, b"abc")
            await _put(store, b"abc")
            return await _all(store), await read_blob(store, Digest.of(b"abc"))

        assert self.run(test()) == ([Digest.of(b"abc")], b"abc")

    @pytest.mark.parametrize(
        ("start", "stop"), [(0, 1), (5, 5), (1_048_570, 1_048_580), (2_999_999, 3_072_000)]
    )
    def test_any_part_can_be_read(self, store: BlobStore, start: int, stop: int) -> None:
        async def test() -> bytes | None:
            await _put(store, _LARGE)
            return await read_blob(store, Digest.of(_LARGE), start, stop)

        assert self.run(test()) == _LARGE[start:stop]

    @pytest.mark.parametrize("blob", [b"short", _LARGE], ids=["small", "large"])
    def test_reading_past_the_end_is_an_error(self, store: BlobStore, blob: bytes) -> None:
        async def test() -> None:
            await _put(store, blob)
            await read_blob(store, Digest.of(blob), 0, len(blob) + 1)

        with pytest.raises(ShortBlobError):
            self.run(test())

    @pytest.mark.parametrize("sent", [b"ab", b"abcd", b""], ids=["less", "more", "nothing"])
    def test_another_length_is_refused_and_nothing_stays(
        self, store: BlobStore, sent: bytes
    ) -> None:
        async def test() -> None:
            await store.put(Digest.of(b"abc"), as_chunks(sent))

        with pytest.raises(LengthMismatchError):
            self.run(test())
        assert self.run(_all(store)) == []

    def test_other_bytes_are_refused_and_nothing_stays(self, store: BlobStore) -> None:
        async def test() -> None:
            await store.put(Digest.of(b"abc"), as_chunks(b"ab", b"d"))

        with pytest.raises(DigestMismatchError) as refusal:
            self.run(test())
        assert str(Digest.of(b"abd")) in str(refusal.value)
        assert self.run(_all(store)) == []

    def test_upload_with_the_digest_of_a_stored_blob_is_checked(self, store: BlobStore) -> None:
        async def test() -> None:
            await _put(store, b"abc")
            await store.put(Digest.of(b"abc"), as_chunks(b"xyz"))

        with pytest.raises(DigestMismatchError):
            self.run(test())
        assert self.run(read_blob(store, Digest.of(b"abc"))) == b"abc"

    def test_a_failing_sender_leaves_nothing(self, store: BlobStore) -> None:
        async def failing() -> AsyncIterator[bytes]:
            yield _LARGE[:2_000_000]
            raise ConnectionResetError

        async def test() -> None:
            await store.put(Digest.of(_LARGE), failing())

        with pytest.raises(ConnectionResetError):
            self.run(test())
        assert self.run(_all(store)) == []

    def test_absent_blob_is_none(self, store: BlobStore) -> None:
        async def test() -> tuple[object, ...]:
            digest = Digest.of(b"absent")
            await store.delete(digest)
            return await store.open(digest), await store.stat(digest)

        assert self.run(test()) == (None, None)

    def test_a_deleted_blob_is_absent(self, store: BlobStore) -> None:
        async def test() -> tuple[object, ...]:
            await _put(store, b"abc")
            await store.delete(Digest.of(b"abc"))
            return await read_blob(store, Digest.of(b"abc")), await _all(store)

        assert self.run(test()) == (None, [])

    @pytest.mark.parametrize("blob", [b"small", _LARGE], ids=["small", "large"])
    def test_open_blob_is_read_to_its_end_after_deletion(
        self, store: BlobStore, blob: bytes
    ) -> None:
        async def test() -> bytes:
            await _put(store, blob)
            reader = await store.open(Digest.of(blob))
            assert reader is not None
            await store.delete(Digest.of(blob))
            read = b"".join([chunk async for chunk in reader.chunks(0, len(blob))])
            await reader.close()
            await reader.close()
            return read

        assert self.run(test()) == blob

    def test_the_list_is_in_order(self, store: BlobStore) -> None:
        blobs = [bytes([number]) * number for number in range(40)]

        async def test() -> list[Digest]:
            for blob in blobs:
                await _put(store, blob)
            return await _all(store)

        assert self.run(test()) == sorted(map(Digest.of, blobs), key=lambda digest: digest.sha256)

    def test_list_before_a_time_leaves_out_younger_blobs(self, store: BlobStore) -> None:
        async def test() -> tuple[int, int]:
            await _put(store, b"abc")
            now = datetime.now(UTC)
            hour = timedelta(hours=1)
            old = await _all(store, before=now - hour)
            return len(old), len(await _all(store, before=now + hour))

        assert self.run(test()) == (0, 1)

    def test_concurrent_puts_of_one_blob_agree(self, store: BlobStore) -> None:
        async def test() -> tuple[list[Digest], bytes | None]:
            await asyncio.gather(*(_put(store, _LARGE) for _ in range(8)))
            return await _all(store), await read_blob(store, Digest.of(_LARGE))

        assert self.run(test()) == ([Digest.of(_LARGE)], _LARGE)
