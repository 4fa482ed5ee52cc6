"""Blobs in Google Cloud Storage and Azure: a bucket that fails is no bucket that lost its blobs."""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from graphstash_schema import Digest, ErrorCode
from graphstash_server.errors import ServerError, StartError
from graphstash_server.settings import load_settings
from graphstash_server.storage import open_blob_store
from graphstash_server.testing import LiveServer, as_chunks, read_blob
from support.s3_proxy import S3Fault, S3Proxy
from support.waiting import until

SMALL = b"small" * 1000
PARTS = bytes(range(256)) * 80_000  # 20 MB: sent in parts
SETTING = {"gcs": "gcs_bucket", "azure": "azure_container"}
EMULATOR = {"gcs": "fake_gcs", "azure": "azurite"}

pytestmark = [pytest.mark.anyio, pytest.mark.extended]


AZURE = (pytest.mark.npm, pytest.mark.timeout(900))  # the first test installs Azurite


@pytest.fixture(params=["gcs", pytest.param("azure", marks=AZURE)])
def kind(request):
    return request.param


@pytest.fixture
def emulator(kind, request, monkeypatch):
    """An emulator for the whole session. Each test uses buckets of its own."""
    emulator = request.getfixturevalue(EMULATOR[kind])
    for name, value in emulator.variables.items():
        monkeypatch.setenv(name, value)
    return emulator


def settings_of(kind, bucket, tmp_path, **more):
    more |= {"blob_store": kind, SETTING[kind]: bucket, "data_dir": tmp_path / "data"}
    return load_settings(tier_limit_bytes=0, **more)


async def put(store, blob):
    await store.put(Digest.of(blob), as_chunks(blob))


async def refused(settings):
    """Return the error of a server that refuses to start. It must be one line."""
    with pytest.raises(StartError) as refusal:
        async with open_blob_store(settings):
            raise AssertionError("it started")
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


async def test_large_blob_is_sent_in_parts_and_lost_object_is_absent(kind, emulator, tmp_path):
    settings = settings_of(kind, emulator.new_bucket(), tmp_path)
    async with open_blob_store(settings) as store:
        await put(store, PARTS)
        digest = Digest.of(PARTS)
        assert await read_blob(store, digest) == PARTS
        assert await read_blob(store, digest, 9_000_000, 9_000_100) == PARTS[9_000_000:9_000_100]
        assert [each async for each in store.list()] == [digest]
        await store.delete(digest)
        assert (await store.stat(digest), await store.open(digest)) == (None, None)


async def test_missing_bucket_is_refused_at_start_and_never_looks_like_lost_blobs(
    kind, emulator, tmp_path
):
    said = await refused(settings_of(kind, "no-such-bucket", tmp_path))
    name = f"GRAPHSTASH_{SETTING[kind].upper()}"
    assert said.startswith(f"{name}=no-such-bucket cannot be used")
    assert f"or fix {name}" in said

    bucket = emulator.new_bucket()
    async with open_blob_store(settings_of(kind, bucket, tmp_path)) as store:
        emulator.remove_bucket(bucket)
        for call in (store.open, store.stat, store.delete):
            with pytest.raises(ServerError, match=bucket) as refusal:
                await call(Digest.of(SMALL))
            assert refusal.value.code is ErrorCode.UNAVAILABLE


def test_server_answers_503_while_store_is_down_and_keeps_its_rows(
    kind, emulator, tmp_path, *, connect, problem
):
    settings = settings_of(kind, emulator.new_bucket(), tmp_path)
    given = settings.model_dump(include={"blob_store", SETTING[kind], "tier_limit_bytes"})
    with LiveServer(tmp_path / "data", log_level="error", **given) as server:
        api = connect(server.url)
        assert api.put(SMALL, 1).status_code == 201
        with emulator.frozen(), ThreadPoolExecutor() as pool:  # both wait for half a minute
            got, stored = pool.submit(api.get, 1), pool.submit(api.put, b"other", 2)
            problem(got.result(), 503, "unavailable", "get a blob")
            problem(stored.result(), 503, "unavailable", "")
        assert api.get(1).content == SMALL
        assert api.get(2).status_code == 404


@pytest.fixture
def proxy(emulator, monkeypatch):
    with S3Proxy(emulator.port) as made:
        for name, value in emulator.variables.items():
            monkeypatch.setenv(name, value.replace(emulator.url, made.url))
        yield made


async def test_request_that_fails_once_is_repeated(kind, emulator, proxy, tmp_path):
    async with open_blob_store(settings_of(kind, emulator.new_bucket(), tmp_path)) as store:
        proxy.fault, proxy.left = S3Fault.FAILING, 1
        await put(store, SMALL)
        assert proxy.left == 0
        proxy.left = 1
        assert await read_blob(store, Digest.of(SMALL)) == SMALL
        assert proxy.left == 0


def test_upload_that_is_cancelled_leaves_nothing(kind, emulator, proxy, tmp_path):
    async def cancelled():
        settings = settings_of(kind, emulator.new_bucket(), tmp_path)
        async with open_blob_store(settings) as store:
            with emulator.frozen():
                asked = len(proxy.seen)
                task = asyncio.create_task(put(store, PARTS))
                await asyncio.to_thread(until, lambda: len(proxy.seen) > asked)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with open_blob_store(settings) as store:
            return [each async for each in store.list()]

    assert asyncio.run(cancelled()) == []


async def test_missing_library_is_named(kind, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, f"graphstash_server.storage.{kind}", raising=False)
    monkeypatch.setitem(sys.modules, {"gcs": "google.cloud", "azure": "obstore"}[kind], None)
    said = await refused(settings_of(kind, "bucket", tmp_path))
    assert said.endswith(f"pip install 'graphstash[server,{kind}] @ git+<repository>'")
    with pytest.raises(StartError, match=f"^GRAPHSTASH_{SETTING[kind].upper()}= is not valid"):
        load_settings(blob_store=kind)
