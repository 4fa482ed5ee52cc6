"""All blob stores satisfy one contract, and the disk store has further guarantees."""

import asyncio
import contextlib
import fcntl
import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphstash_schema import Digest, ErrorCode
from graphstash_server.errors import NoSpaceError, ServerError
from graphstash_server.settings import load_settings
from graphstash_server.storage import DiskBlobStore, TieredBlobStore, azure, gcs, s3
from graphstash_server.testing import BlobStoreContract, MemoryBlobStore, as_chunks
from support.moto import CREDENTIALS, s3_settings

NUMBERS = itertools.count()

pytestmark = pytest.mark.anyio


class TestMemoryBlobStore(BlobStoreContract):
    @pytest.fixture
    def store(self):
        return MemoryBlobStore()


async def test_memory_store_counts_all_chunks_of_an_upload_towards_its_capacity():
    store = MemoryBlobStore(capacity_bytes=10)
    with pytest.raises(NoSpaceError) as refused:
        await store.put(Digest.of(b"abcdefghijkl"), as_chunks(b"abcdef", b"ghijkl"))
    assert (refused.value.limit, store.blobs) == (4, {})
    await store.put(Digest.of(b"abcdefghij"), as_chunks(b"abcdef", b"ghij"))
    assert list(store.blobs.values()) == [b"abcdefghij"]


class TestDiskBlobStore(BlobStoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        store = DiskBlobStore(tmp_path / "blobs")
        yield store
        asyncio.run(store.close())
        assert list((tmp_path / "blobs" / "tmp").iterdir()) == []


async def test_names_of_a_new_store_survive_a_power_cut(tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync

    def noted(fd):
        synced.add(Path(f"/proc/self/fd/{fd}").readlink())
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    blobs = tmp_path / "data" / "blobs"
    await DiskBlobStore(blobs).close()
    assert {blobs, blobs.parent, tmp_path} <= synced


@contextlib.contextmanager
def opened(driver, variables, data_dir, **settings):
    with pytest.MonkeyPatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        store = driver.open_store(load_settings(data_dir=data_dir, **settings))
    yield store
    asyncio.run(store.close())
    assert list(data_dir.joinpath("spool").iterdir()) == []


def opened_s3(data_dir, server):
    return opened(s3, CREDENTIALS, data_dir, **s3_settings(server.url, server.new_bucket()))


def emptied(store):
    """Give a store an unused prefix. The store is then empty, and needs no new client."""
    store._prefix = f"test-{next(NUMBERS)}/blobs/sha256/"
    return store


@pytest.fixture(scope="module")
def s3_on_moto(tmp_path_factory, moto):
    with opened_s3(tmp_path_factory.mktemp("moto"), moto) as store:
        yield store


@pytest.fixture(scope="module")
def s3_on_swift(tmp_path_factory, swift):
    with opened_s3(tmp_path_factory.mktemp("swift"), swift) as store:
        yield store


class TestObjectBlobStoreOnMoto(BlobStoreContract):
    @pytest.fixture
    def store(self, s3_on_moto):
        return emptied(s3_on_moto)


@pytest.mark.extended
class TestObjectBlobStoreOnSwift(BlobStoreContract):
    @pytest.fixture
    def store(self, s3_on_swift):
        return emptied(s3_on_swift)


@pytest.fixture(scope="module")
def on_fake_gcs(tmp_path_factory, fake_gcs):
    settings = {"blob_store": "gcs", "gcs_bucket": fake_gcs.new_bucket()}
    with opened(gcs, fake_gcs.variables, tmp_path_factory.mktemp("gcs"), **settings) as store:
        yield store


@pytest.fixture(scope="module")
def on_azurite(tmp_path_factory, azurite):
    settings = {"blob_store": "azure", "azure_container": azurite.new_bucket()}
    with opened(azure, azurite.variables, tmp_path_factory.mktemp("azure"), **settings) as store:
        yield store


@pytest.mark.extended
class TestObjectBlobStoreOnFakeGcs(BlobStoreContract):
    @pytest.fixture
    def store(self, on_fake_gcs):
        return emptied(on_fake_gcs)


@pytest.mark.extended
@pytest.mark.npm
@pytest.mark.timeout(900)  # the first test installs Azurite
class TestObjectBlobStoreOnAzurite(BlobStoreContract):
    @pytest.fixture
    def store(self, on_azurite):
        return emptied(on_azurite)


@contextlib.contextmanager
def in_front_of(store, directory):
    tier = TieredBlobStore(store, directory, limit_bytes=2**30)
    yield tier
    asyncio.run(tier.close())
    assert list((directory / "tmp").iterdir()) == []


class TestTierInFrontOfMemory(BlobStoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        with in_front_of(MemoryBlobStore(), tmp_path / "tier") as tier:
            yield tier


@pytest.mark.extended
class TestTierInFrontOfMoto(BlobStoreContract):
    @pytest.fixture
    def store(self, tmp_path, s3_on_moto):
        with in_front_of(emptied(s3_on_moto), tmp_path / "tier") as tier:
            yield tier


@pytest.fixture
def disk(tmp_path):
    store = DiskBlobStore(tmp_path / "blobs")
    yield store
    asyncio.run(store.close())


async def put(store, blob):
    return await store.put(Digest.of(blob), as_chunks(blob))


async def test_blob_is_stored_under_its_digest_and_second_put_repairs_it(disk, tmp_path):
    await put(disk, b"abc")
    sha256 = Digest.of(b"abc").sha256
    path = tmp_path / "blobs" / "sha256" / sha256[:2] / sha256
    assert path.read_bytes() == b"abc"
    assert path.stat().st_mode & 0o777 == 0o600

    path.write_bytes(b"xyz")
    await put(disk, b"abc")
    assert path.read_bytes() == b"abc"


async def test_upload_is_refused_once_other_writers_have_filled_the_disk(
    disk, tmp_path, monkeypatch
):
    blob = bytes(3_000_000)
    room = iter([len(blob), 0])
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=next(room), f_frsize=1))
    with pytest.raises(NoSpaceError):
        await disk.put(Digest.of(blob), as_chunks(blob[:2_000_000], blob[2_000_000:]))
    assert [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()] == []


async def test_store_removes_crash_leftovers_but_no_live_upload_or_other_file(tmp_path):
    temporary, shard = tmp_path / "tmp", tmp_path / "sha256" / "00"
    for directory in (temporary, shard):
        directory.mkdir(parents=True)
    (temporary / "abandoned").write_bytes(b"half")
    (shard / "README").write_text("mine")
    (shard / ("f" * 64)).write_text("in the wrong place")
    with (temporary / "live").open("wb") as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        store = DiskBlobStore(tmp_path)
        assert [path.name for path in temporary.iterdir()] == ["live"]
    await put(store, b"abc")
    assert [digest async for digest in store.list()] == [Digest.of(b"abc")]
    assert (shard / "README").exists()
    await store.close()


async def test_vanished_store_is_unavailable_instead_of_empty(disk, tmp_path):
    await put(disk, b"abc")
    (tmp_path / "blobs").rename(tmp_path / "elsewhere")
    digest = Digest.of(b"abc")
    for call in (disk.open(digest), disk.stat(digest), anext(disk.list())):
        with pytest.raises(ServerError) as refusal:
            await call
        assert refusal.value.code is ErrorCode.UNAVAILABLE
