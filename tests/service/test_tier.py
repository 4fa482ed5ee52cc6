"""The disk tier fetches each blob once, serves only verified bytes, and never fails a request."""

import asyncio
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from graphstash_schema import Digest, ErrorCode
from graphstash_server.errors import ServerError, ShortBlobError
from graphstash_server.settings import load_settings
from graphstash_server.storage import TieredBlobStore
from graphstash_server.storage.s3 import open_store
from graphstash_server.storage.upload import DiskUpload
from graphstash_server.testing import (
    LiveServer,
    MemoryBlobStore,
    ServerProcess,
    as_chunks,
    read_blob,
)
from support.moto import CREDENTIALS, s3_settings
from support.s3_proxy import S3Fault, S3Proxy
from support.waiting import until

SMALL = b"small" * 1000
LARGE = bytes(range(256)) * 20_000  # 5 MB
IN_S3 = "/blobs/sha256/"

pytestmark = pytest.mark.anyio


class Back(MemoryBlobStore):
    """A store that counts requests and can refuse them."""

    def __init__(self):
        super().__init__()
        self.opened = 0
        self.is_up = True

    async def open(self, digest):
        self.opened += 1
        if not self.is_up:
            raise ServerError(ErrorCode.UNAVAILABLE, "down")
        return await super().open(digest)


@pytest.fixture
def back():
    return Back()


@pytest.fixture
def opened(tmp_path):
    """Open tiers, and close them after the test."""
    made = []

    def make(back, *, limit_bytes=2**30, **more):
        made.append(TieredBlobStore(back, tmp_path / "tier", limit_bytes=limit_bytes, **more))
        return made[-1]

    yield make
    for store in made:
        asyncio.run(store.close())


@pytest.fixture
def s3(tmp_path, moto, proxy, s3_credentials):
    settings = s3_settings(proxy.url, moto.new_bucket())
    store = open_store(load_settings(data_dir=tmp_path / "s3", **settings))
    yield store
    asyncio.run(store.close())


def copies(directory):
    """Return the files of copies, by the SHA-256 of their blobs."""
    found = (directory / "tier" / "sha256").rglob("*")
    return {path.name: path for path in found if path.is_file()}


def opened_in(directory):
    """Return the files of a directory that this process has open."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(fd.readlink())
    return [path for path in found if path.is_relative_to(directory)]


async def put(store, *blobs):
    for blob in blobs:
        await store.put(Digest.of(blob), as_chunks(blob))


async def settled(store):
    """Wait until the copies are stored."""
    fills = list(store._fills.values())
    await asyncio.gather(*(fill._task for fill in fills), return_exceptions=True)


async def read(store, blob):
    """Read a blob, and wait until its copy is stored."""
    found = await read_blob(store, Digest.of(blob))
    await settled(store)
    return found


async def whole_of(reader, first=b""):
    """Read the rest of LARGE, and close the reader."""
    rest = [chunk async for chunk in reader.chunks(len(first), len(LARGE))]
    await reader.close()
    return first + b"".join(rest)


class TestCopies:
    async def test_blob_is_fetched_once_and_its_copy_survives_an_outage(
        self, opened, back, tmp_path
    ):
        async def link(_digest):
            return "https://elsewhere"

        back.link = link
        store = opened(back)
        await put(store, b"abc", b"def")
        assert copies(tmp_path) == {}
        assert await store.link(Digest.of(b"abc")) == "https://elsewhere"

        assert [await read(store, b"abc") for _ in range(2)] == [b"abc"] * 2
        back.is_up = False
        assert await read(store, b"abc") == b"abc"
        with pytest.raises(ServerError):
            await read(store, b"def")

        assert back.opened == 2
        assert copies(tmp_path).keys() == {Digest.of(b"abc").sha256}
        assert await store.link(Digest.of(b"abc")) is None
        reader = await store.open(Digest.of(b"abc"))
        await reader.close()
        assert reader.path.read_bytes() == b"abc"

    async def test_put_or_truncation_drops_the_copy_and_the_back_decides_presence(
        self, opened, back, tmp_path
    ):
        store = opened(back)
        await put(store, LARGE)
        await read(store, LARGE)
        (copy,) = copies(tmp_path).values()
        os.truncate(copy, 1000)
        assert await read(store, LARGE) == LARGE
        assert (back.opened, copy.stat().st_size) == (2, len(LARGE))

        back.blobs.clear()
        assert await store.stat(Digest.of(LARGE)) is None
        await put(store, LARGE)
        assert copies(tmp_path) == {}


class TestFills:
    async def test_concurrent_readers_share_one_request(self, opened, s3, proxy):
        store = opened(s3)
        await put(store, LARGE)
        before = proxy.count("GET", within=IN_S3)

        reads = (read_blob(store, Digest.of(LARGE)) for _ in range(20))
        assert await asyncio.gather(*reads) == [LARGE] * 20
        assert proxy.count("GET", within=IN_S3) == before + 1

    async def test_readers_follow_growing_file_after_others_leave_or_are_cancelled(
        self, opened, s3, proxy
    ):
        store = opened(s3)
        await put(store, LARGE)
        proxy.fault = S3Fault.PAUSE

        cancelled = asyncio.create_task(read_blob(store, Digest.of(LARGE)))
        await asyncio.sleep(0)
        leaving, *staying = [await store.open(Digest.of(LARGE)) for _ in range(3)]
        cancelled.cancel()
        await leaving.close()
        firsts = [await anext(each.chunks(0, 1000)) for each in staying]  # half of it is missing
        proxy.resume.set()
        wholes = [await whole_of(*each) for each in zip(staying, firsts, strict=True)]
        assert wholes == [LARGE] * 2

    async def test_fill_without_readers_is_cancelled(self, opened, s3, proxy, tmp_path):
        store = opened(s3)
        await put(store, LARGE)
        proxy.fault = S3Fault.PAUSE

        reader = await store.open(Digest.of(LARGE))
        await anext(reader.chunks(0, 10))
        filling = asyncio.create_task(settled(store))
        await asyncio.sleep(0)
        await reader.close()
        proxy.resume.set()
        await filling
        assert copies(tmp_path) == {}
        assert list((tmp_path / "tier" / "tmp").iterdir()) == []
        assert await read(store, LARGE) == LARGE

    @pytest.mark.parametrize("fault", [S3Fault.CUT, S3Fault.CUT_BY_RESET])
    async def test_interrupted_fill_leaves_no_copy(self, opened, s3, proxy, tmp_path, fault):
        store = opened(s3)
        await put(store, LARGE)
        proxy.fault = fault

        with pytest.raises(ShortBlobError):
            await read(store, LARGE)

        assert copies(tmp_path) == {}
        proxy.fault = S3Fault.NONE
        assert await read(store, LARGE) == LARGE

    async def test_deletion_during_a_fill_leaves_no_copy(self, opened, back, tmp_path):
        store = opened(back)
        await put(store, LARGE)

        reader = await store.open(Digest.of(LARGE))
        await store.delete(Digest.of(LARGE))
        assert await whole_of(reader) == LARGE
        await settled(store)
        assert copies(tmp_path) == {}
        assert await read(store, LARGE) is None

    async def test_fill_closes_its_file_whether_its_reader_is_faster_or_slower(
        self, opened, back, tmp_path
    ):
        store = opened(back)
        await put(store, SMALL, LARGE)
        assert await read(store, SMALL) == SMALL
        reader = await store.open(Digest.of(LARGE))
        fill = store._fills[Digest.of(LARGE).sha256]
        await asyncio.wait([fill._task])
        assert await whole_of(reader) == LARGE
        await asyncio.to_thread(until, lambda: not opened_in(tmp_path))

    async def test_deletion_before_the_copy_gets_its_name_leaves_no_copy(
        self, opened, back, tmp_path, monkeypatch
    ):
        store, loop, keep = opened(back), asyncio.get_running_loop(), DiskUpload.keep

        def keep_late(upload, destination):
            deletion = store.delete(Digest.of(LARGE))
            asyncio.run_coroutine_threadsafe(deletion, loop).result()
            keep(upload, destination)

        monkeypatch.setattr(DiskUpload, "keep", keep_late)
        await put(store, LARGE)
        assert await read(store, LARGE) == LARGE
        assert copies(tmp_path) == {}


def test_damaged_blob_is_never_sent_whole_and_its_artifact_is_dropped(
    tmp_path, moto, s3_credentials, connect
):
    bucket = moto.new_bucket()
    settings = s3_settings(moto.url, bucket, tier_limit_bytes="1GiB")
    with LiveServer(tmp_path, **settings) as server:
        api = connect(server.url)
        api.put(LARGE, 1)
        (stored,) = moto.client.list_objects_v2(Bucket=bucket)["Contents"]
        moto.client.put_object(Bucket=bucket, Key=stored["Key"], Body=LARGE[:-1] + b"x")

        with pytest.raises(httpx.RemoteProtocolError):
            api.get(1)

        assert copies(tmp_path) == {}
        assert api.get(1).status_code == 404
        assert api.put(LARGE, 1).status_code == 201
        assert api.get(1).content == LARGE


@pytest.mark.parametrize(
    ("s3", "tier", "blob", "flips"),
    [
        pytest.param("moto", "0", SMALL, 2, id="small"),
        pytest.param("moto", "0", LARGE, 8, id="large", marks=pytest.mark.extended),
        pytest.param("moto", "1GiB", SMALL, 8, id="tier, small", marks=pytest.mark.extended),
        pytest.param("moto", "1GiB", LARGE, 1, id="tier, large"),
        pytest.param("swift", "0", SMALL, 1, id="swift", marks=pytest.mark.extended),
    ],
)
class TestFlippedBits:
    """A proxy flips bits between S3 and the server, while the object stays intact."""

    @pytest.fixture
    def proxy(self, request, s3):
        with S3Proxy(urlsplit(request.getfixturevalue(s3).url).port) as proxy:
            yield proxy

    def test_flipped_bits_drop_no_acknowledged_artifact(
        self, *, request, s3, proxy, tier, blob, flips, tmp_path, s3_credentials, connect
    ):
        """A verification, which a job requests after a digest mismatch, must not drop the artifact.
        Nor must a wrong length in a header, because the listing has the true length.
        """
        bucket = request.getfixturevalue(s3).new_bucket()
        settings = s3_settings(proxy.url, bucket, tier_limit_bytes=tier, log_level="error")
        with LiveServer(tmp_path, **settings) as server:
            api = connect(server.url)
            verify = partial(api.http.post, f"/v1/{api.namespace}/artifacts:verify")
            attempts = (
                (S3Fault.FLIP, "GET", lambda: api.get(0)),
                (S3Fault.FLIP, "GET", lambda: verify(json=api.key(1))),
                (S3Fault.FLIP_LENGTH, "GET", lambda: api.get(2)),
                (S3Fault.FLIP_LENGTH, "HEAD", lambda: api.http.head(api.path(3))),
            )
            for number, (fault, method, ask) in enumerate(attempts):
                whole = blob + bytes([number])
                assert api.put(whole, number).status_code == 201
                proxy.strikes = partial(_is_of_a_blob, method)
                proxy.fault, proxy.left = fault, flips
                while proxy.left:
                    with suppress(httpx.RemoteProtocolError):
                        answer = ask()
                        assert answer.status_code in {200, 503}
                        assert (
                            number != 1 or answer.status_code == 503 or not answer.json()["healed"]
                        )
                proxy.fault = S3Fault.NONE
                assert api.get(number).content == whole


def _is_of_a_blob(method, seen):
    return seen.method == method and IN_S3 in seen.target


class TestBudget:
    async def test_least_recently_used_copies_are_evicted(self, opened, back, tmp_path):
        store = opened(back, limit_bytes=1000)
        blobs = [bytes([number]) * 300 for number in range(4)]
        await put(store, *blobs)
        for age, blob in ((300, blobs[0]), (200, blobs[1]), (100, blobs[2])):
            await read(store, blob)
            os.utime(copies(tmp_path)[Digest.of(blob).sha256], (time.time() - age,) * 2)
        await read(store, blobs[0])  # used again

        await read(store, blobs[3])
        await store.close()

        left = {Digest.of(blobs[number]).sha256 for number in (0, 2, 3)}
        assert copies(tmp_path).keys() == left

    async def test_use_corrects_the_time_of_a_clock_that_was_ahead(self, opened, back, tmp_path):
        store = opened(back, limit_bytes=1000)
        await put(store, b"blob")
        await read(store, b"blob")
        (copy,) = copies(tmp_path).values()
        os.utime(copy, (time.time() + 200 * 24 * 3600,) * 2)
        await read(store, b"blob")
        assert copy.stat().st_mtime <= time.time() + 60

    @pytest.mark.parametrize(
        ("limits", "warnings"), [({"limit_bytes": 1000}, 0), ({"min_free_bytes": 2**60}, 1)]
    )
    async def test_blob_that_does_not_fit_is_read_from_backing_store(
        self, opened, back, tmp_path, limits, warnings, caplog
    ):
        store = opened(back, **limits)
        await put(store, LARGE)

        assert [await read(store, LARGE) for _ in range(2)] == [LARGE] * 2
        assert copies(tmp_path) == {}
        assert caplog.text.count("the disk tier failed") == warnings

    async def test_reads_continue_after_tier_directory_vanishes(
        self, opened, back, tmp_path, caplog
    ):
        store = opened(back)
        await put(store, LARGE)
        (tmp_path / "tier").rename(tmp_path / "elsewhere")

        assert await read(store, LARGE) == LARGE
        assert caplog.text.count("the disk tier failed") == 1
        (tmp_path / "elsewhere").rename(tmp_path / "tier")


@pytest.fixture
def settings(moto, proxy, s3_credentials):
    """Settings of servers that share one bucket behind the proxy."""
    return s3_settings(proxy.url, moto.new_bucket(), tier_limit_bytes="1GiB")


@pytest.fixture
def environment(settings):
    """The same settings as environment variables."""
    named = {f"GRAPHSTASH_{name.upper()}": str(value) for name, value in settings.items()}
    return named | CREDENTIALS


class TestProcesses:
    """Servers that join or follow a process run in this process, where a start is cheaper."""

    def test_two_servers_share_one_directory(
        self, *, tmp_path, settings, environment, proxy, connect
    ):
        wholes = [LARGE + bytes([number]) for number in range(4)]
        with (
            ServerProcess(tmp_path, environment=environment) as one,
            LiveServer(tmp_path, **settings, log_level="error") as other,
        ):
            first, second = connect(one.url), connect(other.url)
            for number, blob in enumerate(wholes):
                first.put(blob, number)

            def get(api):
                return [api.get(number).content for number in range(4)]

            with ThreadPoolExecutor(2) as pool:
                assert list(pool.map(get, (first, second))) == [wholes] * 2
            proxy.fault = S3Fault.FAILING
            assert get(second) == wholes

    def test_kill_during_a_fill_leaves_no_copy(
        self, *, tmp_path, settings, environment, proxy, connect
    ):
        temporary = tmp_path / "tier" / "tmp"
        with ServerProcess(tmp_path, environment=environment) as server:
            api = connect(server.url)
            api.put(LARGE, 1)
            proxy.fault = S3Fault.PAUSE
            proxy.strikes = partial(_is_of_a_blob, "GET")
            with api.http.stream("GET", api.path(1)) as answer:
                next(answer.iter_raw(1000))  # the fill is half complete
                server.kill()
        assert len(list(temporary.iterdir())) == 1
        assert copies(tmp_path) == {}

        proxy.fault = S3Fault.NONE
        with LiveServer(tmp_path, **settings, log_level="error") as server:
            assert list(temporary.iterdir()) == []
            assert connect(server.url).get(1).content == LARGE

    def test_reads_continue_after_tier_disk_fills_up(
        self, tmp_path, settings, environment, connect
    ):
        """The process may write files of at most 3 MB. The kernel then reports a full disk."""
        limited = (
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000)); "
            "from graphstash_server.__main__ import main; main()"
        )
        with LiveServer(tmp_path, **settings, log_level="error") as server:
            connect(server.url).put(LARGE, 1)
        with ServerProcess(
            tmp_path, command=(sys.executable, "-c", limited), environment=environment
        ) as server:
            answer = connect(server.url).get(1)
            assert (answer.status_code, answer.content) == (200, LARGE)
            assert copies(tmp_path) == {}
