"""The size budget: what goes, what stays, and that nothing is lost on the way."""

import asyncio
import hashlib
import math
import random
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

from graphstash_schema import (
    ArtifactKey,
    ArtifactMetadata,
    Digest,
    ErrorCode,
    ManifestName,
    Namespace,
    NamespacePolicy,
)
from graphstash_server.actor import Actor
from graphstash_server.context import open_services, prepare_database
from graphstash_server.errors import NoSpaceError, ServerError, ShortBlobError, StartError
from graphstash_server.keys import StoredKey
from graphstash_server.services.commits import Upload
from graphstash_server.settings import load_settings
from graphstash_server.testing import MemoryBlobStore
from graphstash_server.testing.stores import as_chunks
from graphstash_server.value import HALF_LIFE, aged, density

ACTOR = Actor("everybody")
START = datetime(2026, 1, 1, tzinfo=UTC)


class Turned:
    """A clock that a test turns."""

    def __init__(self):
        self.now = START

    def __call__(self):
        return self.now


class Store:
    """The services of one server, and a client's verbs."""

    def __init__(self, context, blobs, clock):
        self.context = context
        self.blobs = blobs
        self.clock = clock

    def key(self, number, namespace="team"):
        fingerprint = hashlib.sha256(str(number).encode()).hexdigest()
        key = ArtifactKey.parse("jax", "cpu", fingerprint)
        return StoredKey.of(Namespace(namespace), key)

    @staticmethod
    def blob(number, size, namespace="team"):
        return f"{namespace} {number} ".encode().ljust(size, b".")[:size]

    async def put(self, number, size=1000, *, seconds=1.0, namespace="team", toolchain=""):
        blob = self.blob(number, size, namespace)
        metadata = ArtifactMetadata(
            compile_seconds=seconds, raw_size_bytes=size, toolchain=toolchain
        )
        upload = Upload(
            key=self.key(number, namespace),
            digest=Digest.of(blob),
            metadata_header=metadata.to_header(),
            compile_seconds=seconds,
            toolchain=toolchain,
            only_if_absent=False,
            actor=ACTOR,
            policy=NamespacePolicy(),
        )
        await self.context.uploads.publish(upload, as_chunks(blob))

    async def use(self, number, namespace="team"):
        self.context.accounting.count_hit(self.key(number, namespace), saved_seconds=1)
        await self.context.accounting.flush()

    async def has(self, number, namespace="team"):
        return await self.context.artifacts.find(self.key(number, namespace)) is not None

    async def kept(self, count, namespace="team"):
        return [number for number in range(count) if await self.has(number, namespace)]

    async def used(self, namespace="team"):
        stats = (await self.context.statistics.read()).namespaces
        return next((each for each in stats if each.namespace == namespace), None)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path):
    if request.param == "postgresql":
        return request.getfixturevalue("postgres").new_database()
    return f"sqlite:///{tmp_path / 'database.sqlite3'}"


@pytest.fixture
def opened(tmp_path, database_url):
    """Opens the services of a server; two of them share everything but the process's state."""
    blobs = MemoryBlobStore()
    clock = Turned()

    @asynccontextmanager
    async def make(**limits):
        settings = load_settings(data_dir=tmp_path, database_url=database_url, **limits)
        await prepare_database(settings, is_migrating=True)
        async with open_services(settings, blob_store=blobs, clock=clock) as context:
            yield Store(context, blobs, clock)

    return make


def run(test):
    return asyncio.run(test())


def test_the_rank_orders_as_the_value_does_at_any_time():
    """The definition, against the formula that is stored."""
    randomness = random.Random(7)
    artifacts = [
        (
            randomness.uniform(0.01, 4000),
            randomness.randrange(4096, 10**9),
            START + timedelta(seconds=randomness.uniform(0, 10**7)),
        )
        for _ in range(200)
    ]

    def value(artifact, now):
        seconds, size, used = artifact
        return math.log(seconds / size) - math.log(2) * ((now - used) / HALF_LIFE)

    def rank(artifact):
        seconds, size, used = artifact
        return density(compile_seconds=seconds, size_bytes=size) + aged(used)

    for later in (0, 10**7, 10**9):
        now = START + timedelta(seconds=10**7 + later)
        by_value = sorted(artifacts, key=lambda artifact: value(artifact, now))
        assert by_value == sorted(artifacts, key=rank)


def test_what_costs_little_to_compile_again_goes_first(opened):
    async def test():
        async with opened(soft_limit_bytes=50_000) as store:
            for number in range(10):
                await store.put(number, 10_000, seconds=1 + number)
            assert await store.context.evictor.run() == 6  # down to 95 % of 50,000
            assert await store.kept(10) == [6, 7, 8, 9]
            used = await store.used()
            assert (used.artifacts, used.size_bytes) == (4, 40_000)
            assert (used.evictions, used.evicted_bytes) == (6, 60_000)

    run(test)


def test_an_artifact_that_was_used_lately_outlives_a_better_one(opened):
    async def test():
        async with opened(soft_limit_bytes=15_000) as store:
            await store.put(0, 10_000, seconds=1.0)
            await store.put(1, 10_000, seconds=1.9)
            store.clock.now += HALF_LIFE
            await store.use(0)
            await store.context.evictor.run()
            assert await store.kept(2) == [0]

    run(test)


def test_of_two_equals_the_larger_goes(opened):
    async def test():
        async with opened(soft_limit_bytes=22_000) as store:
            await store.put(0, 20_000, seconds=5)
            await store.put(1, 10_000, seconds=5)
            await store.context.evictor.run()
            assert await store.kept(2) == [1]

    run(test)


def test_pinned_artifacts_stay_until_their_pin_ends(opened):
    async def test():
        async with opened(soft_limit_bytes=15_000) as store:
            for number in range(3):
                await store.put(number, 10_000, seconds=1 + number)
            await store.context.artifacts.lookup(Namespace("team"), [store.key(0)])
            await store.context.evictor.run()
            assert await store.kept(3) == [0]

            store.clock.now += timedelta(hours=1)
            await store.put(1, 10_000, seconds=2)
            await store.context.evictor.run()
            assert await store.kept(3) == [1]

    run(test)


def test_a_job_is_pinned_by_its_manifest(opened):
    async def test():
        async with opened(soft_limit_bytes=10_000) as store:
            for number in range(4):
                await store.put(number, 10_000, seconds=1 + number)
            team, job = Namespace("team"), ManifestName("gpt")
            await store.context.manifests.merge(team, job, [store.key(0), store.key(1)])
            until = store.clock.now + timedelta(days=30)
            assert await store.context.pins.pin(team, job, until=until) == 2
            await store.context.evictor.run()
            assert await store.kept(4) == [0, 1]

            assert await store.context.pins.unpin(team, job) == 2
            await store.context.evictor.run()
            assert await store.kept(4) == []

    run(test)


def test_a_namespace_has_a_budget_of_its_own(opened):
    async def test():
        limits = {"namespace_limits": {"ci-*": 50_000}, "namespace_limit_bytes": 200_000}
        async with opened(**limits) as store:
            for number in range(10):
                await store.put(number, 10_000, namespace="ci-nightly", seconds=100)
                await store.put(number, 10_000, namespace="team", seconds=1)
            await store.context.evictor.run()
            assert len(await store.kept(10, "team")) == 10
            assert len(await store.kept(10, "ci-nightly")) == 4  # 95 % of 90 % of 50,000

    run(test)


def test_an_upload_over_the_hard_limit_makes_its_own_room(opened):
    async def test():
        async with opened(store_limit_bytes=30_000, soft_limit_bytes=30_000) as store:
            for number in range(6):
                await store.put(number, 10_000, seconds=1 + number)
            assert await store.kept(6) == [3, 4, 5]
            assert sum(map(len, store.blobs.blobs.values())) == 30_000

    run(test)


def test_an_upload_is_refused_when_everything_is_pinned_or_it_is_too_large(opened):
    async def test():
        async with opened(store_limit_bytes=30_000) as store:
            for number in range(3):
                await store.put(number, 10_000)
            with pytest.raises(NoSpaceError) as refused:
                await store.put(7, 30_001)
            assert "30001" in refused.value.detail
            assert refused.value.limit == 30_000
            assert await store.kept(3) == [0, 1, 2]  # it drove nobody out

            keys = [store.key(number) for number in range(3)]
            await store.context.artifacts.lookup(Namespace("team"), keys)
            with pytest.raises(NoSpaceError):
                await store.put(3, 10_000)
            assert await store.kept(3) == [0, 1, 2]

    run(test)


def test_a_namespace_over_its_hard_limit_is_refused_by_name(opened):
    async def test():
        async with opened(namespace_limit_bytes=10_000) as store:
            with pytest.raises(NoSpaceError, match="the namespace team"):
                await store.put(0, 10_001)

    run(test)


def test_a_full_disk_makes_room_once(opened):
    """A store that has no limit set is limited by its disk."""

    async def test():
        async with opened() as store:
            store.blobs.capacity_bytes = 30_000
            for number in range(5):
                await store.put(number, 10_000, seconds=1 + number)
            assert await store.kept(5) == [2, 3, 4]

    run(test)


def test_equal_blobs_go_with_their_last_artifact(opened):
    async def test():
        async with opened(soft_limit_bytes=25_000) as store:
            blob = b"the same".ljust(10_000)
            for number in range(2):
                upload = Upload(
                    key=store.key(number),
                    digest=Digest.of(blob),
                    metadata_header="",
                    compile_seconds=1 + number,
                    toolchain="",
                    only_if_absent=False,
                    actor=ACTOR,
                    policy=NamespacePolicy(),
                )
                await store.context.uploads.publish(upload, as_chunks(blob))
            await store.put(2, 10_000, seconds=50)
            await store.context.evictor.run()
            await store.context.keeper.collect_marked()
            assert await store.kept(3) == [1, 2]
            assert len(store.blobs.blobs) == 2

    run(test)


def test_what_nobody_used_for_long_is_retained_no_longer(opened):
    async def test():
        async with opened(retain_days=30) as store:
            for number in range(4):
                await store.put(number)
            store.clock.now += timedelta(days=20)
            await store.use(1)
            store.clock.now += timedelta(days=11)
            assert await store.context.maintenance.retain() == 3
            assert await store.kept(4) == [1]
            assert len(store.blobs.blobs) == 1

    run(test)


def test_the_latest_toolchains_are_retained(opened):
    async def test():
        async with opened(retain_toolchains=2) as store:
            for number, toolchain in enumerate(["torch 2.5", "torch 2.6", "torch 2.7", ""]):
                await store.put(number, toolchain=toolchain)
                store.clock.now += timedelta(days=1)
            await store.use(0)  # somebody is back on 2.5
            assert await store.context.maintenance.retain() == 1
            assert await store.kept(4) == [0, 2, 3]

    run(test)


def test_chores_are_done_by_one_server(opened):
    async def test():
        async with opened(retain_days=1) as one, opened(retain_days=1) as other:
            await one.put(0)
            one.clock.now += timedelta(days=2)
            done = []
            for store in (one, other):
                store.context.maintenance.retain = lambda name=store: _note(done, name)
            await asyncio.gather(*(store.context.maintenance.run_once() for store in (one, other)))
            await one.context.maintenance.run_once()
            assert len(done) == 1
            one.clock.now += timedelta(hours=2)
            await other.context.maintenance.run_once()
            assert len(done) == 2

    async def _note(done, name):
        done.append(name)

    run(test)


def test_two_servers_never_evict_for_the_same_excess(opened):
    async def test():
        async with opened(soft_limit_bytes=500_000) as one, opened(soft_limit_bytes=500_000) as two:
            for number in range(100):
                await one.put(number, 10_000)
            evicted = await asyncio.gather(one.context.evictor.run(), two.context.evictor.run())
            assert sum(evicted) == 53  # to 95 % of the soft limit, once
            deleted = await asyncio.gather(
                one.context.keeper.collect_marked(),
                two.context.keeper.collect_marked(),
            )
            assert sum(deleted) == 53

    run(test)


class Stopped(BaseException):
    """Stands for SIGKILL: nothing that handles failures may handle it."""


@pytest.mark.parametrize("phase", ["before the blob goes", "after the blob went"])
def test_eviction_goes_on_after_a_kill_at_any_point(opened, monkeypatch, phase):
    async def test():
        async with opened(soft_limit_bytes=15_000) as store:
            for number in range(5):
                await store.put(number, 10_000, seconds=1 + number)
            await store.context.evictor.run()
            delete = store.blobs.delete
            deleted = []

            async def dying(digest):
                if len(deleted) == 2:
                    if phase == "after the blob went":
                        await delete(digest)
                    raise Stopped
                deleted.append(digest)
                await delete(digest)

            monkeypatch.setattr(store.blobs, "delete", dying)
            with pytest.raises(Stopped):
                await store.context.keeper.collect_marked()
            monkeypatch.undo()
        store.clock.now += timedelta(minutes=10)  # its claim is over
        async with opened(soft_limit_bytes=15_000) as other:
            await other.context.keeper.collect_marked()
            assert len(other.blobs.blobs) == 1
            assert await other.kept(5) == [4]

    run(test)


def test_a_claim_keeps_other_servers_off(opened):
    async def test():
        async with opened(soft_limit_bytes=10_000) as one, opened(soft_limit_bytes=10_000) as two:
            await one.put(0, 10_000)
            await one.put(1, 10_000)
            await one.context.evictor.run()
            deleting, go_on = asyncio.Event(), asyncio.Event()
            delete = one.blobs.delete

            async def slow(digest):
                deleting.set()
                await go_on.wait()
                await delete(digest)

            one.blobs.delete = slow
            under_way = asyncio.create_task(one.context.keeper.collect_marked())
            await deleting.wait()
            others = asyncio.create_task(two.context.keeper.collect_marked())
            if two.context.database.is_postgresql:
                assert await others == 0
            go_on.set()
            assert await under_way + await others == len([0, 1])

    run(test)


def test_an_upload_takes_the_mark_off_the_blob_that_it_brings(opened):
    async def test():
        async with opened(soft_limit_bytes=1) as store:
            await store.put(0, 10_000)
            await store.context.evictor.run()
            await store.put(0, 10_000)
            await store.context.keeper.collect_marked()
            assert await store.has(0)

    run(test)


def test_an_upload_waits_for_a_deletion_of_its_blob_that_is_under_way(opened):
    async def test():
        async with opened(soft_limit_bytes=1) as one, opened() as two:
            await one.put(0, 10_000)
            await one.context.evictor.run()
            delete = one.blobs.delete
            deleting = asyncio.Event()

            async def slow(digest):
                deleting.set()
                await asyncio.sleep(0.2)
                await delete(digest)

            one.blobs.delete = slow
            under_way = asyncio.create_task(one.context.keeper.collect_marked())
            await deleting.wait()
            await two.put(0, 10_000)
            await under_way
            assert await two.has(0)

    run(test)


def test_a_blob_that_another_server_deletes_in_mid_upload_is_never_acknowledged(opened):
    async def test():
        async with opened() as store:
            put = store.blobs.put

            async def robbed(digest, chunks):
                await put(digest, chunks)
                await store.blobs.delete(digest)

            store.blobs.put = robbed
            with pytest.raises(ServerError) as refused:
                await store.put(0)
            assert refused.value.code is ErrorCode.UNAVAILABLE
            assert not await store.has(0)

    run(test)


def test_a_dry_run_names_what_a_run_evicts(opened):
    async def test():
        limits = {"store_limit_bytes": 200_000, "namespace_limits": {"ci": 50_000}}
        async with opened(**limits) as store:
            for number in range(9):
                await store.put(number, 10_000, seconds=2 + number, namespace="ci")
            await store.context.evictor.run()
            store.context.evictor.is_needed.clear()
        async with opened(soft_limit_bytes=60_000, namespace_limits={"ci": 30_000}) as store:
            for number in range(9):
                await store.put(number, 10_000, seconds=1 + number)
            planned = {candidate.key async for candidate in store.context.evictor.plan()}
            before = {store.key(n, ns) for ns in ("ci", "team") for n in await store.kept(9, ns)}
            await store.context.evictor.run()
            after = {store.key(n, ns) for ns in ("ci", "team") for n in await store.kept(9, ns)}
            assert planned == before - after
            assert len(planned) > 5

    run(test)


def test_a_failing_database_ends_a_round_and_not_the_maintenance(opened, caplog):
    async def test():
        async with opened() as store:
            maintenance = store.context.maintenance
            rounds = []
            went_on = asyncio.Event()

            async def failing():
                rounds.append(1)
                if len(rounds) == 3:
                    went_on.set()
                raise ServerError(ErrorCode.UNAVAILABLE, "no database")

            maintenance.run_once = failing
            task = asyncio.create_task(
                maintenance.run(every_seconds=0.001, started_at=START, was_alone=False)
            )
            await went_on.wait()
            task.cancel()

    run(test)
    assert "no database" in caplog.text


def test_concurrent_uploads_of_one_server_stay_below_the_limits(opened):
    async def test():
        limits = {"store_limit_bytes": 200_000, "namespace_limit_bytes": 100_000}
        async with opened(**limits) as store:
            uploads = (store.put(number, 10_000) for number in range(40))
            await asyncio.gather(*uploads, return_exceptions=True)
            assert (await store.used()).size_bytes <= 100_000
            assert sum(map(len, store.blobs.blobs.values())) <= 200_000

    run(test)


def test_an_upload_that_never_fits_drives_nobody_out(opened):
    async def test():
        limits = {"store_limit_bytes": 50_000, "namespace_limit_bytes": 100_000}
        async with opened(**limits) as store:
            for number in range(4):
                await store.put(number, 10_000)
            with pytest.raises(NoSpaceError):
                await store.put(9, 80_000)
            assert await store.kept(4) == [0, 1, 2, 3]
        async with opened() as store:
            store.blobs.capacity_bytes = 45_000
            with pytest.raises(NoSpaceError):
                await store.put(9, 49_000)
            assert await store.kept(4) == [0, 1, 2, 3]

    run(test)


def test_what_a_dead_server_was_deleting_refuses_no_upload(opened):
    async def test():
        async with opened(store_limit_bytes=40_000) as store:
            for number in range(4):
                await store.put(number, 10_000, seconds=1 + number)
            delete = store.blobs.delete

            async def dying(digest):
                raise Stopped

            store.blobs.delete = dying
            with pytest.raises(Stopped):
                await store.put(4, 10_000, seconds=9)
            store.blobs.delete = delete
            await store.put(5, 10_000, seconds=9)
            assert await store.has(5)

    run(test)


@pytest.mark.parametrize("lost", ["cancelled", "disconnected"])
def test_a_deletion_that_outlives_its_transaction_takes_no_acknowledged_blob(
    opened, request, lost, database_url
):
    """A request to S3 goes on when whoever made it is gone."""

    async def test():
        async with opened(soft_limit_bytes=1) as one, opened() as two:
            await one.put(0, 10_000)
            await one.context.evictor.run()
            delete = one.blobs.delete
            deleting, landed = asyncio.Event(), asyncio.Event()

            async def later(digest):
                await asyncio.sleep(0.5)
                await delete(digest)
                landed.set()

            late = []

            async def slow(digest):
                late.append(asyncio.create_task(later(digest)))
                deleting.set()
                await asyncio.shield(late[0])

            one.blobs.delete = slow
            under_way = asyncio.create_task(one.context.keeper.collect_marked())
            await deleting.wait()
            if lost == "cancelled":
                under_way.cancel()
            elif one.context.database.is_postgresql:
                cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query <> ''"
                await asyncio.to_thread(
                    request.getfixturevalue("postgres").execute,
                    f"{cut} AND pid <> pg_backend_pid() AND datname = '{database_url[-6:]}'",
                )
            (outcome,) = await asyncio.gather(two.put(0, 10_000), return_exceptions=True)
            acknowledged = outcome is None
            assert acknowledged or outcome.code is ErrorCode.UNAVAILABLE
            await landed.wait()
            await asyncio.gather(under_way, return_exceptions=True)
            assert await two.has(0) == acknowledged

    run(test)


def test_a_failed_upload_that_took_a_mark_off_leaves_no_blob(opened):
    async def test():
        async with opened(soft_limit_bytes=1) as store:
            await store.put(0, 10_000)
            await store.context.evictor.run()

            async def broken():
                yield b"only the beginning"
                raise ConnectionResetError

            digest = Digest.of(store.blob(0, 10_000))
            upload = Upload(
                key=store.key(7),
                digest=digest,
                metadata_header="",
                compile_seconds=1,
                toolchain="",
                only_if_absent=False,
                actor=ACTOR,
                policy=NamespacePolicy(),
            )
            with pytest.raises(ConnectionResetError):
                await store.context.uploads.publish(upload, broken())
            await store.context.keeper.collect_marked()
            assert store.blobs.blobs == {}

    run(test)


def test_large_lookups_in_any_order_do_not_wait_for_each_other(opened):
    async def test():
        async with opened() as store:
            for number in range(20):
                await store.put(number, 10)
            keys = [store.key(number) for number in range(2000)]
            team = Namespace("team")
            for _ in range(3):
                found = await asyncio.gather(
                    store.context.artifacts.lookup(team, keys),
                    store.context.artifacts.lookup(team, keys[::-1]),
                )
                assert [len(each) for each in found] == [20, 20]
                store.clock.now += timedelta(hours=1)

    run(test)


def test_a_read_that_breaks_off_condemns_no_artifact(opened):
    async def test():
        async with opened() as store:
            await store.put(0, 10_000)
            open_whole = store.blobs.open

            async def cut(digest):
                reader = await open_whole(digest)

                async def chunks(start, stop):
                    yield b"some"
                    raise ShortBlobError("the connection broke")

                reader.chunks = chunks
                return reader

            store.blobs.open = cut
            with pytest.raises(ServerError) as refused:
                await store.context.artifacts.verify(store.key(0))
            assert refused.value.code is ErrorCode.UNAVAILABLE
            store.blobs.open = open_whole
            assert await store.has(0)

    run(test)


def test_a_database_beside_an_empty_store_is_not_served(opened):
    async def test():
        async with opened() as store:
            await store.context.tidy.refuse_an_empty_store()
            await store.put(0)
            await store.context.tidy.refuse_an_empty_store()
            store.blobs.blobs.clear()
            with pytest.raises(StartError, match="mount the right directory"):
                await store.context.tidy.refuse_an_empty_store()

    run(test)


def test_a_claim_that_ended_before_its_turn_came_is_not_used(opened):
    """A page is claimed at once, and the store is slow: the last one's claim has ended by then."""

    async def test():
        async with opened(soft_limit_bytes=1) as one, opened() as two:
            await one.put(0, 10_000)
            await one.put(1, 10_000)
            await one.context.evictor.run()
            order = sorted(range(2), key=lambda number: Digest.of(one.blob(number, 10_000)).sha256)
            delete = one.blobs.delete
            first, go_on = asyncio.Event(), asyncio.Event()

            async def slow(digest):
                if not first.is_set():
                    first.set()
                    await go_on.wait()
                await delete(digest)

            one.blobs.delete = slow
            under_way = asyncio.create_task(one.context.keeper.collect_marked())
            await first.wait()
            one.clock.now += timedelta(minutes=10)
            await two.put(order[1], 10_000)
            go_on.set()
            await under_way
            assert await two.has(order[1])

    run(test)
