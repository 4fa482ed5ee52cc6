"""S3 receives the deletion of an object long after the sender's timeout."""

from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from graphstash_schema import Digest
from graphstash_server.context import open_services
from graphstash_server.errors import ServerError
from graphstash_server.settings import load_settings
from graphstash_server.storage import s3 as s3_module
from support.moto import Moto, s3_settings
from support.s3_proxy import S3Fault, S3Proxy
from support.services import ACTOR, FakeClock, ServiceClient, key_of
from support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("s3_credentials")]

_HOUR = 3600
ON_BOTH = pytest.mark.parametrize(
    ("s3", "database_url"),
    [pytest.param("moto", "sqlite", marks=pytest.mark.extended), ("moto", "postgresql")],
    indirect=True,
)
_SMALL, _IN_PARTS = b"an executable" * 100, bytes(17 * 1024**2)


@pytest.fixture
def s3(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def bucket(s3):
    return s3.new_bucket()


@pytest.fixture
def proxy(s3):
    with S3Proxy(urlsplit(s3.url).port) as proxy:
        yield proxy


@pytest.fixture
def opened(tmp_path, database_url, s3, proxy, bucket, monkeypatch):
    """Open servers on one bucket, with short timeouts for S3."""
    monkeypatch.setattr(s3_module, "_ATTEMPTS", 1)
    seconds = 3.0 if isinstance(s3, Moto) else 10.0  # Swift waits for the disk
    monkeypatch.setattr(s3_module, "_READ_SECONDS", seconds)
    clock = FakeClock()

    @asynccontextmanager
    async def opened(name, **more):
        settings = load_settings(
            data_dir=tmp_path / name,
            database_url=database_url,
            **s3_settings(proxy.url, bucket, **more),
        )
        async with open_services(settings, blob_store=None, clock=clock) as context:
            yield ServiceClient(context)

    opened.clock = clock
    return opened


def objects(s3, bucket):
    """Return the names of all blobs."""
    found = s3.client.list_objects_v2(Bucket=bucket).get("Contents", ())
    return [each["Key"].rpartition("/")[2] for each in found]


def hold_deletion(proxy):
    """Let the proxy hold the next deletion until the test calls `let_it_arrive`."""
    proxy.fault = S3Fault.HOLD
    proxy.strikes = lambda seen: seen.method == "DELETE"
    proxy.left = 1


async def lose_deletion(server, proxy):
    """Delete the artifact. The proxy holds the request to S3 until the sender times out."""
    hold_deletion(proxy)
    assert await server.context.artifacts.delete(key_of(1), actor=ACTOR)


def let_it_arrive(proxy):
    proxy.resume.set()
    until(lambda: proxy.late)
    assert proxy.late[0].split()[1] in {"200", "204", "404"}


@pytest.mark.sql
@pytest.mark.parametrize(
    ("s3", "database_url", "blob", "tier", "is_deleted_again"),
    [
        pytest.param("moto", "sqlite", _SMALL, "0", False, id="given up"),
        pytest.param("moto", "postgresql", _SMALL, "1GiB", True, id="tier, deleted again"),
        pytest.param(
            *("swift", "sqlite", _IN_PARTS, "1GiB", True),
            id="real S3, in parts, deleted again",
            marks=pytest.mark.extended,
        ),
    ],
    indirect=["s3", "database_url"],
)
async def test_deletion_delayed_by_an_hour_deletes_nothing_published_since(
    opened, proxy, s3, bucket, tier, blob, is_deleted_again
):
    async with opened("one", tier_limit_bytes=tier) as one, opened("two") as two:
        assert await one.put(blob, 1)
        await lose_deletion(one, proxy)
        opened.clock.turn(_HOUR)
        if is_deleted_again:
            assert await two.context.collector.collect_marked() == 1
            assert objects(s3, bucket) == []

        assert await two.put(blob, 1)
        opened.clock.turn(_HOUR)
        let_it_arrive(proxy)

        assert objects(s3, bucket) == [f"{Digest.of(blob).sha256}.1"]
        async with opened("three") as three:
            for server in (one, two, three):
                assert await server.get(1) == blob
                assert (await server.context.artifacts.verify(key_of(1))).healed is False
        # Another artifact with equal bytes shares the object.
        assert await one.put(blob, 2)
        assert await one.context.artifacts.delete(key_of(1), actor=ACTOR)
        assert await two.get(2) == blob
        # No object remains under any name.
        assert await two.context.artifacts.delete(key_of(2), actor=ACTOR)
        assert objects(s3, bucket) == []


@pytest.mark.sql
@ON_BOTH
async def test_first_attempt_of_repeated_deletion_deletes_nothing_published_since(
    opened, proxy, s3, bucket, monkeypatch
):
    """S3 answers the second attempt of the same call, and carries out the first one later."""
    monkeypatch.setattr(s3_module, "_ATTEMPTS", 2)
    async with opened("one") as one, opened("two") as two:
        assert await one.put(b"blob", 1)
        hold_deletion(proxy)
        assert await one.context.artifacts.delete(key_of(1), actor=ACTOR)
        assert await one.context.collector.wait_for_deletions(60) == 0
        assert proxy.count("DELETE") == 2
        assert objects(s3, bucket) == []

        assert await two.put(b"blob", 1)
        let_it_arrive(proxy)
        for server in (one, two):
            assert await server.get(1) == b"blob"


ON_EACH = pytest.mark.parametrize(
    ("s3", "database_url"),
    [("moto", "sqlite"), pytest.param("swift", "postgresql", marks=pytest.mark.extended)],
    indirect=True,
)


@ON_EACH
async def test_renamed_object_is_also_stored_under_its_first_name(opened, proxy, s3, bucket):
    """Servers of the previous release support only the first name of an object."""
    async with opened("one") as one, opened("two") as two:
        await one.put(b"blob", 1)
        await lose_deletion(one, proxy)
        opened.clock.turn(_HOUR)
        await one.put(b"blob", 1)
        name = Digest.of(b"blob").sha256
        assert objects(s3, bucket) == [name, f"{name}.1"]
        listed = [digest async for digest in one.context.artifacts.blobs.list()]
        assert listed == [Digest.of(b"blob")]

        keys = [each["Key"] for each in s3.client.list_objects_v2(Bucket=bucket)["Contents"]]
        s3.client.delete_object(Bucket=bucket, Key=keys[1])
        for server in (one, two):
            assert await server.get(1) == b"blob"
            assert await server.context.artifacts.find(key_of(1)) is not None


@ON_EACH
async def test_put_under_abandoned_name_is_not_acknowledged(opened, proxy, s3, bucket):
    """Between an upload of the bytes and its commit, a deletion of them begins and is lost."""
    async with opened("one") as one, opened("two") as two:
        await two.put(b"blob", 1)
        committer = one.context.uploads.committer
        commit = committer.commit

        async def late_commit(upload):
            committer.commit = commit
            await lose_deletion(two, proxy)
            opened.clock.turn(_HOUR)
            return await commit(upload)

        committer.commit = late_commit
        with pytest.raises(ServerError, match="retry the upload"):
            await one.put(b"blob", 2)
        assert await one.put(b"blob", 2)
        proxy.resume.set()
        assert await two.get(2) == b"blob"


@pytest.mark.sql
@ON_BOTH
async def test_failed_upload_keeps_used_blob_that_dead_server_had_claimed(opened, proxy):
    """A late deletion has deleted the first name of the blob, but not the next one."""

    async def die(*_args, **_options):
        raise ConnectionError

    async with opened("one") as one, opened("two") as two:
        await one.put(b"blob", 1)
        await lose_deletion(one, proxy)
        opened.clock.turn(_HOUR)
        await one.put(b"blob", 1)
        await one.put(b"blob", 2)
        let_it_arrive(proxy)
        collector = two.context.collector
        collector.collect_all = collector._collect_claimed = die
        with pytest.raises(ConnectionError):
            await two.context.artifacts.delete(key_of(2), actor=ACTOR)
        with pytest.raises(ConnectionError):
            await collector.collect_marked()
        opened.clock.turn(_HOUR)

        proxy.fault, proxy.left = S3Fault.FORBIDDEN, None
        proxy.strikes = lambda seen: seen.method == "PUT"
        with pytest.raises(ServerError):
            await one.put(b"blob", 3)

        assert await one.get(1) == b"blob"
