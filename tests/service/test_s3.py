"""Blobs in S3: no failure of the bucket loses a row, and only a lost blob is a miss."""

import asyncio
import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import httpx
import pytest

from graphstash_schema import Digest, ErrorCode
from graphstash_server.errors import NoSpaceError, ServerError, ShortBlobError, StartError
from graphstash_server.services.artifacts import uploads
from graphstash_server.settings import load_settings
from graphstash_server.storage import objects as objects_module
from graphstash_server.storage import open_blob_store
from graphstash_server.storage import s3 as s3_module
from graphstash_server.storage.s3 import MULTIPART_BYTES, open_store
from graphstash_server.testing import LiveServer, ServerProcess, as_chunks, read_blob
from support.meter import Meter
from support.moto import CREDENTIALS, s3_settings
from support.s3_proxy import S3Fault
from support.services import answer_before_the_commit
from support.waiting import until
from support.wire import Wire, head

SMALL = b"small" * 1000
LARGE = bytes(range(256)) * 20_000  # 5 MB, more than the sockets' buffers
PARTS = bytes(MULTIPART_BYTES + 5_000_000)
IN_S3 = "/blobs/sha256/"

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("s3_credentials")]


@pytest.fixture
def bucket(moto):
    return moto.new_bucket()


@pytest.fixture
def impatient(monkeypatch):
    """Disable retries of failed requests to the bucket."""
    monkeypatch.setattr(s3_module, "_ATTEMPTS", 1)


@pytest.fixture
def store(tmp_path, proxy, bucket, impatient):
    store = open_store(load_settings(data_dir=tmp_path, **s3_settings(proxy.url, bucket)))
    until(lambda: proxy.count("GET", within="uploads"))  # the last request of a start
    yield store
    asyncio.run(store.close())
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.fixture
def api(tmp_path, proxy, bucket, impatient, connect):
    """A server whose bucket is behind the proxy."""
    settings = s3_settings(proxy.url, bucket, flush_seconds=0.05, log_level="error")
    with LiveServer(tmp_path / "data", **settings) as server:
        yield connect(server.url)


async def put(store, blob):
    await store.put(Digest.of(blob), as_chunks(blob))


def objects(moto, bucket):
    return [each["Key"] for each in moto.client.list_objects_v2(Bucket=bucket).get("Contents", ())]


def uploads_in_parts(moto, bucket):
    return moto.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])


class TestTrouble:
    def test_failing_bucket_gives_503_and_loses_no_row(self, api, proxy, problem):
        api.put(SMALL, 1)
        api.put(LARGE, 3)
        new = iter(range(10, 100))
        for fault in (
            *(S3Fault.FAILING, S3Fault.BUSY, S3Fault.FORBIDDEN, S3Fault.NO_BUCKET),
            *(S3Fault.STRANGER, S3Fault.RESET, S3Fault.CUT),
        ):
            number = next(new)
            proxy.fault = fault
            answer = api.get(1)
            problem(answer, 503, "unavailable", "")
            assert int(answer.headers["Retry-After"]) > 0
            if fault is not S3Fault.CUT:  # affects bodies only
                problem(api.put(b"other", number), 503, "unavailable", "")
                assert api.http.head(api.path(1)).status_code == 503

            proxy.fault = S3Fault.NONE
            assert api.get(1).content == SMALL
            assert api.get(number).status_code == 404
            assert api.put(b"other", number).status_code == 201

        with proxy.down():
            problem(api.get(1), 503, "unavailable", "GRAPHSTASH_S3_ENDPOINT_URL", "get a blob")
            problem(api.put(b"other", 2), 503, "unavailable", "")
        assert api.get(1).content == SMALL

        for fault in (S3Fault.CUT, S3Fault.CUT_BY_RESET):  # after the start of the answer
            proxy.fault = fault
            with pytest.raises(httpx.RemoteProtocolError):
                api.get(3)
            proxy.fault = S3Fault.NONE
            assert api.get(3).content == LARGE

    def test_silent_bucket_gives_503_and_loses_no_row(
        self, *, tmp_path, proxy, bucket, impatient, connect, problem
    ):
        settings = s3_settings(proxy.url, bucket, log_level="error")
        with LiveServer(tmp_path, **settings) as server:
            api = connect(server.url)
            api.put(SMALL, 1)
            proxy.fault = S3Fault.HANG

            problem(api.get(1), 503, "unavailable", "timeout")

            proxy.fault = S3Fault.NONE
            assert api.get(1).content == SMALL

    @pytest.mark.parametrize(
        ("method", "number"), [("PUT", 1), ("HEAD", 1), ("DELETE", 2)], ids=str
    )
    def test_upload_to_a_silent_bucket_is_answered_before_a_second_attempt(
        self, *, tmp_path, proxy, bucket, moto, monkeypatch, connect, problem, method, number
    ):
        """The answer does not wait for the timeout of the request's first attempt."""
        monkeypatch.setattr(s3_module, "_READ_SECONDS", 60.0)
        settings = s3_settings(proxy.url, bucket, maintenance_seconds=3600, log_level="error")
        with LiveServer(tmp_path, **settings) as server:
            api = connect(server.url)
            rules = f"/v1/-/namespaces/{api.namespace}"
            assert api.http.put(rules, json={"mode": "overwrite"}).status_code == 200
            assert api.put(SMALL, 2).status_code == 201
            proxy.strikes = lambda seen: seen.method == method
            proxy.fault = S3Fault.HANG

            with monkeypatch.context() as patch:
                match method:
                    case "PUT":
                        patch.setattr(uploads, "_STORE_SECONDS", 4.0)
                        patch.setattr(uploads, "_DROP_SECONDS", 2.0)
                    case "HEAD":
                        answer_before_the_commit(patch)
                    case "DELETE":
                        patch.setattr(uploads, "_DROP_SECONDS", 2.0)
                answer = api.put(b"new", number)
            struck = proxy.struck[S3Fault.HANG]
            proxy.fault = S3Fault.NONE
            proxy.resume.set()  # ends the request that hangs

            if method == "DELETE":
                assert answer.status_code == 201
            else:
                problem(answer, 503, "unavailable", "blob store")
            assert struck <= 1
            if method == "HEAD":  # the commit continues
                until(lambda: api.get(number).status_code == 200)
            assert api.put(b"new", number).status_code == (201 if method == "PUT" else 200)
            assert api.get(number).content == b"new"
            artifacts = api.stats()["artifacts"]
            assert artifacts == (1 if number == 2 else 2)
            until(lambda: len(objects(moto, bucket)) == artifacts)
        assert list((tmp_path / "spool").iterdir()) == []

    def test_commits_that_continue_are_few_and_a_server_that_stops_awaits_them(
        self, *, tmp_path, proxy, moto, bucket, monkeypatch, connect, problem
    ):
        settings = s3_settings(proxy.url, bucket, log_level="error", shutdown_seconds=60)
        proxy.strikes = lambda seen: seen.method == "HEAD"
        answer_before_the_commit(monkeypatch)
        monkeypatch.setattr(uploads, "_MAX_LATE", 1)
        with (
            ThreadPoolExecutor(1) as pool,
            LiveServer(tmp_path, **settings) as server,
            Wire(server.url) as idle,
        ):
            api, other = connect(server.url), connect(server.url)
            assert idle.ask(head("GET", "/healthz")).status == 200
            proxy.fault = S3Fault.HANG
            first = pool.submit(other.put, b"first", 1)
            until(lambda: proxy.struck[S3Fault.HANG] == 1)

            problem(api.put(b"second", 2), 503, "unavailable", "blob store")
            problem(first.result(), 503, "unavailable", "blob store")
            problem(api.put(b"third", 3), 503, "unavailable", "1 earlier uploads still wait")
            stopping = pool.submit(server.stop)
            assert idle.answer() is None
            proxy.fault = S3Fault.NONE
            proxy.resume.set()  # ends the request that hangs
            stopping.result()
        assert proxy.count("PUT", within=Digest.of(b"third").sha256) == 0

        with LiveServer(tmp_path, **settings) as server:
            api = connect(server.url)
            assert [api.get(number).status_code for number in (1, 2, 3)] == [200, 404, 404]
            assert len(objects(moto, bucket)) == 1

    def test_upload_that_waits_for_a_silent_bucket_is_answered_and_never_sent(
        self, *, tmp_path, proxy, bucket, monkeypatch, connect, problem
    ):
        """The only thread for uploads is taken."""
        monkeypatch.setattr(objects_module, "WRITE_THREADS", 1)
        with LiveServer(tmp_path, **s3_settings(proxy.url, bucket, log_level="error")) as server:
            api = connect(server.url)
            proxy.strikes = lambda seen: seen.method == "PUT"
            proxy.fault = S3Fault.HANG

            with ThreadPoolExecutor(1) as pool:
                hanging = pool.submit(api.put, b"first", 1)
                until(lambda: proxy.struck[S3Fault.HANG] == 1)
                with monkeypatch.context() as patch:
                    patch.setattr(uploads, "_STORE_SECONDS", 2.0)
                    problem(api.put(b"second", 2), 503, "unavailable", "blob store")
                proxy.fault = S3Fault.NONE
                proxy.resume.set()
                hanging.result()

            assert api.put(b"new", 3).status_code == 201
        assert proxy.count("PUT", within=Digest.of(b"second").sha256) == 0

    def test_lost_object_is_a_miss_but_lost_bucket_is_503(self, api, proxy, moto, bucket, problem):
        api.put(SMALL, 1)
        # The bucket was missing for one request: the HEAD of the object returned 404 without a
        # body, but the next HEAD of the bucket succeeds.
        proxy.strikes, proxy.left = (lambda seen: seen.method == "HEAD"), 1
        proxy.fault = S3Fault.NO_BUCKET
        assert api.http.head(api.path(1)).status_code == 200
        assert proxy.left == 0

        moto.client.delete_object(Bucket=bucket, Key=objects(moto, bucket)[0])
        problem(api.get(1), 404, "not_found")
        assert api.put(SMALL, 1).status_code == 201
        assert api.get(1).content == SMALL

        moto.client.delete_object(Bucket=bucket, Key=objects(moto, bucket)[0])
        moto.client.delete_bucket(Bucket=bucket)
        problem(api.get(1), 503, "unavailable", bucket)
        assert api.http.head(api.path(1)).status_code == 503
        assert api.stats()["artifacts"] == 1

    async def test_transient_errors_are_retried(self, tmp_path, proxy, bucket):
        store = open_store(load_settings(data_dir=tmp_path, **s3_settings(proxy.url, bucket)))
        proxy.fault, proxy.left = S3Fault.FAILING, 1
        await put(store, SMALL)
        proxy.left = 1
        assert await read_blob(store, Digest.of(SMALL)) == SMALL
        await store.close()

    async def test_one_line_logs_the_cause_of_many_failures(self, store, proxy, caplog):
        proxy.fault = S3Fault.FORBIDDEN

        calls = (store.stat(Digest.of(bytes([number]))) for number in range(20))
        with caplog.at_level(logging.WARNING, logger="graphstash_server"):
            errors = await asyncio.gather(*calls, return_exceptions=True)

        assert {error.code for error in errors} == {ErrorCode.UNAVAILABLE}
        assert len(caplog.messages) == 1
        assert "s3:ListBucket" in caplog.messages[0]


class TestPut:
    async def test_blob_is_sent_whole_or_in_parts_with_checksums(self, store, proxy, moto, bucket):
        before = len(proxy.seen)
        await put(store, SMALL)

        (seen,) = proxy.seen[before:]
        digest = Digest.of(SMALL)
        checksum = digest.repr_digest.removeprefix("sha-256=:").removesuffix(":")
        assert (seen.method, seen.headers["x-amz-checksum-sha256"]) == ("PUT", checksum)
        assert seen.target.endswith(f"/blobs/sha256/{digest.sha256[:2]}/{digest.sha256}")
        for key in ("blobs/sha256/zz/README", "blobs/sha256/00/" + "f" * 64, "a"):
            moto.client.put_object(Bucket=bucket, Key=key, Body=b"mine")
        assert [each async for each in store.list()] == [digest]

        await put(store, PARTS)
        parts = [seen for seen in proxy.seen if "partNumber" in seen.target]
        assert len(parts) == 3
        assert all("x-amz-checksum-sha256" in seen.headers for seen in parts)
        assert await store.stat(Digest.of(PARTS)) == len(PARTS)
        assert uploads_in_parts(moto, bucket) == []

    async def test_failed_part_leaves_no_object(self, store, proxy, moto, bucket):
        proxy.fault = S3Fault.FAILING
        proxy.strikes = lambda seen: "partNumber=2" in seen.target

        with pytest.raises(ServerError) as refusal:
            await put(store, PARTS)

        assert refusal.value.code is ErrorCode.UNAVAILABLE
        assert (objects(moto, bucket), uploads_in_parts(moto, bucket)) == ([], [])

    async def test_cancelled_put_leaves_no_object(self, store, proxy, moto, bucket, monkeypatch):
        struck = threading.Event()
        proxy.fault = S3Fault.HANG
        proxy.strikes = lambda seen: "partNumber=3" in seen.target and (struck.set() or True)

        task = asyncio.create_task(store.put(Digest.of(PARTS), as_chunks(PARTS)))
        await asyncio.to_thread(struck.wait)
        task.cancel()
        proxy.resume.set()
        # The end of the connection may precede the cancellation.
        await asyncio.gather(task, return_exceptions=True)
        await store.close()  # its threads clean up

        assert (objects(moto, bucket), uploads_in_parts(moto, bucket)) == ([], [])

    @pytest.mark.parametrize("blob", [SMALL, LARGE], ids=["small", "large"])
    async def test_nothing_is_sent_before_checks_pass(self, store, proxy, blob):
        before = len(proxy.seen)
        with pytest.raises(ServerError):
            await store.put(Digest.of(blob), as_chunks(blob[:-1] + b"x"))

        assert len(proxy.seen) == before

    async def test_full_spool_gives_507_before_the_body_is_read(self, tmp_path, proxy, bucket):
        settings = s3_settings(proxy.url, bucket, min_free_bytes=2**60)
        store = open_store(load_settings(data_dir=tmp_path, **settings))

        async def unread():
            raise AssertionError("the body was read")
            yield b""

        with pytest.raises(NoSpaceError):
            await store.put(Digest.of(LARGE), unread())
        await put(store, SMALL)  # needs no room
        await store.close()

    async def test_failing_disk_of_the_spool_is_named_instead_of_the_bucket(self, store, tmp_path):
        (tmp_path / "spool").rmdir()
        with pytest.raises(ServerError, match="GRAPHSTASH_DATA_DIR") as refusal:
            await put(store, LARGE)
        (tmp_path / "spool").mkdir()
        assert f"{tmp_path / 'spool'}, where this server spools uploads" in refusal.value.detail
        assert "GRAPHSTASH_S3" not in refusal.value.detail

    @pytest.mark.extended
    async def test_uploads_of_dead_server_are_aborted(self, tmp_path, swift, monkeypatch):
        bucket = swift.new_bucket()
        settings = load_settings(data_dir=tmp_path, **s3_settings(swift.url, bucket))
        for key in ("blobs/sha256/ab/lost", "somebody/else"):
            swift.client.create_multipart_upload(Bucket=bucket, Key=key)
        await open_store(settings).close()
        assert len(uploads_in_parts(swift, bucket)) == 2  # too young to be aborted

        monkeypatch.setattr(s3_module, "_ABANDONED_AGE", timedelta(hours=-1))
        store = open_store(settings)
        until(lambda: len(uploads_in_parts(swift, bucket)) == 1)
        await store.close()

        assert [each["Key"] for each in uploads_in_parts(swift, bucket)] == ["somebody/else"]


class TestRead:
    async def test_read_takes_one_request_and_fails_for_deleted_blob(self, store, proxy):
        """An absent blob takes another request, for the bucket: a gateway that started a second ago
        may answer 404 to everything.
        """
        digest = Digest.of(LARGE)
        await put(store, LARGE)
        before = len(proxy.seen)
        await read_blob(store, digest)
        await read_blob(store, Digest.of(b"2"))
        await store.stat(Digest.of(b"3"))
        asked = [(seen.method, IN_S3 in seen.target) for seen in proxy.seen[before:]]
        get, bucket = ("GET", True), ("HEAD", False)
        assert asked == [get, get, bucket, ("HEAD", True), get, bucket]

        await read_blob(store, digest, 2_000_000, 2_000_010)
        assert proxy.seen[-1].headers["range"] == "bytes=2000000-2000009"
        reader = await store.open(digest)
        await store.delete(digest)
        with pytest.raises(ShortBlobError):
            async for _ in reader.chunks(2_000_000, 3_000_000):
                pass
        await reader.close()

    async def test_link_is_for_large_blobs_and_needs_no_credentials(self, tmp_path, moto, bucket):
        settings = s3_settings(moto.url, bucket, s3_redirect_bytes=len(LARGE))
        store = open_store(load_settings(data_dir=tmp_path, **settings))
        await put(store, LARGE)

        link, none = [await store.link(Digest.of(blob)) for blob in (LARGE, SMALL)]
        await store.close()
        assert none is None
        assert "X-Amz-Expires=900" in link
        assert "testing" not in link
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(link)).content == LARGE


async def refused(tmp_path, url, bucket, **more):
    """Return the error of a server that refuses to start. It must be one line."""
    settings = load_settings(data_dir=tmp_path, **s3_settings(url, bucket, **more))
    with pytest.raises(StartError) as refusal:
        async with open_blob_store(settings):
            raise AssertionError("it started")
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


async def test_bucket_that_cannot_be_used_is_refused_at_start(
    tmp_path, moto, proxy, impatient, monkeypatch
):
    with pytest.raises(StartError, match=r"^GRAPHSTASH_S3_BUCKET= is not valid: .*bucket"):
        load_settings(blob_store="s3")
    said = await refused(tmp_path, moto.url, "no-such-bucket")
    assert said.startswith("GRAPHSTASH_S3_BUCKET=no-such-bucket cannot be used at")
    assert "create the bucket" in said
    with proxy.down():
        said = await refused(tmp_path, proxy.url, "bucket")
    assert "GRAPHSTASH_S3_ENDPOINT_URL is up" in said

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    assert "AWS_ACCESS_KEY_ID" in await refused(tmp_path, moto.url, "bucket")

    monkeypatch.delitem(sys.modules, "graphstash_server.storage.s3")
    monkeypatch.setitem(sys.modules, "boto3", None)
    said = await refused(tmp_path, "http://127.0.0.1:1", "bucket")
    assert said.endswith("pip install 'graphstash[server,s3] @ git+<repository>'")


@pytest.mark.extended
def test_wrong_s3_credentials_are_refused_and_revoked_ones_lose_no_row(
    tmp_path, swift, monkeypatch, connect, problem
):
    """Swift checks signatures, but moto does not."""
    settings = s3_settings(swift.url, swift.new_bucket(), log_level="error")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        said = asyncio.run(refused(tmp_path, swift.url, settings["s3_bucket"]))
    assert "403" in said
    assert "check the credentials" in said

    with LiveServer(tmp_path, **settings) as server:
        connect(server.url).put(SMALL, 1)
    with LiveServer(tmp_path, **settings) as server:
        api = connect(server.url)
        store = server._server.config.app.state.context.artifacts.blobs
        store._bucket._client._request_signer._credentials.secret_key = "withdrawn"

        problem(api.get(1), 503, "unavailable", "check the credentials")
        problem(api.put(b"other", 2), 503, "unavailable")

        store._bucket._client._request_signer._credentials.secret_key = "testing"
        assert api.get(1).content == SMALL


@pytest.mark.extended
def test_memory_stays_bounded_with_spool_and_tier(tmp_path, moto, bucket, connect):
    """Measures a server process with spool and tier."""
    settings = s3_settings(moto.url, bucket, tier_limit_bytes="1GiB")
    environment = {f"GRAPHSTASH_{name.upper()}": str(value) for name, value in settings.items()}
    blob = bytes(200 * 1024**2)
    with ServerProcess(tmp_path / "data", environment=environment | CREDENTIALS) as process:
        api = connect(process.url)
        api.put(PARTS, 1)
        api.get(1)
        with Meter(process).measured() as cost:
            assert api.put(blob, 2).status_code == 201
            assert api.get(2).content == blob
        assert cost.memory_mib < 120
