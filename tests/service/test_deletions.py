"""Blobs are deleted beside uploads, other servers and crashes, and no acknowledged blob is lost."""

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from graphstash_schema import Digest, ErrorCode
from graphstash_schema.withdrawals import WithdrawalQuery
from graphstash_server.clock import system_clock
from graphstash_server.context import open_services
from graphstash_server.db.queries.artifacts import delete_artifacts
from graphstash_server.db.queries.deletions import add_deletions
from graphstash_server.errors import ServerError
from graphstash_server.services.artifacts import allocation, blobs, service
from graphstash_server.storage import TieredBlobStore
from graphstash_server.testing.stores import as_chunks
from support.services import ACTOR, TEAM, ServiceClient, key_of, upload_of
from support.waiting import until

pytestmark = pytest.mark.anyio


class Stopped(BaseException):
    """Stands for SIGKILL: no handler of failures may handle it."""


@pytest.mark.parametrize("is_deleted", [False, True], ids=["before the blob goes", "after it went"])
async def test_kill_during_deletion_blocks_no_upload_and_is_repaired(
    opened, monkeypatch, is_deleted
):
    monkeypatch.setattr(allocation, "_PATIENCE_SECONDS", 0.1)
    async with opened(store_limit_bytes=50_000) as store:
        await store.fill(5)
        delete = store.blobs.delete

        async def dying(digest, **name):
            if is_deleted:
                await delete(digest, **name)
            raise Stopped

        with monkeypatch.context() as patch:
            patch.setattr(store.blobs, "delete", dying)
            with pytest.raises(Stopped):
                await store.add(5, seconds=9)
        await store.add(6, seconds=9)
        assert await store.kept(7) == [2, 3, 4, 6]
    store.clock.turn(10 * 60)  # its claim is over
    async with opened(store_limit_bytes=50_000) as other:
        await other.collect()
        assert len(other.blobs.blobs) == 4
        assert await other.kept(7) == [2, 3, 4, 6]


async def test_upload_evicts_no_more_while_its_server_deletes_blobs(opened, monkeypatch):
    """Maintenance may delete what an upload has evicted, and take longer than for other servers."""
    monkeypatch.setattr(allocation, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(blobs, "_DELETE_SECONDS", 80.0)
    async with opened(store_limit_bytes=50_000) as store:
        await store.fill(5)
        shrink = store.context.evictor.shrink
        assert await shrink(None, goal_bytes=45_000, actor=ACTOR, reason="by this test") == 1
        go_on, under_way = await store.begin_deletion()
        adding = asyncio.create_task(store.add(5))
        await asyncio.wait([adding], timeout=0.3)
        go_on.set()
        await asyncio.gather(adding, under_way)
        assert await store.kept(6) == [1, 2, 3, 4, 5]


async def refuse(digest, **_name):
    raise ServerError(ErrorCode.UNAVAILABLE, f"cannot delete {digest}")


async def test_artifact_is_withdrawn_although_the_store_keeps_its_blob(opened, monkeypatch):
    async with opened() as store:
        await store.fill(2)
        with monkeypatch.context() as patch:
            patch.setattr(store.blobs, "delete", refuse)
            assert await store.context.artifacts.delete(key_of(0), actor=ACTOR)
        assert await store.kept(2) == [1]
        page = await store.context.withdrawals.read(TEAM, WithdrawalQuery())
        assert len(page.withdrawals) == 1
        assert len(store.blobs.blobs) == 2
        store.clock.turn(91)  # the claim is over
        assert await store.collect() == 1
        assert len(store.blobs.blobs) == 1


async def test_deletion_is_answered_although_the_store_hangs(opened, monkeypatch):
    monkeypatch.setattr(blobs, "_DELETE_SECONDS", 80.0)  # less than a claim
    is_asked, goes_on = asyncio.Event(), asyncio.Event()
    async with opened() as store, opened() as other:
        await store.add(0)
        await store.add(1)
        assert await other.get(0) is not None  # its row is in memory
        delete = store.blobs.delete

        async def hang(digest, **name):
            is_asked.set()
            await goes_on.wait()
            return await delete(digest, **name)

        monkeypatch.setattr(store.blobs, "delete", hang)
        async with asyncio.timeout(60):
            assert await store.context.artifacts.delete(key_of(0), actor=ACTOR)
        assert is_asked.is_set()
        store.clock.turn(service._DELETE_SECONDS)
        assert [await each.get(0) for each in (store, other)] == [None, None]
        assert len(store.blobs.blobs) == 2
        goes_on.set()
        assert await store.context.collector.wait_for_deletions(300) == 0
        assert len(store.blobs.blobs) == 1


async def test_all_artifacts_are_withdrawn_although_the_store_keeps_their_blobs(
    opened, monkeypatch
):
    monkeypatch.setattr(service, "_DELETION_PAGE", 2)
    async with opened() as store:
        await store.fill(5)
        monkeypatch.setattr(store.blobs, "delete", refuse)
        assert await store.context.artifacts.delete_all(TEAM, actor=ACTOR) == (5, 5)
        assert await store.kept(5) == []


@pytest.mark.sql
@pytest.mark.parametrize("hanging", [1, 60])
async def test_clearing_a_namespace_does_not_wait_for_a_store_that_hangs(
    opened, monkeypatch, hanging
):
    """One blob delays no other one. If the store hangs, the rest is left to maintenance."""
    monkeypatch.setattr(blobs, "_DELETE_SECONDS", 0.05)
    asked, seconds = [], 0
    async with opened() as store:
        await store.fill(60)
        delete = store.blobs.delete

        async def hang(digest, **name):
            asked.append(digest)
            if len(set(asked)) <= hanging:
                store.clock.turn(seconds)
                await asyncio.Event().wait()
            return await delete(digest, **name)

        with monkeypatch.context() as patch:
            patch.setattr(store.blobs, "delete", hang)
            cleared = await store.context.artifacts.delete_all(TEAM, actor=ACTOR)
            assert cleared == (60, hanging)
            assert len(store.blobs.blobs) == hanging
            assert len(asked) == (60 if hanging == 1 else 2 * service._COLLECTED_AT_ONCE)
            store.clock.turn(10 * 60)  # the claims are over
            asked.clear()
            seconds = 15
            with pytest.raises(ServerError, match="was not deleted"):
                await store.collect()
            assert len(asked) == min(hanging, blobs._CLAIMED)
        store.clock.turn(10 * 60)
        assert await store.collect() == hanging
        assert store.blobs.blobs == {}


@pytest.mark.sql
async def test_blobs_that_the_store_never_deletes_delay_no_other_blob(opened, monkeypatch):
    """They are the first ones of the collector, and more than it claims at once."""
    monkeypatch.setattr(blobs, "_CLAIMED", 2)
    async with opened() as store:
        await store.fill(5)
        kept, asked, delete = sorted(store.blobs.blobs)[:4], [], store.blobs.delete

        async def refuse(digest, **name):
            asked.append(digest.sha256)
            if digest.sha256 in kept:
                raise ServerError(ErrorCode.UNAVAILABLE, "read-only")
            return await delete(digest, **name)

        monkeypatch.setattr(store.blobs, "delete", refuse)
        async with store.context.database.writing() as connection:
            rows = [await store.context.artifacts.find_row(key_of(each)) for each in range(5)]
            await add_deletions(connection, [row.digest for row in rows])
            await delete_artifacts(connection, rows)
        with pytest.raises(ServerError, match="read-only"):
            await store.collect()
        assert sorted(store.blobs.blobs) == kept
        assert len(asked) == len(set(asked)) == 5


def has_copies(directory):
    return list(directory.glob("sha256/*/*"))


async def test_deleted_artifact_is_not_served_from_the_tier_of_another_host(
    tmp_path, opened, monkeypatch
):
    """The other host has the row in memory and a copy of the blob."""
    monkeypatch.setattr(service, "_MAX_AGE", timedelta(seconds=0.3))
    monkeypatch.setattr(service, "_DELETE_SECONDS", 0.5)
    async with opened() as first:
        settings = first.context.settings.model_copy(update={"blob_store": "s3"})
        hosts = []
        async with AsyncExitStack() as stack:
            for number in range(2):
                tier = TieredBlobStore(
                    first.blobs, tmp_path / f"tier-{number}", limit_bytes=1_000_000
                )
                stack.push_async_callback(tier.close)
                services = open_services(settings, blob_store=tier, clock=system_clock)
                hosts.append(ServiceClient(await stack.enter_async_context(services)))
            await hosts[0].put(b"large" * 10_000)
            for is_deleted in (False, True):
                if is_deleted:
                    assert await hosts[0].context.artifacts.delete(key_of(), actor=ACTOR)
                for host in hosts:
                    assert (await host.get() is None) is is_deleted
                if not is_deleted:
                    copies = partial(has_copies, tmp_path / "tier-1")
                    await asyncio.to_thread(until, copies)


@pytest.mark.sql
async def test_claimed_blob_is_left_to_its_server_and_its_upload_waits(opened):
    async with opened(soft_limit_bytes=1) as one, opened() as two:
        await one.add(0)
        await one.evict()
        go_on, under_way = await one.begin_deletion()
        others = asyncio.create_task(two.collect())
        if two.context.database.is_postgresql:
            assert await others == 0
        adding = asyncio.create_task(two.add(0))
        await asyncio.wait([adding], timeout=0.2)
        assert not adding.done()
        go_on.set()
        assert await under_way + await others == 1
        await adding
        assert await two.has(0)


async def test_upload_unmarks_its_blob_which_is_deleted_if_the_upload_fails(opened):
    async def broken():
        yield b"only the beginning"
        raise ConnectionResetError

    async with opened(soft_limit_bytes=1) as store:
        await store.add(0)
        await store.evict()
        upload = upload_of(key_of(7), store.blob(0, 10_000))
        with pytest.raises(ConnectionResetError):
            await store.context.uploads.publish(upload, broken())
        await store.collect()
        assert store.blobs.blobs == {}

        await store.add(0)
        await store.evict()
        await store.add(0)
        await store.collect()
        assert await store.has(0)


async def test_upload_cancelled_before_its_commit_begins_holds_nothing(opened, monkeypatch):
    async with opened() as store:
        uploads, digest = store.context.uploads, Digest.of(b"x")
        start = uploads._in_background

        def start_cancelled(work):
            task = start(work)
            task.cancel()
            return task

        with monkeypatch.context() as patch:
            patch.setattr(uploads, "_in_background", start_cancelled)
            with pytest.raises(asyncio.CancelledError):
                await uploads.publish(upload_of(key_of(7), b"x"), as_chunks(b"x"))
        assert [*store.blobs.blobs] == [digest.sha256]
        await uploads.collector.collect_all([digest])
        assert store.blobs.blobs == {}


@pytest.mark.sql
@pytest.mark.parametrize(
    ("database_url", "lost"),
    [("sqlite", "cancelled"), ("postgresql", "cancelled"), ("postgresql", "disconnected")],
    indirect=["database_url"],
)
async def test_deletion_that_outlives_its_transaction_spares_acknowledged_blobs(
    opened, request, lost, database_url, monkeypatch
):
    """A request to S3 continues after its sender has ended."""
    async with opened(soft_limit_bytes=1) as one, opened() as two:
        await one.add(0)
        await one.evict()
        delete = one.blobs.delete
        deleting, may_land = asyncio.Event(), asyncio.Event()
        late = []

        async def land(digest, **name):
            await may_land.wait()
            await delete(digest, **name)

        async def slow(digest, **name):
            late.append(asyncio.create_task(land(digest, **name)))
            deleting.set()
            await asyncio.shield(late[0])

        one.blobs.delete = slow
        under_way = asyncio.create_task(one.collect())
        await deleting.wait()
        if lost == "cancelled":
            under_way.cancel()
        else:
            cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query <> ''"
            await asyncio.to_thread(
                request.getfixturevalue("postgres").execute,
                f"{cut} AND pid <> pg_backend_pid() AND datname = '{Path(database_url).name}'",
            )
        adding = asyncio.create_task(two.add(0))
        await asyncio.wait([adding], timeout=0.5)  # the upload may wait for the deletion
        may_land.set()
        monkeypatch.setattr(blobs, "_SETTLE_SECONDS", 0.001)
        (outcome,) = await asyncio.gather(adding, return_exceptions=True)
        acknowledged = outcome is None
        assert acknowledged or outcome.code is ErrorCode.UNAVAILABLE
        await late[0]
        await asyncio.gather(under_way, return_exceptions=True)
        assert await two.has(0) == acknowledged


async def test_server_frozen_since_its_claim_deletes_nothing(opened, monkeypatch):
    """Another server may have stored the blob since the claim."""
    async with opened(soft_limit_bytes=1) as one, opened() as two:
        await one.add(0)
        await one.evict()
        find = blobs.find_generations

        async def frozen(connection, digests):
            found = await find(connection, digests)
            one.clock.turn(91)
            return found

        monkeypatch.setattr(blobs, "find_generations", frozen)
        with pytest.raises(ServerError, match="its claim ended before"):
            await one.collect()
        await two.add(0)
        assert await two.has(0)


@pytest.mark.sql
async def test_claim_that_expired_in_the_queue_is_not_used(opened):
    """One statement claims a page. If the store is slow, a claim ends before its blob's turn."""
    async with opened(soft_limit_bytes=1) as one, opened() as two:
        await one.add(0)
        await one.add(1)
        await one.evict()
        order = sorted(range(2), key=lambda number: Digest.of(one.blob(number, 10_000)).sha256)
        go_on, under_way = await one.begin_deletion()
        one.clock.turn(10 * 60)
        await two.add(order[1])
        go_on.set()
        await under_way
        assert await two.has(order[1])
