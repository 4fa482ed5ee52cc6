"""Uploads that share a transaction or an fsync each have their own result, and none is lost."""

import asyncio
import itertools
import shutil
import signal
import sys
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from types import SimpleNamespace

import pytest

from graphstash_schema import Digest, ErrorCode, Namespace, NamespacePolicy
from graphstash_server.context import open_services, prepare_database
from graphstash_server.errors import ServerError
from graphstash_server.services.artifacts import uploads as uploads_module
from graphstash_server.services.artifacts.uploads import CommitBatcher
from graphstash_server.settings import load_settings
from graphstash_server.storage import upload as storage_upload
from graphstash_server.storage.disk import DiskBlobStore
from graphstash_server.storage.upload import DirectorySyncs
from graphstash_server.testing import MemoryBlobStore, ServerProcess, as_chunks
from support.services import ACTOR, FakeClock, ServiceClient, key_of, upload_of
from support.statements import recorded
from support.waiting import until

pytestmark = pytest.mark.anyio

ONCE = NamespacePolicy()

KILLED = """
import os, signal
from graphstash_server.services.artifacts.uploads import CommitBatcher
from graphstash_server.services.artifacts import uploads as module

committed = 0
commit_all, store_all = CommitBatcher._commit_all, module._store_all

def kill_in(uploads):
    if committed > 20 and len(uploads) > 2:
        os.kill(os.getpid(), signal.SIGKILL)

async def store(connection, uploads, *more, **named):
    outcomes = await store_all(connection, uploads, *more, **named)
    {before_commit}
    return outcomes

async def commit(batcher, uploads):
    global committed
    outcomes = await commit_all(batcher, uploads)
    {after_commit}
    committed += len(uploads)
    return outcomes

module._store_all, CommitBatcher._commit_all = store, commit
from graphstash_server.__main__ import main
main()
"""


@pytest.fixture
def served(request, tmp_path, database_url):
    """The services on a disk store, or on a memory store."""

    @asynccontextmanager
    async def opened():
        settings = load_settings(data_dir=tmp_path, database_url=database_url, min_free_bytes=0)
        await prepare_database(settings, is_migrating=True)
        blobs = MemoryBlobStore() if request.param == "memory" else None
        async with open_services(settings, blob_store=blobs, clock=FakeClock()) as context:
            yield ServiceClient(context)

    return opened


async def commit_together(server, *uploads):
    """Commit uploads with stored blobs at the same moment. Return their results."""
    committer = server.context.uploads.committer
    return await asyncio.gather(*map(committer.commit, uploads), return_exceptions=True)


async def stored(server, number, blob, **terms):
    """Store a blob and return its upload, which still needs its commit."""
    upload = upload_of(key_of(number), blob, policy=ONCE, **terms)
    await server.context.uploads.blobs.put(upload.digest, as_chunks(blob))
    return upload


ON_EACH = pytest.mark.parametrize(
    ("served", "database_url"), [("disk", "sqlite"), ("memory", "postgresql")], indirect=True
)


@pytest.mark.sql
@ON_EACH
async def test_uploads_that_wait_together_share_a_transaction_but_not_results(served):
    async with served() as server:
        await server.put(b"the first", 0, policy=ONCE)
        other = await stored(server, 0, b"another")
        lost = await stored(server, 1, b"lost")
        good = [await stored(server, number, b"%d" % number) for number in range(2, 5)]
        await server.context.uploads.blobs.delete(lost.digest)

        with recorded("INTO audit") as logged:
            conflict, gone, *commits = await commit_together(server, other, lost, *good)

        assert conflict.stays == Digest.of(b"the first")
        assert isinstance(gone, ServerError)
        assert gone.code is ErrorCode.UNAVAILABLE
        assert [commit.stored.digest for commit in commits] == [each.digest for each in good]
        assert len(logged) == 1
        found = [await server.get(number) for number in range(5)]
        assert found == [b"the first", None, b"2", b"3", b"4"]
        used = await server.used()
        assert (used.artifacts, used.puts) == (4, 4)


@pytest.mark.sql
@ON_EACH
async def test_upload_that_the_database_refuses_fails_alone(served):
    """No client can send such an upload. If a bug admits one, other uploads must still succeed."""
    async with served() as server:
        odd = await stored(server, 0, b"odd", toolchain=None)
        good = [await stored(server, number, b"%d" % number) for number in range(1, 4)]

        refused, *commits = await commit_together(server, odd, *good)

        assert isinstance(refused, Exception)
        assert [commit.stored.digest for commit in commits] == [each.digest for each in good]
        assert [await server.get(number) for number in range(4)] == [None, b"1", b"2", b"3"]
        assert (await server.used()).artifacts == 3


@pytest.mark.parametrize(("served", "database_url"), [("disk", "sqlite")], indirect=True)
async def test_batch_is_tried_once_if_the_database_does_not_answer(served, monkeypatch):
    async with served() as server:
        uploads = [await stored(server, number, b"%d" % number) for number in range(3)]
        tried = []

        def fail(*_):
            tried.append(1)
            raise ServerError(ErrorCode.UNAVAILABLE, "the database does not answer")

        monkeypatch.setattr(server.context.database, "writing_in_steps", fail)
        refused = await commit_together(server, *uploads)

        assert [error.code for error in refused] == [ErrorCode.UNAVAILABLE] * 3
        assert len(tried) == 1


@pytest.mark.parametrize(("served", "database_url"), [("memory", "sqlite")], indirect=True)
@pytest.mark.parametrize("ended_by", ["deadline", "client"])
async def test_ended_upload_is_stored_unless_it_waits_for_a_transaction(
    served, monkeypatch, ended_by
):
    """The first two uploads have their transactions. The third waits for the next transaction."""
    loop, commit_all = asyncio.get_running_loop(), CommitBatcher._commit_all
    now, passed_seconds = loop.time, 0.0
    seen, may_commit = set(), asyncio.Event()

    async def commit_later(committer, uploads):
        seen.update(upload.key for upload in uploads)
        await may_commit.wait()
        return await commit_all(committer, uploads)

    monkeypatch.setattr(loop, "time", lambda: now() + passed_seconds)
    monkeypatch.setattr(CommitBatcher, "_commit_all", commit_later)
    monkeypatch.setattr(uploads_module, "_MAX_LATE", 1)
    async with served() as server:
        service, answers = server.context.uploads, []

        def in_commit():
            return len(seen) + sum(map(len, [*service.committer._waiting.values()]))

        for number, namespace in ((1, "team"), (2, "other"), (3, "team")):
            putting = server.put(b"%d" % number, number, namespace=namespace)
            answers.append(asyncio.create_task(putting))
            await asyncio.to_thread(until, lambda number=number: in_commit() == number)
        assert len(seen) == 2

        if ended_by == "deadline":
            passed_seconds = 100.0
        else:
            for each in answers:
                each.cancel()
        error = ServerError if ended_by == "deadline" else asyncio.CancelledError
        for each in await asyncio.gather(*answers, return_exceptions=True):
            assert isinstance(each, error)
        await asyncio.to_thread(until, lambda: len(service.tasks) == 2)
        assert len(service.blobs.blobs) == 2
        may_commit.set()
        await asyncio.wait(service.tasks)

        assert await server.get(1) == b"1"
        assert await server.get(2, "other") == b"2"
        assert await server.get(3) is None
        assert len(service.blobs.blobs) == 2


@pytest.mark.parametrize(
    ("database_url", "moment"),
    [
        ("sqlite", "after_commit"),
        pytest.param("postgresql", "before_commit", marks=pytest.mark.extended),
    ],
    indirect=["database_url"],
)
async def test_kill_during_a_batch_loses_no_acknowledged_upload(
    database_url, tmp_path, process_environment, connect, writers, moment
):
    """The transaction of the batch is not committed yet, or committed but not acknowledged."""
    environment = process_environment | {"GRAPHSTASH_DATABASE_URL": database_url}
    killing = {"before_commit": "pass", "after_commit": "pass"} | {moment: "kill_in(uploads)"}
    command = (sys.executable, "-c", KILLED.format(**killing))
    server = ServerProcess(tmp_path / "data", command=command, environment=environment)
    with writers([connect(server.url) for _ in range(8)]) as acknowledged:
        await asyncio.to_thread(server.process.wait)
    assert server.process.returncode == -signal.SIGKILL
    assert len(acknowledged) > 10

    with ServerProcess(tmp_path / "data", environment=environment) as again:
        api = connect(again.url)
        for number, blob in acknowledged.items():
            assert api.get(number).content == blob
        for number in set(range(max(acknowledged) + 16)) - set(acknowledged):
            blob = b"%d " % number * 5000
            answer = api.get(number)
            assert answer.status_code == 404 or answer.content == blob
            assert api.put(blob, number).status_code in {200, 201}


@pytest.mark.parametrize("fails", [False, True])
def test_threads_that_arrive_during_an_fsync_share_the_next_and_its_failure(
    monkeypatch, tmp_path, fails
):
    began, waiting, may_end = [], [], threading.Event()

    def sync(directory):
        began.append(directory)
        may_end.wait()
        if fails:
            raise OSError("the disk is gone")

    class Counted(Future):
        def result(self, timeout=None):
            waiting.append(self)
            return super().result(timeout)

    monkeypatch.setattr(storage_upload, "sync_directory", sync)
    monkeypatch.setattr(storage_upload, "Future", Counted)
    syncs = DirectorySyncs()
    with ThreadPoolExecutor(6) as pool, closing(SimpleNamespace(close=may_end.set)):
        first = pool.submit(syncs.sync, tmp_path)
        until(lambda: len(began) == 1)
        late = [pool.submit(syncs.sync, tmp_path) for _ in range(4)]
        until(lambda: len(waiting) == 3)  # the fourth waits for its turn to sync
        elsewhere = pool.submit(syncs.sync, tmp_path / "elsewhere")
        until(lambda: len(began) == 2)
        assert not any(each.done() for each in (first, *late))
    for each in (first, elsewhere, *late):
        assert isinstance(each.exception(), OSError if fails else type(None))
    assert began == [tmp_path, tmp_path / "elsewhere", tmp_path]
    fails = False
    syncs.sync(tmp_path)  # no earlier failure makes this call fail
    assert len(began) == 4


def blobs_of_one_directory():
    blobs = (b"%d" % number for number in itertools.count())
    return (blob for blob in blobs if Digest.of(blob).sha256.startswith("00"))


async def test_upload_ends_after_fsync_that_began_after_its_rename(monkeypatch, tmp_path):
    seen = []
    sync = storage_upload.sync_directory

    def look_and_sync(directory):
        names = {path.name for path in directory.iterdir()}
        sync(directory)
        seen.append(names)

    monkeypatch.setattr(storage_upload, "sync_directory", look_and_sync)
    in_one = blobs_of_one_directory()
    store = DiskBlobStore(tmp_path)

    async def put(blob):
        await store.put(Digest.of(blob), as_chunks(blob))
        assert any(Digest.of(blob).sha256 in names for names in seen)

    await asyncio.gather(*map(put, itertools.islice(in_one, 32)))
    await store.close()


async def test_first_upload_into_existing_directory_syncs_directory_entry(monkeypatch, tmp_path):
    """The process that created the directory may have died before the directory was durable."""
    synced = []
    sync = storage_upload.sync_directory

    def count_and_sync(directory):
        sync(directory)
        synced.append(directory.name)

    in_one = blobs_of_one_directory()
    store = DiskBlobStore(tmp_path)
    shard = tmp_path / "sha256" / "00"
    shard.mkdir()  # by another process, after the start of this one
    monkeypatch.setattr(storage_upload, "sync_directory", count_and_sync)

    async def put():
        synced.clear()
        blob = next(in_one)
        await store.put(Digest.of(blob), as_chunks(blob))
        return list(synced)

    assert await put() == ["sha256", "00"]
    assert await put() == ["00"]
    shutil.rmtree(shard)
    assert await put() == ["sha256", "00"]
    await store.close()


@pytest.mark.sql
async def test_number_of_statements_of_a_repair_does_not_depend_on_artifacts(opened):
    """Covers lost artifacts of two namespaces, damaged ones, and blobs without an artifact."""
    taken = {}
    async with opened() as server:
        blobs, reconciler = opened.blobs, server.context.reconciler

        async def check():
            findings = reconciler.check(
                blobs_before=opened.clock.now + timedelta(days=36500),
                is_deep=True,
                is_repair=True,
                checked=lambda _: None,
            )
            return [finding.problem async for finding in findings]

        for count in (2, 12):
            for namespace, number in itertools.product(("one", "two"), range(count)):
                await server.put(f"{namespace} {number}".encode(), number, namespace=namespace)
                await blobs.delete(Digest.of(f"{namespace} {number}".encode()))
            for number in range(count):
                await server.put(f"damaged {number}".encode(), number, namespace="three")
                await blobs.put(
                    Digest.of(f"orphan {number}".encode()), as_chunks(f"orphan {number}".encode())
                )
                damaged = Digest.of(f"damaged {number}".encode())
                blobs.blobs[damaged.sha256] = b"x" * damaged.size_bytes
            with recorded() as statements:
                problems = await check()
            taken[count] = len(statements)
            assert Counter(problems) == {"lost": 2 * count, "damaged": count, "orphan": count}
            assert await check() == []
            assert (await server.used("one")).artifacts == 0
        assert not [digest async for digest in blobs.list()]
    assert taken[12] == taken[2]


@pytest.mark.sql
async def test_number_of_statements_to_clear_a_namespace_is_constant(opened):
    taken = {}
    async with opened() as server:
        for count in (2, 12):
            for number in range(count):
                await server.put(f"blob {number}".encode(), number)
            with recorded() as statements:
                deleted = await server.context.artifacts.delete_all(Namespace("team"), actor=ACTOR)
            assert deleted.artifacts == count
            taken[count] = len(statements)
            assert (await server.used()).artifacts == 0
        assert not [digest async for digest in opened.blobs.list()]
    assert taken[12] == taken[2]
