"""The size budget: which artifacts are evicted, and that eviction loses no others."""

import asyncio
import math
import re
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from graphstash_schema import (
    ArtifactKind,
    Digest,
    ErrorCode,
    ManifestName,
    Namespace,
    NamespacePolicy,
)
from graphstash_server.actor import Actor
from graphstash_server.db.queries.artifacts import pin_artifacts, unpin_artifacts
from graphstash_server.db.queries.identifiers import claim_recount, last_recount
from graphstash_server.db.queries.usage import recount_usage
from graphstash_server.db.tables import artifacts, usage
from graphstash_server.errors import NoSpaceError, ServerError, ShortBlobError
from graphstash_server.eviction_order import HALF_LIFE
from graphstash_server.services.artifacts import blobs, service
from graphstash_server.services.artifacts.eviction import Planned
from graphstash_server.services.maintenance import schedule
from graphstash_server.services.maintenance.garbage import GarbageOptions, collect_garbage
from graphstash_server.storage.base import CHUNK_BYTES
from graphstash_server.testing import MemoryBlobStore
from graphstash_server.testing.stores import as_chunks
from support.services import ACTOR, ServiceClient, key_of, upload_of
from support.statements import recorded

pytestmark = pytest.mark.anyio

TEAM = Namespace("team")
START = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = 3600
DAY = 24 * HOUR


class Store(ServiceClient):
    """A client of one server that stores artifacts of chosen sizes."""

    def __init__(self, context, opened):
        super().__init__(context)
        self.blobs = opened.blobs
        self.clock = opened.clock

    @staticmethod
    def blob(number, size, namespace="team"):
        return f"{namespace} {number} ".encode().ljust(size, b".")[:size]

    async def add(self, number, size=10_000, *, namespace="team", **terms):
        terms |= {"policy": NamespacePolicy(), "namespace": namespace}
        await self.put(self.blob(number, size, namespace), number, **terms)

    async def fill(self, count):
        """Store artifacts of 10,000 bytes, in order of increasing value."""
        for number in range(count):
            await self.add(number, seconds=1 + number)

    async def look_up(self, *numbers, caller=""):
        keys = [key_of(number) for number in numbers]
        found = await self.context.artifacts.lookup(TEAM, keys, caller=caller)
        return len(found.artifacts)

    async def evict(self, *, is_confirmed=False):
        return await self.context.evictor.run(actor=Actor.server(), is_confirmed=is_confirmed)

    async def evictions(self):
        """Return artifact, reason and actor of each eviction in the audit log, oldest first."""
        entries = (await self.context.audit.read(limit=1000)).entries
        return [
            (entry.subject, entry.detail.rpartition(" ")[0], entry.actor)
            for entry in reversed(entries)
            if entry.action == "evict"
        ]

    async def collect(self):
        return await self.context.collector.collect_marked()

    async def has(self, number, namespace="team"):
        return await self.context.artifacts.find(key_of(number, namespace)) is not None

    async def kept(self, count, namespace="team"):
        return [number for number in range(count) if await self.has(number, namespace)]

    async def begin_deletion(self):
        """Start to delete marked blobs. Return the event that lets this end, and the task."""
        deleting, go_on = asyncio.Event(), asyncio.Event()
        delete = self.blobs.delete

        async def slow(digest, **name):
            deleting.set()
            await go_on.wait()
            await delete(digest, **name)

        self.blobs.delete = slow
        under_way = asyncio.create_task(self.collect())
        await deleting.wait()
        return go_on, under_way


def evicted(numbers, reason, *, by=ACTOR):
    return [(str(key_of(number).key), reason, by.name) for number in numbers]


@pytest.fixture
def opened(opened):
    """Open the services of a server. Two servers share everything except the state of a process."""

    @asynccontextmanager
    async def make(**limits):
        async with opened(**limits) as server:
            yield Store(server.context, opened)

    return make


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
async def test_artifacts_unused_for_retain_days_are_deleted(opened):
    async with opened(retain_days=30) as store:
        for number in range(4):
            await store.add(number)
        store.clock.turn(20 * DAY)
        await store.use(1)
        store.clock.turn(11 * DAY)
        assert await store.context.maintenance.retain() == 3
        assert await store.kept(4) == [1]
        assert len(store.blobs.blobs) == 1
        logged = sorted(await store.evictions())
        assert logged == sorted(evicted((0, 2, 3), "retention", by=Actor.server()))

        await collect_garbage(
            GarbageOptions(
                is_dry_run=False,
                is_confirmed=False,
                unused_for=timedelta(days=9),
                blobs_before=store.clock.now,
            ),
            actor=Actor.local(),
            maintenance=store.context.maintenance,
            found=lambda _: None,
        )
        assert (await store.evictions())[3:] == evicted([1], "unused", by=Actor.local())


@pytest.mark.sql
async def test_artifact_used_or_pinned_after_its_selection_stays(opened):
    async with opened() as store:
        await store.fill(4)
        store.clock.turn(20 * DAY)
        unused = store.context.retention.unused(timedelta(days=9))
        chosen = [each async for page in unused for each in page]
        assert len(chosen) == 4
        await store.use(1)
        await store.pin(2)
        assert await store.context.evictor.evict(chosen, actor=ACTOR, reason="unused") == 2
        assert await store.kept(4) == [1, 2]
        assert sorted(await store.evictions()) == sorted(evicted((0, 3), "unused"))


@pytest.mark.sql
async def test_pin_applies_to_no_other_kind_or_device_type_of_a_fingerprint(opened):
    until = START + timedelta(days=9)
    named = key_of(1)
    siblings = [named._replace(device_type="cuda-sm_90"), named._replace(kind=ArtifactKind.PJRT)]
    others = [("jax", "cuda-sm_90"), ("pjrt", "cpu")]
    columns = (artifacts.c.kind, artifacts.c.device_type, artifacts.c.pinned_until)

    async def pinned():
        async with store.context.database.reading() as connection:
            rows = await connection.execute(sa.select(*columns))
            return sorted((kind, device_type) for kind, device_type, at in rows if at == until)

    async with opened() as store:
        for key in (named, *siblings):
            await store.context.uploads.publish(upload_of(key, b"x"), as_chunks(b"x"))
        for change, found in (
            (partial(pin_artifacts, keys=[named], until=until), [("jax", "cpu")]),
            (
                partial(pin_artifacts, keys=siblings, until=until),
                [("jax", "cpu"), ("jax", "cuda-sm_90"), ("pjrt", "cpu")],
            ),
            (partial(unpin_artifacts, keys=[named]), others),
        ):
            async with store.context.database.writing() as connection:
                await change(connection)
            assert await pinned() == found


@pytest.mark.sql
async def test_latest_toolchains_are_retained(opened):
    async with opened(retain_toolchains=2) as store:
        for number, toolchain in enumerate(["torch 2.5", "torch 2.6", "torch 2.7", ""]):
            await store.add(number, toolchain=toolchain)
            store.clock.turn(1 * DAY)
        await store.use(0)  # a job uses 2.5 again
        assert await store.context.maintenance.retain() == 1
        assert await store.kept(4) == [0, 2, 3]


@pytest.mark.sql
async def test_only_one_server_runs_a_chore_per_interval(opened):
    done = []

    async def note():
        done.append(1)

    async with opened(retain_days=1) as one, opened(retain_days=1) as other:
        await one.add(0)
        one.clock.turn(2 * DAY)
        for server in (one, other):
            server.context.maintenance.retain = note
        await asyncio.gather(*(server.context.maintenance.run_once() for server in (one, other)))
        await one.context.maintenance.run_once()
        assert len(done) == 1
        one.clock.turn(2 * HOUR)
        await other.context.maintenance.run_once()
        assert len(done) == 2


@pytest.mark.sql
async def test_failed_chore_is_retried_by_the_server_that_claimed_it(opened, caplog):
    done = []

    async def failing():
        done.append("failed")
        raise ServerError(ErrorCode.UNAVAILABLE, "no answer")

    async def note():
        done.append("one")

    async def note_other():
        done.append("other")

    async with opened() as one, opened() as other:
        other.context.maintenance.retain = note_other
        one.context.maintenance.retain = failing
        await one.context.maintenance.run_once()
        one.context.maintenance.retain = note
        await one.context.maintenance.run_once()
        one.clock.turn(300)
        await other.context.maintenance.run_once()
        await one.context.maintenance.run_once()
        await one.context.maintenance.run_once()
        assert done == ["failed", "one"]
    assert "retention stopped and will be retried: unavailable: no answer" in caplog.text


async def test_blob_that_the_store_cannot_delete_stops_no_chore(opened, monkeypatch, caplog):
    async def failing(_digest, **_):
        raise ServerError(ErrorCode.UNAVAILABLE, "disk error")

    async with opened(retain_days=30, soft_limit_bytes=15_000) as store:
        monkeypatch.setattr(store.blobs, "delete", failing)
        await store.fill(2)
        await store.context.maintenance.run_once()
        store.clock.turn(31 * DAY)
        await store.context.maintenance.run_once()
        assert await store.kept(2) == []
    assert "deleting blobs stopped and will be retried: unavailable: disk error" in caplog.text


@pytest.mark.sql
async def test_two_servers_never_evict_for_the_same_excess(opened):
    async with opened(soft_limit_bytes=500_000) as one, opened(soft_limit_bytes=500_000) as two:
        await one.fill(100)
        evicted = await asyncio.gather(one.evict(), two.evict())
        assert sum(evicted) == 53  # to 95 % of the soft limit, once
        assert sum(await asyncio.gather(one.collect(), two.collect())) == 53


class Stopped(BaseException):
    """Stands for SIGKILL: no handler of failures may handle it."""


@pytest.mark.parametrize("is_deleted", [False, True], ids=["before the blob goes", "after it went"])
async def test_kill_during_deletion_blocks_no_upload_and_is_repaired(
    opened, monkeypatch, is_deleted
):
    async with opened(store_limit_bytes=50_000) as store:
        await store.fill(5)
        delete = store.blobs.delete

        async def dying(digest, **name):
            if is_deleted:
                await delete(digest, **name)
            raise Stopped

        monkeypatch.setattr(store.blobs, "delete", dying)
        with pytest.raises(Stopped):
            await store.add(5, seconds=9)
        monkeypatch.undo()
        await store.add(6, seconds=9)
        assert await store.kept(7) == [2, 3, 4, 6]
    store.clock.turn(10 * 60)  # its claim is over
    async with opened(store_limit_bytes=50_000) as other:
        await other.collect()
        assert len(other.blobs.blobs) == 4
        assert await other.kept(7) == [2, 3, 4, 6]


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


@pytest.mark.parametrize(
    ("limit", "where"),
    [
        ({"store_limit_bytes": 200}, "the store"),
        ({"store_limit_bytes": 10**9, "soft_limit_bytes": 200}, "the store"),
        ({"namespace_limits": {"te*": 200}}, "the namespace team"),
    ],
)
async def test_limit_far_below_the_stored_size_evicts_nothing_until_confirmed(
    opened, limit, where, caplog
):
    """A limit of 200 bytes instead of 200 GiB must not empty the store."""
    async with opened() as store:
        await store.fill(3)
    async with opened(**limit) as store:
        assert await store.evict() == 0
        assert [each async for each in store.context.evictor.plan()] == []
        assert await store.kept(3) == [0, 1, 2]
        assert f"{where} has more than twice its soft limit" in caplog.text
        with pytest.raises(NoSpaceError, match=f"{where} .*gc --evict-now"):
            await store.add(3)
        readiness = await store.context.health.check()
        assert readiness.is_ready
        assert (readiness.store_limit == "ok") == ("namespace_limits" in limit)
        plan = store.context.evictor.plan(is_confirmed=True)
        assert len([each async for each in plan]) == 3
        caplog.clear()
        assert await store.evict(is_confirmed=True) == 3
        assert "soft limit" not in caplog.text


@pytest.mark.parametrize("limits", [{"namespace_limit_bytes": 20_000}, {}])
async def test_namespace_limit_that_other_servers_exceed_needs_no_confirmation(opened, limits):
    """Each server admits uploads that fit beside its own."""
    async with opened() as other, opened(**limits) as store:
        other.context.policies.seconds = lambda: 0.0  # keeps its copy of the policies
        await other.add(0)
        if not limits:
            await store.context.policies.put(TEAM, NamespacePolicy(limit_bytes=20_000), ACTOR)
        assert await store.evict() == 0
        for number in range(1, 6):
            await other.add(number)
        assert await store.evict() == 5
        await store.add(6)


async def test_limit_needs_no_confirmation_once_it_was_met(opened):
    async with opened() as other:
        await other.fill(5)
        async with opened(namespace_limit_bytes=20_000) as store:
            assert await store.evict() == 0
            assert await store.evict(is_confirmed=True) == 4
            assert await store.evict() == 0
            await other.fill(5)
            assert await store.evict() == 4


async def test_policy_far_below_the_stored_size_evicts_nothing_until_confirmed(opened, caplog):
    async with opened() as store:
        await store.fill(3)
        limit = NamespacePolicy(limit_bytes=200)
        await store.context.policies.put(TEAM, limit, ACTOR)
        planned = Planned()
        planned.freed_bytes[TEAM] = 40_000
        assert [each async for each in store.context.evictor.plan(planned=planned)] == []
        assert await store.evict() == 0
        assert "namespace team has more than twice its soft limit" in caplog.text
        with pytest.raises(NoSpaceError, match=r"team --limit.*gc --evict-now"):
            await store.add(3)
        await store.context.policies.put(TEAM, NamespacePolicy(limit_bytes=90_000), ACTOR)
        await store.add(3)
        async with opened() as other:  # reads the policy at its start
            await store.context.policies.put(TEAM, limit, ACTOR)
            assert await other.evict() == 0
            assert await other.evict(is_confirmed=True) == 4
        await store.context.policies.put(TEAM, NamespacePolicy(limit_bytes=20_000), ACTOR)
        await store.add(4)
        assert await store.kept(5) == [4]


async def test_policy_needs_confirmation_on_a_server_that_missed_a_change(opened):
    async with opened() as store, opened() as other:
        limit = NamespacePolicy(limit_bytes=20_000)
        other.context.policies.seconds = lambda: math.inf  # reads the policies every time
        await store.add(0)
        await store.context.policies.put(TEAM, limit, ACTOR)
        assert await other.evict() == 0
        await store.context.policies.put(TEAM, NamespacePolicy(), ACTOR)
        await store.fill(5)
        store.clock.turn(1)
        await store.context.policies.put(TEAM, limit, ACTOR)
        assert await other.evict() == 0


async def test_limit_needs_confirmation_on_a_server_that_missed_a_higher_one(opened):
    limit = {"namespace_limit_bytes": 20_000}
    async with opened(**limit) as store, opened(**limit) as other:
        other.context.policies.seconds = lambda: math.inf  # reads the policies every time
        await store.add(0)
        assert await other.evict() == 0
        policies = store.context.policies
        await policies.put(TEAM, NamespacePolicy(limit_bytes=10**9), ACTOR)
        await store.fill(5)
        await policies.remove(TEAM, ACTOR)
        assert await other.evict() == 0
        assert await store.evict() == 0
        assert await other.evict(is_confirmed=True) == 4


@contextmanager
def maintenance_of(store, run_once, *, every_seconds=3600):
    """Run the maintenance of a server, whose rounds call `run_once`."""
    maintenance = store.context.maintenance
    maintenance.run_once = run_once
    task = asyncio.create_task(
        maintenance.run(every_seconds=every_seconds, started_at=START, was_alone=False)
    )
    yield task
    task.cancel()


async def let_others_run():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_failing_database_ends_a_round_but_not_the_maintenance(opened, caplog):
    rounds, went_on = [], asyncio.Event()

    async def failing():
        rounds.append(1)
        if len(rounds) == 2:
            went_on.set()
        raise ServerError(ErrorCode.UNAVAILABLE, "no database")

    async with opened() as store:
        with maintenance_of(store, failing, every_seconds=0.001):
            await went_on.wait()
    assert "no database" in caplog.text


async def test_wanted_eviction_in_corrupt_database_does_not_block_the_event_loop(opened):
    async with opened() as store:
        maintenance = store.context.maintenance
        observe, rounds, has_begun = maintenance.clock.observe, [], asyncio.Event()

        async def observed():
            has_begun.set()
            rounds.append(1)
            if len(rounds) > 3:
                raise asyncio.CancelledError  # instead of a loop that no other task can end
            return await observe()

        maintenance.clock.observe = observed
        store.context.database.note_corruption("by this test")
        store.context.evictor.is_needed.set()
        with maintenance_of(store, maintenance.run_once) as task:
            await has_begun.wait()
            assert not task.done()


async def test_wanted_eviction_waits_for_the_pause_after_a_failed_round(opened, monkeypatch):
    monkeypatch.setattr(schedule, "_FAILED_SECONDS", 3600)
    rounds, has_failed = [], asyncio.Event()

    async def failing():
        rounds.append(1)
        store.context.evictor.is_needed.set()
        has_failed.set()
        raise ServerError(ErrorCode.UNAVAILABLE, "no database")

    async with opened() as store:
        with maintenance_of(store, failing):
            await has_failed.wait()
            await let_others_run()
            assert len(rounds) == 1


async def test_wanted_eviction_takes_one_round_of_maintenance(opened):
    rounds, have_ended = [], asyncio.Event()

    async def run_once():
        rounds.append(1)
        if len(rounds) == 1:
            store.context.evictor.is_needed.set()
        elif len(rounds) == 2:
            have_ended.set()
        await asyncio.sleep(0)

    async with opened() as store:
        with maintenance_of(store, run_once):
            await have_ended.wait()
            await let_others_run()
            assert len(rounds) == 2


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
async def test_large_lookups_in_any_order_do_not_wait_for_each_other(opened):
    async with opened() as store:
        for number in range(20):
            await store.add(number, 10)
        numbers = range(2000)
        for _ in range(3):
            found = await asyncio.gather(store.look_up(*numbers), store.look_up(*numbers[::-1]))
            assert found == [20, 20]
            store.clock.turn(HOUR)


async def test_interrupted_read_drops_no_artifact(opened):
    async with opened() as store:
        await store.add(0)
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
            await store.context.artifacts.verify(key_of(0))
        assert refused.value.code is ErrorCode.UNAVAILABLE
        store.blobs.open = open_whole
        assert await store.has(0)


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


async def test_recount_beside_another_corrects_once_and_reads_no_artifact_while_it_writes(opened):
    """Counting a large namespace inside the transaction would block all writers of SQLite."""
    async with opened() as one, opened() as two:
        await one.add(0, 10)
        async with one.context.database.writing() as connection:
            await connection.execute(sa.update(usage).values(size_bytes=77, artifacts=3))
        async with two.context.database.reading() as connection:
            mark = await last_recount(connection)
            assert list(await recount_usage(connection)) == [TEAM]
        await one.add(1, 20)
        with recorded("FROM artifacts") as statements:
            assert await one.context.reconciler.recount(is_repair=True) == [TEAM]
        assert len(statements) == 1
        async with two.context.database.writing() as connection:
            assert await claim_recount(connection, mark) is None
        used = await one.used()
        assert (used.artifacts, used.size_bytes) == (2, 30)
        async with one.context.database.writing() as connection:
            await connection.execute(sa.update(usage).values(size_bytes=1, metadata_bytes=0))
        await two.context.reconciler.reconcile(blobs_before=one.clock.now)
        used = await one.used()
        assert (used.size_bytes, used.metadata_bytes) == (30, 2 * 4096 - 30)
