"""BlobStoreContract: the guarantees of `BlobStore`, as tests that every store inherits.

    class TestDiskBlobStore(BlobStoreContract):
        @pytest.fixture
        def store(self, tmp_path): ...

The tests need anyio's plug-in of pytest, which comes with the server's packages.
"""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from graphstash_schema import Digest
from graphstash_server.errors import DigestMismatchError, LengthMismatchError, ShortBlobError
from graphstash_server.storage import BlobStore

__all__ = ["BlobStoreContract", "as_chunks", "read_blob"]

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

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def anyio_backend(self) -> str:
        """Stores need asyncio. Without this fixture, the plug-in also runs the tests on trio."""
        return "asyncio"

    @pytest.fixture
    def store(self) -> BlobStore:
        """An empty store."""
        raise NotImplementedError

    @pytest.mark.parametrize("blob", [b"", b"x", _LARGE], ids=["empty", "one", "large"])
    async def test_stored_blob_is_read_back(self, store: BlobStore, blob: bytes) -> None:
        await _put(store, blob)
        assert await read_blob(store, Digest.of(blob)) == blob
        assert await store.stat(Digest.of(blob)) == len(blob)

    async def test_upload_in_other_chunks_stores_the_same_bytes(self, store: BlobStore) -> None:
        pieces = [_LARGE[start : start + 70_001] for start in range(0, len(_LARGE), 70_001)]
        await store.put(Digest.of(_LARGE), as_chunks(*pieces, b""))
        assert await read_blob(store, Digest.of(_LARGE)) == _LARGE

    async def test_putting_again_changes_nothing(self, store: BlobStore) -> None:
        await _put(store, b"abc")
        await _put(store, b"abc")
        assert await _all(store) == [Digest.of(b"abc")]
        assert await read_blob(store, Digest.of(b"abc")) == b"abc"

    async def test_any_part_can_be_read(self, store: BlobStore) -> None:
        await _put(store, _LARGE)
        for start, stop in ((0, 1), (5, 5), (1_048_570, 1_048_580), (2_999_999, 3_072_000)):
            assert await read_blob(store, Digest.of(_LARGE), start, stop) == _LARGE[start:stop]

    @pytest.mark.parametrize("blob", [b"short", _LARGE], ids=["small", "large"])
    async def test_reading_past_the_end_is_an_error(self, store: BlobStore, blob: bytes) -> None:
        await _put(store, blob)
        with pytest.raises(ShortBlobError):
            await read_blob(store, Digest.of(blob), 0, len(blob) + 1)

    async def test_another_length_is_refused_and_nothing_stays(self, store: BlobStore) -> None:
        for sent in (b"ab", b"abcd", b""):
            with pytest.raises(LengthMismatchError):
                await store.put(Digest.of(b"abc"), as_chunks(sent))
            assert await _all(store) == []

    async def test_other_bytes_are_refused_and_nothing_stays(self, store: BlobStore) -> None:
        with pytest.raises(DigestMismatchError) as refusal:
            await store.put(Digest.of(b"abc"), as_chunks(b"ab", b"d"))
        assert str(Digest.of(b"abd")) in str(refusal.value)
        assert await _all(store) == []

    async def test_upload_with_the_digest_of_a_stored_blob_is_checked(
        self, store: BlobStore
    ) -> None:
        await _put(store, b"abc")
        with pytest.raises(DigestMismatchError):
            await store.put(Digest.of(b"abc"), as_chunks(b"xyz"))
        assert await read_blob(store, Digest.of(b"abc")) == b"abc"

    async def test_a_failing_sender_leaves_nothing(self, store: BlobStore) -> None:
        async def failing() -> AsyncIterator[bytes]:
            yield _LARGE[:2_000_000]
            raise ConnectionResetError

        with pytest.raises(ConnectionResetError):
            await store.put(Digest.of(_LARGE), failing())
        assert await _all(store) == []

    async def test_absent_or_deleted_blob_is_none(self, store: BlobStore) -> None:
        await store.delete(Digest.of(b"abc"))
        assert await store.open(Digest.of(b"abc")) is None
        await _put(store, b"abc")
        await store.delete(Digest.of(b"abc"))
        assert await store.open(Digest.of(b"abc")) is None
        assert await store.stat(Digest.of(b"abc")) is None
        assert await _all(store) == []

    @pytest.mark.parametrize("blob", [b"small", _LARGE], ids=["small", "large"])
    async def test_open_blob_is_read_to_its_end_after_deletion(
        self, store: BlobStore, blob: bytes
    ) -> None:
        await _put(store, blob)
        reader = await store.open(Digest.of(blob))
        assert reader is not None
        await store.delete(Digest.of(blob))
        assert b"".join([chunk async for chunk in reader.chunks(0, len(blob))]) == blob
        await reader.close()
        await reader.close()

    async def test_the_list_is_in_order(self, store: BlobStore) -> None:
        blobs = [bytes([number]) * number for number in range(40)]
        for blob in blobs:
            await _put(store, blob)
        listed = sorted(map(Digest.of, blobs), key=lambda digest: digest.sha256)
        assert await _all(store) == listed

    async def test_list_before_a_time_leaves_out_younger_blobs(self, store: BlobStore) -> None:
        await _put(store, b"abc")
        now, hour = datetime.now(UTC), timedelta(hours=1)
        assert await _all(store, before=now - hour) == []
        assert await _all(store, before=now + hour) == [Digest.of(b"abc")]

    async def test_concurrent_puts_of_one_blob_agree(self, store: BlobStore) -> None:
        await asyncio.gather(*(_put(store, _LARGE) for _ in range(8)))
        assert await _all(store) == [Digest.of(_LARGE)]
        assert await read_blob(store, Digest.of(_LARGE)) == _LARGE
