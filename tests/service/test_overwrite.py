"""Namespaces in which the last upload of a key stays: no acknowledged upload is lost, no reader
gets a mixture, and replaced blobs are deleted.
"""

import asyncio
import functools
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import sqlalchemy as sa

from graphstash_schema import Digest, ErrorCode
from graphstash_server.db.queries.usage import recount_usage
from graphstash_server.db.tables import artifacts, deletions
from graphstash_server.errors import ServerError
from graphstash_server.testing import LiveServer
from support.services import key_of
from support.tiers import most_extended
from support.waiting import until

OLD = b"old " * 2500
NEW = b"new " * 3000
LARGE = bytes(range(256)) * 80_000  # 20 MB

pytestmark = pytest.mark.anyio

KILLED = """
import os, signal, sys
from graphstash_server.services.artifacts.uploads import CommitBatcher

phase = sys.argv.pop(1)
commit = CommitBatcher.commit
commits = 0

async def dying_commit(self, upload):
    global commits
    commits += 1
    if commits == 1:
        return await commit(self, upload)
    if phase == "committed":
        await commit(self, upload)
    os.kill(os.getpid(), signal.SIGKILL)

CommitBatcher.commit = dying_commit
from graphstash_server.__main__ import main
main()
"""
"""Server that dies in the second upload, whose blob is stored, before or after the commit."""


@pytest.fixture
def api(api):
    let_overwrite(api)
    return api


def let_overwrite(api, **rules):
    path = f"/v1/-/namespaces/{api.namespace}"
    assert api.http.put(path, json={"mode": "overwrite", **rules}).status_code == 200


def own(api, text):
    """Return bytes that no other test has stored, because equal blobs are stored once."""
    return (api.namespace.encode() + b" " + text) * 100


def names(files):
    return {path.name for path in files}


def test_upload_replaces_previous_bytes_and_their_blob_unless_shared(api, files, problem):
    before = names(files())
    old, new = own(api, b"old"), own(api, b"new one")
    api.put(old, 1, seconds=1)
    api.get(1)
    problem(api.put(new, 1, If_None_Match="*"), 412, "precondition_failed")
    assert api.get(1).content == old

    answer = api.put(new, 1, seconds=2)

    assert (answer.status_code, answer.headers["etag"]) == (201, Digest.of(new).etag)
    assert api.put(new, 1).status_code == 200  # a repeated upload changes nothing
    got = api.get(1)
    assert (got.content, got.headers["etag"]) == (new, Digest.of(new).etag)
    assert api.http.head(api.path(1)).headers["content-length"] == str(len(new))
    stats = api.stats()
    assert (stats["artifacts"], stats["size_bytes"]) == (1, len(new))
    assert (stats["puts"], stats["conflicts"]) == (2, 0)
    assert names(files()) - before == {Digest.of(new).sha256}

    for blob in (old, new, old):  # an upload may restore previous bytes
        assert api.put(blob, 1).status_code == 201
        assert api.get(1).content == blob
    assert Digest.of(new).sha256 not in names(files())
    assert api.stats()["size_bytes"] == len(old)
    api.put(old, 2)
    api.put(new, 1)
    assert api.get(2).content == old
    assert {Digest.of(old).sha256, Digest.of(new).sha256} <= names(files())


def test_overwritable_artifact_is_neither_cached_nor_sent_by_proxy(api, connect):
    blob = OLD * (1024**2 // len(OLD))
    api.put(blob, 1)
    once = connect(api.url, f"{api.namespace}-other")
    once.put(blob, 1)

    asked = (
        *(("GET", {}), ("HEAD", {}), ("GET", {"If-None-Match": Digest.of(blob).etag})),
        ("GET", {"Graphstash-Accel": "1"}),
    )
    for method, headers in asked:
        changing, fixed = (
            each.http.request(method, each.path(1), headers=headers) for each in (api, once)
        )
        assert changing.headers["cache-control"] == "private, no-cache"
        if "Graphstash-Accel" not in headers:
            assert fixed.headers["cache-control"] == "private, max-age=31536000, immutable"
    assert changing.content == blob
    assert "x-accel-redirect" not in changing.headers
    assert "x-accel-redirect" in fixed.headers


def test_concurrent_readers_never_get_a_miss_or_a_mixture(api, connect):
    versions = {bytes([number]) * (1000 + number) for number in range(12)}
    api.put(min(versions), 1)
    seen = []
    is_over = threading.Event()

    def read():
        own = connect(api.url, api.namespace)
        while not is_over.is_set():
            answer = own.get(1)
            fits = answer.headers.get("etag") == Digest.of(answer.content).etag
            seen.append((answer.status_code, fits and answer.content in versions))

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for blob in sorted(versions):
            api.put(blob, 1)
        is_over.set()
    assert [reader.result() for reader in readers] == [None] * 2

    assert seen
    assert set(seen) == {(200, True)}
    assert api.get(1).content == max(versions)


def test_audit_log_distinguishes_put_from_overwrite(api, problem):
    api.put(OLD, 1, X_Request_Id="first")
    mismatch = api.put(NEW, 1, Repr_Digest=Digest.of(OLD).repr_digest)
    problem(mismatch, 400, "digest_mismatch", Digest.of(OLD).sha256, Digest.of(NEW).sha256)
    api.put(NEW, 1, X_Request_Id="second")
    api.put(NEW, 1, X_Request_Id="third")
    api.http.delete(api.path(1), headers={"X-Request-Id": "fourth"})

    entries = api.http.get("/v1/-/audit", params={"namespace": api.namespace}).json()["entries"]
    subject = "/".join(api.key(1).values())
    recorded = [
        (entry["action"], entry["subject"], entry["detail"], entry["request_id"])
        for entry in entries
        if entry["action"] != "policy_set"
    ]
    assert recorded == [
        ("delete", subject, str(Digest.of(NEW)), "fourth"),
        ("overwrite", subject, str(Digest.of(NEW)), "second"),
        ("put", subject, str(Digest.of(OLD)), "first"),
    ]


@pytest.mark.parametrize(("phase", "stays"), [("stored", OLD), ("committed", NEW)])
def test_kill_leaves_the_old_or_the_new_artifact_whole(start, connect, stored_files, phase, stays):
    server = start(command=(sys.executable, "-c", KILLED, phase))
    api = connect(server.url)
    let_overwrite(api)
    assert api.put(OLD, 1).status_code == 201
    with pytest.raises(httpx.TransportError):
        api.put(NEW, 1)
    server.process.wait(60)  # a dying server may hold the data directory longer than its sockets
    assert len(stored_files(server.data_dir)) == 2

    with LiveServer(server.data_dir, log_level="error") as live:
        again = connect(live.url)
        assert again.get(1).content == stays
        assert again.stats()["size_bytes"] == len(stays)
        until(lambda: names(stored_files(live.data_dir)) == {Digest.of(stays).sha256})
        assert again.put(LARGE, 1).status_code == 201
        assert again.get(1).content == LARGE


async def assert_whole(opened, server):
    """Assert that every row has its blob, every blob has a row, and the counters match."""
    await server.context.collector.collect_marked()
    async with server.context.database.reading() as connection:
        columns = (artifacts.c.sha256, artifacts.c.size_bytes)
        rows = [Digest(*row) for row in await connection.execute(sa.select(*columns))]
        marks = (await connection.execute(sa.select(deletions.c.sha256))).all()
        miscounted = await recount_usage(connection)
    assert marks == []
    assert miscounted == {}
    assert set(opened.blobs.blobs) == {row.sha256 for row in rows}
    used = await server.used()
    assert (used.artifacts, used.size_bytes) == (len(rows), sum(row.size_bytes for row in rows))


@pytest.mark.sql
@pytest.mark.parametrize("seed", most_extended([1, 2], quick=[1]))
async def test_servers_that_overwrite_evict_and_delete_at_once_lose_nothing(opened, seed):
    """The servers use few keys and few blobs, so that all operations meet."""
    randomness = random.Random(seed)
    blobs = [f"version {number} ".encode() * (50 + number) for number in range(6)]

    async def act(server, choice, number, blob):
        try:
            if choice < 6:
                await server.put(blob, number)
            elif choice < 8:
                assert await server.get(number) in {*blobs, None}
            elif choice == 8:
                await server.context.artifacts.delete(key_of(number), actor=None)
            else:
                await server.evict_one()
        except ServerError as error:
            if error.code is not ErrorCode.UNAVAILABLE:  # the same bytes were being deleted
                raise

    async with opened() as one, opened() as two:
        for _ in range(12):
            await asyncio.gather(
                *(
                    act(
                        randomness.choice([one, two]),
                        randomness.randrange(10),
                        randomness.randrange(3),
                        randomness.choice(blobs),
                    )
                    for _ in range(12)
                )
            )
        for number in range(3):
            await one.put(blobs[number], number)
            assert await one.get(number) == blobs[number]
        await assert_whole(opened, one)


def between(server, work):
    """Run work once, after a server has stored a blob and before it commits the artifact."""
    committer = server.context.uploads.committer
    commit = committer.commit

    async def later(upload):
        committer.commit = commit
        await work()
        return await commit(upload)

    committer.commit = later


@pytest.mark.sql
async def test_overwrite_stays_although_the_artifact_is_evicted_before_its_commit(opened):
    async with opened() as one, opened() as two:
        await one.put(OLD)
        between(one, two.evict_one)
        assert await one.put(NEW) is True
        assert await one.get() == NEW
        await assert_whole(opened, one)


@pytest.mark.sql
async def test_old_bytes_stay_if_another_key_is_about_to_use_them(opened):
    """The overwrite marks the old blob after an upload of equal bytes has found it."""
    async with opened() as one, opened() as two:
        await one.put(OLD, 1)
        between(two, functools.partial(one.put, NEW, 1))
        try:
            assert await two.put(OLD, 2) is True
        except ServerError as error:
            if error.code is not ErrorCode.UNAVAILABLE:
                raise
            assert await two.get(2) is None  # refused completely
        else:
            assert await two.get(2) == OLD
        await assert_whole(opened, one)


async def test_row_replaced_during_healing_and_pinned_is_kept(opened):
    """A reader that opened the old row without finding its blob must drop only the old row."""
    async with opened() as server:
        await server.put(OLD)
        await server.pin(0)
        row = await server.context.artifacts.find(key_of())
        await server.put(NEW)
        assert await server.evict_one() is False
        assert await server.get() == NEW
        opened.clock.turn(1)
        await server.put(OLD)

        assert await server.context.artifacts.heal_all([row]) == []
        assert await server.get() == OLD
