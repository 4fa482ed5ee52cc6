"""The size budget: which artifacts are evicted, and that eviction loses no others."""

import asyncio
import re
from datetime import timedelta

import pytest

from graphstash_schema import ErrorCode, ManifestName
from graphstash_server.actor import Actor
from graphstash_server.db.queries.artifacts import pin_artifacts
from graphstash_server.errors import NoSpaceError, ServerError
from graphstash_server.eviction_order import HALF_LIFE
from graphstash_server.services.artifacts import service
from graphstash_server.services.artifacts.eviction import Planned
from graphstash_server.storage.base import CHUNK_BYTES
from graphstash_server.testing import MemoryBlobStore
from graphstash_server.testing.stores import as_chunks
from support.services import ACTOR, DAY, HOUR, TEAM, evicted, key_of, upload_of

pytestmark = pytest.mark.anyio


@pytest.mark.sql
async def test_least_valuable_artifacts_are_evicted_first(opened):
    async with opened(soft_limit_bytes=50_000) as store:
        await store.fill(10)
        assert await store.evict() == 6  # down to 95 % of 50,000
        assert await store.kept(10) == [6, 7, 8, 9]
        used = await store.used()
        assert (used.artifacts, used.size_bytes) == (4, 40_000)
        assert (used.evictions, used.evicted_bytes) == (6, 60_000)
        logged = await store.evictions()
        assert logged == evicted(range(6), "over the soft limit", by=Actor.server())

        store.clock.turn(HALF_LIFE.total_seconds())
        await store.use(6)
        await store.add(10, 20_000, seconds=8.4)
        await store.add(11, 5_000, seconds=3)
        await store.evict()
        assert await store.kept(12) == [6, 8, 9, 11]  # worth 7, 4.5, 5 and 6 per 10,000 bytes


@pytest.mark.sql
async def test_looked_up_artifact_is_protected_for_a_limited_time(opened):
    async with opened(store_limit_bytes=30_000, soft_limit_bytes=30_000) as store:
        await store.fill(3)
        await store.look_up(0)
        await store.add(3, seconds=9)
        assert await store.kept(4) == [0, 2, 3]
        store.clock.turn(HOUR)
        await store.add(4, seconds=9)
        assert await store.kept(5) == [2, 3, 4]
        await store.look_up(2)
        await store.add(5, 29_000, seconds=9)
        assert await store.kept(6) == [5]


@pytest.mark.sql
async def test_protection_lasts_until_the_latest_end_of_its_look_ups_and_pins(opened):
    async with opened(store_limit_bytes=30_000, soft_limit_bytes=30_000) as store:
        await store.fill(3)
        for _ in range(2):
            await store.look_up(0)
            store.clock.turn(HOUR)
        await store.look_up(0)
        await store.add(3, seconds=9)
        assert await store.kept(4) == [0, 2, 3]

        now = store.clock()
        async with store.context.database.writing() as connection:
            for days in (1, 9, 1):
                until = now + timedelta(days=days)
                await pin_artifacts(connection, [key_of(2)], until=until)
        store.clock.turn(5 * DAY)
        await store.add(4, 20_000, seconds=9)
        assert await store.kept(5) == [2, 4]


async def test_each_namespace_has_its_own_budget(opened):
    limits = {"namespace_limits": {"ci-*": 50_000}, "namespace_limit_bytes": 200_000}
    async with opened(**limits) as store:
        for number in range(10):
            await store.add(number, namespace="ci-nightly", seconds=100)
            await store.add(number, namespace="team", seconds=1)
        await store.evict()
        assert len(await store.kept(10, "team")) == 10
        assert len(await store.kept(10, "ci-nightly")) == 4  # 95 % of 90 % of 50,000


@pytest.mark.sql
@pytest.mark.parametrize("is_limited", [True, False], ids=["limit", "disk"])
async def test_upload_evicts_to_make_room_unless_it_can_never_fit(opened, is_limited):
    """The disk limits a store without a configured limit."""
    limits = {"store_limit_bytes": 30_000, "soft_limit_bytes": 30_000} if is_limited else {}
    async with opened(**limits) as store:
        store.blobs.capacity_bytes = 10**9 if is_limited else 30_000
        await store.fill(6)
        assert await store.kept(6) == [3, 4, 5]
        assert sum(map(len, store.blobs.blobs.values())) == 30_000
        reason = "over the store's limit" if is_limited else "the disk is full"
        assert await store.evictions() == evicted(range(3), reason)

        with pytest.raises(NoSpaceError) as refused:
            await store.add(7, 30_001)
        assert await store.kept(6) == [3, 4, 5]  # the refused upload evicted nothing
        if is_limited:
            # A caller of one namespace gets no total of all namespaces.
            assert re.findall(r"\d+", refused.value.detail) == ["30001", "30000"]
            assert refused.value.limit == 30_000

        for pinned, size in ((3, 25_000), (4, 20_000), (5, 10_000)):  # fits only without this pin
            await store.pin(pinned)
            with pytest.raises(NoSpaceError):
                await store.add(8, size)
            assert await store.kept(9) == [3, 4, 5]


async def test_uploads_and_manifests_evict_from_their_own_namespace(opened):
    async with opened(namespace_limit_bytes=50_000) as store:
        with pytest.raises(NoSpaceError, match="the namespace team"):
            await store.add(0, 50_001)
        for number in range(3):
            await store.add(number, 20_000, seconds=1 + number)
        keys = [key_of(number) for number in range(30)]
        await store.context.manifests.merge(
            TEAM, ManifestName("nightly"), keys, writer="", actor=ACTOR
        )
        assert await store.evictions() == evicted((0, 1), "over the namespace's limit")


@pytest.mark.sql
async def test_two_servers_never_evict_for_the_same_excess(opened):
    async with opened(soft_limit_bytes=500_000) as one, opened(soft_limit_bytes=500_000) as two:
        await one.fill(100)
        evicted = await asyncio.gather(one.evict(), two.evict())
        assert sum(evicted) == 53  # to 95 % of the soft limit, once
        assert sum(await asyncio.gather(one.collect(), two.collect())) == 53


async def test_dry_run_names_exactly_the_artifacts_that_a_run_evicts(opened):
    limits = {"store_limit_bytes": 200_000, "namespace_limits": {"ci": 50_000}}
    async with opened(**limits) as store:
        for number in range(9):
            await store.add(number, seconds=2 + number, namespace="ci")
        await store.evict()
        store.context.evictor.is_needed.clear()
    async with opened(soft_limit_bytes=60_000, namespace_limits={"ci": 30_000}) as store:
        await store.fill(9)
        plan = store.context.evictor.plan(is_confirmed=True)
        planned = {candidate.key async for candidate in plan}
        before = {key_of(n, ns) for ns in ("ci", "team") for n in await store.kept(9, ns)}
        await store.evict()
        after = {key_of(n, ns) for ns in ("ci", "team") for n in await store.kept(9, ns)}
        assert planned == before - after
        assert len(planned) > 5


async def test_dry_run_plans_no_more_once_the_planned_artifacts_free_enough(opened):
    async with opened() as store:
        await store.fill(7)
    async with opened(soft_limit_bytes=60_000) as store:
        planned = Planned()
        first, *_ = [each async for each in store.context.evictor.plan()]
        planned.add(first)
        assert [each async for each in store.context.evictor.plan(planned=planned)] == []


async def test_time_to_make_room_counts_toward_the_deadline_of_an_upload(opened, monkeypatch):
    """Each step of the upload is in time, and all of them together are not."""
    loop, delete = asyncio.get_running_loop(), MemoryBlobStore.delete
    now, passed_seconds = loop.time, 0.0

    async def slow(blobs, digest, **name):
        nonlocal passed_seconds
        passed_seconds += 7
        await asyncio.sleep(0)
        return await delete(blobs, digest, **name)

    monkeypatch.setattr(loop, "time", lambda: now() + passed_seconds)
    monkeypatch.setattr(MemoryBlobStore, "delete", slow)
    async with opened(store_limit_bytes=9 * CHUNK_BYTES) as store:
        for number in range(8):
            await store.add(number, CHUNK_BYTES)
        chunks = [b"%d" % number * CHUNK_BYTES for number in range(8)]
        upload = upload_of(key_of(9), b"".join(chunks))
        with pytest.raises(ServerError) as refused:
            await store.context.uploads.publish(upload, as_chunks(*chunks))
        assert refused.value.code is ErrorCode.UNAVAILABLE
        assert not await store.has(9)


async def test_time_before_the_first_chunk_counts_toward_the_deadline_of_an_upload(
    opened, monkeypatch
):
    loop, put = asyncio.get_running_loop(), MemoryBlobStore.put
    now, passed_seconds = loop.time, 0.0

    async def pass_time():
        nonlocal passed_seconds
        passed_seconds += 20
        await asyncio.sleep(0)

    async def slow(blobs, digest, chunks):
        await pass_time()
        await put(blobs, digest, chunks)
        await pass_time()
        await asyncio.sleep(0)

    monkeypatch.setattr(loop, "time", lambda: now() + passed_seconds)
    monkeypatch.setattr(MemoryBlobStore, "put", slow)
    async with opened() as store:
        with pytest.raises(ServerError, match="did not finish within 30 s"):
            await store.context.uploads.publish(upload_of(key_of(9), b"x"), as_chunks(b"x"))


@pytest.mark.sql
async def test_concurrent_uploads_of_one_server_stay_below_the_limits(opened):
    limits = {"store_limit_bytes": 200_000, "namespace_limit_bytes": 100_000}
    async with opened(**limits) as store:
        uploads = (store.add(number) for number in range(40))
        await asyncio.gather(*uploads, return_exceptions=True)
        assert (await store.used()).size_bytes <= 100_000
        assert sum(map(len, store.blobs.blobs.values())) <= 200_000


@pytest.mark.sql
async def test_large_lookups_in_any_order_do_not_wait_for_each_other(opened):
    async with opened() as store:
        for number in range(20):
            await store.add(number, 10)
        numbers = range(2000)
        for _ in range(3):
            found = await asyncio.gather(store.look_up(*numbers), store.look_up(*numbers[::-1]))
            assert found == [20, 20]
            store.clock.turn(HOUR)


async def test_look_ups_protect_a_limited_number_of_artifacts(opened, monkeypatch):
    """One limit holds for a caller, another one for a namespace."""
    monkeypatch.setattr(service, "_MAX_PROTECTED_OF_CALLER", 3)
    monkeypatch.setattr(service, "_MAX_PROTECTED", 5)
    async with opened(soft_limit_bytes=1) as store:
        await store.fill(10)
        for caller, numbers in (("one", range(6)), ("one", range(6)), ("two", range(6, 10))):
            assert await store.look_up(*numbers, caller=caller) == len(numbers)
        await store.evict()
        kept = await store.kept(10)
        assert (len(kept), sum(number < 6 for number in kept)) == (5, 3)
