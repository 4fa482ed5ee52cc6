"""A region applies the withdrawals of its upstream although other calls, namespaces or stores fail.

The region runs in the process of the test. The test starts each round in which the region follows
its upstream.
"""

import asyncio
import json
import shutil
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from graphstash_schema import (
    ArtifactKey,
    Digest,
    ErrorCode,
    Grant,
    Namespace,
    NamespacePolicy,
)
from graphstash_schema.names import LIST_START, ListPosition
from graphstash_schema.region import Publisher
from graphstash_schema.withdrawals import WithdrawalQuery
from graphstash_server.db.queries.upstream import find_earlier, put_position, use_namespace
from graphstash_server.errors import DigestMismatchError, ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.testing import as_chunks, migrated_database
from graphstash_server.upstream import following
from support.api import DEVICE
from support.changes import execute
from support.http_server import Answer
from support.regions import envelope
from support.services import DAY, opener, upload_of
from support.waiting import until

pytestmark = pytest.mark.anyio

BUSY = Answer(429, {"retry-after": "1"})


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Region:
    """A region in this process.

    Attributes:
        context: its services.
        clock: its clock, which the test advances.
    """

    def __init__(self, world, context, opened):
        self._world, self.clock = world, opened.clock
        self.context, self.region = context, context.region

    async def copy(self, *numbers, namespace="team"):
        """Publish artifacts at the upstream, and copy them. Return a client of the upstream."""
        center = self._world.api(self._world.center, namespace=namespace)
        for number in numbers:
            assert center.put(envelope(center, number), number).status_code == 201
            key = key_in(center, number)
            assert await self.region.fetches.fetch(key, NamespacePolicy(), patience_seconds=60)
        return center

    async def publish(self, center, number, blob, chunks=None):
        """Accept an upload of a job, and queue it for the upstream."""
        upload = replace(
            upload_of(key_in(center, number), blob, policy=NamespacePolicy()),
            publisher=Publisher(grants=(Grant.parse("write:team"),)),
        )
        await self.region.publishes.admit(upload)
        await self.context.uploads.publish(upload, chunks or as_chunks(blob))

    async def follow(self):
        """Probe the upstream, and apply its changes."""
        self.clock.turn(10)
        await self.region.follower._round()

    async def catch_up(self):
        """Follow the upstream until all of its withdrawals are applied."""
        await self.follow()
        while (await self.region.gauges())[2]:
            await self.follow()

    async def kept(self, center, *numbers):
        """Return the artifacts of a namespace that the region serves."""
        found = self.context.artifacts.find
        return [each for each in numbers if await found(key_in(center, each)) is not None]


def key_in(center, number):
    key = ArtifactKey.parse("jax", DEVICE, center.fingerprint(number))
    return StoredKey.of(center.namespace, key)


async def make_withdrawals(region, center, *numbers):
    """Withdraw artifacts and another one, which the region applies in one page."""
    assert center.put(envelope(center, 99), 99).status_code == 201
    for number in (*numbers, 99):
        assert center.delete(number).status_code == 204
    await region.catch_up()


async def make_gap(world, center):
    """Withdraw artifacts that no region has, and forget the entries, as if they were too old."""
    for number in (97, 98, 99):
        assert center.put(envelope(center, number), number).status_code == 201
        assert center.delete(number).status_code == 204
    await asyncio.to_thread(
        execute,
        world.center.database_url,
        "DELETE FROM withdrawals WHERE number < (SELECT max(number) FROM withdrawals)",
    )


@pytest.fixture
def small_steps(monkeypatch):
    """Compare one artifact in each round."""
    monkeypatch.setattr(following, "_PAGE", 1)
    monkeypatch.setattr(following, "_PAGES_AT_ONCE", 1)


@pytest.fixture
def opened_region(world, tmp_path):
    directory = tmp_path / "here"
    directory.mkdir()
    shutil.copy(migrated_database(), directory)
    opened = opener(directory, f"sqlite+aiosqlite:///{directory / 'graphstash.sqlite3'}")

    @asynccontextmanager
    async def make(change=None, **settings):
        async with opened(
            auth="tokens",
            upstream_url=world.link(change).url,
            upstream_token=world.admin,
            upstream_answer_seconds=30,
            **settings,
        ) as server:
            await server.context.region.follower.begin()
            try:
                yield Region(world, server.context, opened)
            finally:
                await server.context.region.close()

    make.blobs = opened.blobs
    return make


async def test_namespace_whose_withdrawals_fail_delays_no_other_one(opened_region):
    is_busy = True

    def change(request, answer):
        return BUSY if is_busy and "/aaa/withdrawals" in request.path else answer

    async with opened_region(change) as region:
        busy, other = [await region.copy(1, namespace=each) for each in ("aaa", "zeta")]
        for center in (busy, other):
            assert center.delete(1).status_code == 204
        await region.follow()
        assert await region.kept(other, 1) == []
        assert await region.kept(busy, 1) == [1]
        assert (await region.region.gauges())[2] == 1
        text = (await region.context.exposition.read()).decode()
        assert 'graphstash_upstream_total{event="follow_failed"} 1.0' in text
        assert "graphstash_upstream_behind 1.0" in text
        is_busy = False
        await region.follow()
        assert await region.kept(busy, 1) == []
        assert (await region.region.gauges())[2] == 0


async def test_policy_of_a_later_release_delays_no_withdrawal(opened_region):
    def change(request, answer):
        if not request.path.endswith("/-/upstream"):
            return answer
        state = json.loads(answer.body)
        state["namespaces"].setdefault("later", {})["policy"] = {"mode": "of a later release"}
        return replace(answer, body=json.dumps(state).encode())

    async with opened_region(change) as region:
        center = await region.copy(1)
        assert center.delete(1).status_code == 204
        await region.follow()
        assert await region.kept(center, 1) == []


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("is_interrupted", [False, True], ids=["in rounds", "after an error"])
async def test_withdrawal_during_a_comparison_is_applied(
    opened_region, world, monkeypatch, is_interrupted
):
    """The comparison has passed the artifact that the upstream withdraws."""
    looked_up = None

    def change(request, answer):
        if "artifacts:lookup" not in request.path or looked_up is None:
            return answer
        looked_up.append(request)
        return BUSY if is_interrupted and len(looked_up) == 2 else answer

    async with opened_region(change) as region:
        center = await region.copy(1, 2, 3)
        first, *others = sorted((1, 2, 3), key=center.fingerprint)
        await make_gap(world, center)
        looked_up = []
        if is_interrupted:
            monkeypatch.setattr(following, "_PAGES_AT_ONCE", 20)
        await region.follow()
        assert len(looked_up) == 1 + is_interrupted
        assert center.delete(first).status_code == 204
        await region.catch_up()
        assert await region.kept(center, first, *others) == others


@pytest.mark.parametrize("is_first", [False, True], ids=["after jobs", "before jobs"])
async def test_rate_of_a_namespace_counts_comparisons_apart_from_jobs(
    opened_region, world, is_first
):
    """The rate is one request in a thousand seconds."""
    async with opened_region() as region:
        center = await region.copy(1, 2)
        assert center.delete(1).status_code == 204
        await make_gap(world, center)
        rules = {"requests_per_second": 0.001}
        assert center.http.put("/v1/-/namespaces/team", json=rules).is_success
        if not is_first:
            until(lambda: center.get(2).status_code == 429)
        await region.follow()
        assert (await region.region.gauges())[2] == 0
        assert await region.kept(center, 1, 2) == [2]
        if is_first:
            assert center.get(2).status_code == 200
            until(lambda: center.get(2).status_code == 429)


async def test_copy_that_the_upstream_may_have_withdrawn_is_set_aside(opened_region, world):
    """The upstream has lost three artifacts, which its list does not name."""
    async with opened_region() as region:
        center = await region.copy(1, 2, 3, 4)
        await make_gap(world, center)
        blobs = {each: center.get(each).content for each in (1, 2, 3)}
        for number in blobs:
            lose = f"DELETE FROM artifacts WHERE fingerprint = '{center.fingerprint(number)}'"
            await asyncio.to_thread(execute, world.center.database_url, lose)
        await region.catch_up()
        assert await region.kept(center, 1, 2, 3, 4) == [4]
        withheld = await region.context.quarantine.list_withheld()
        assert {each.reason for each in withheld.artifacts} == {"unconfirmed"}
        assert len(withheld.artifacts) == 3
        stored = region.context.artifacts.find_row
        for number in blobs:  # neither served nor deleted
            found = await region.context.artifacts.lookup(
                center.namespace, [key_in(center, number)], caller="x"
            )
            await region.region.fetches.look_up(center.namespace, [key_in(center, number)], found)
            assert (found.artifacts, found.withheld) == ({}, {})
            fetch = region.region.fetches.fetch(
                key_in(center, number), NamespacePolicy(), patience_seconds=60
            )
            assert not await fetch
            assert await stored(key_in(center, number)) is not None
        # A newer backup has the first, and another artifact for the key of the second.
        other = envelope(center, 2, b"other")
        for blob, number in ((blobs[1], 1), (other, 2)):
            assert center.put(blob, number).status_code == 201
            assert await region.region.fetches.fetch(
                key_in(center, number), NamespacePolicy(), patience_seconds=60
            )
        assert await region.kept(center, 1, 2, 3, 4) == [1, 2, 4]
        assert (await stored(key_in(center, 2))).digest == Digest.of(other)
        # Its list names the third.
        assert center.put(blobs[3], 3).status_code == 201
        assert center.delete(3).status_code == 204
        await region.catch_up()
        assert await stored(key_in(center, 3)) is None


@pytest.mark.parametrize("behind", [0, 8 * DAY], ids=["", "clock behind"])
async def test_copy_that_is_set_aside_is_evicted_if_the_upstream_still_lacks_it_after_a_week(
    opened_region, world, behind
):
    """The clock may be wrong while the region sets copies aside."""
    async with opened_region() as region:
        await region.context.plausible_clock.observe()
        center = await region.copy(1, 2, 3)
        blob = envelope(center, 9)
        await region.publish(center, 9, blob)
        await make_gap(world, center)
        lose = "DELETE FROM artifacts WHERE fingerprint "
        kept = f"<> '{center.fingerprint(3)}'"
        await asyncio.to_thread(execute, world.center.database_url, lose + kept)
        region.clock.jump(-behind)
        await region.catch_up()
        stored = region.context.artifacts.find_row
        await region.region.set_aside.add(await stored(key_in(center, 9)))  # still queued
        region.clock.jump(behind)
        before = (await region.context.withdrawals.read(center.namespace, WithdrawalQuery())).newest
        assert center.put(envelope(center, 1), 1).status_code == 201
        for days, held in ((6, 3), (2, 3), (1, 1)):
            if days == 2:
                region.region.client.mark_down("in this test")
            region.clock.turn(days * DAY)
            await region.context.maintenance.run_once()
            region.region.client.mark_up()
            assert len((await region.context.quarantine.list_withheld()).artifacts) == held
        await region.context.collector.collect_marked()
        assert await region.kept(center, 1, 2, 3) == [1, 3]
        assert await stored(key_in(center, 2)) is None
        assert (await stored(key_in(center, 9))).digest == Digest.of(blob)
        assert len(opened_region.blobs.blobs) == 3
        entries = (await region.context.audit.read(limit=9)).entries
        (evicted,) = [each for each in entries if each.action == "evict"]
        assert evicted.subject == str(key_in(center, 2).key)
        page = await region.context.withdrawals.read(center.namespace, WithdrawalQuery())
        assert page.newest == before


@pytest.mark.parametrize("is_restored", [False, True], ids=["in the daily round", "restored"])
async def test_copy_of_which_the_upstream_has_other_bytes_by_now_is_replaced(
    opened_region, world, is_restored
):
    """The upstream lost two artifacts, which it does not list, and a job published one again."""
    async with opened_region() as region:
        center = await region.copy(1, 2, 3)
        await region.publish(center, 4, envelope(center, 4))
        await make_withdrawals(region, center)
        statements = [
            f"DELETE FROM artifacts WHERE fingerprint = '{center.fingerprint(each)}'"
            for each in (1, 2)
        ]
        if is_restored:
            statements.append(f"UPDATE withdrawals SET mark = '{'0' * 16}'")
            statements.append(f"UPDATE withdrawal_heads SET mark = '{'0' * 16}'")
        for statement in statements:
            await asyncio.to_thread(execute, world.center.database_url, statement)
        others = {each: envelope(center, each, b"other") for each in (1, 4)}
        for number, blob in others.items():
            assert center.put(blob, number).status_code == 201
        if not is_restored:
            await region.context.maintenance.run_once()
        await region.catch_up()
        assert await region.kept(center, 1, 2, 3, 4) == [2, 3, 4]
        page = await region.context.withdrawals.read(center.namespace, WithdrawalQuery())
        assert page.withdrawals[-1].cause == "replaced"
        key = key_in(center, 1)
        assert await region.region.fetches.fetch(key, NamespacePolicy(), patience_seconds=60)
        assert (await region.context.artifacts.find_row(key)).digest == Digest.of(others[1])


@pytest.mark.usefixtures("small_steps")
async def test_namespace_that_the_upstream_does_not_compare_delays_no_other_one(
    opened_region, world
):
    """Its rate is exceeded. The region has set one copy aside, and another one differs by now."""
    is_busy = False
    looked_up = []

    def change(request, answer):
        if "artifacts:lookup" not in request.path:
            return answer
        looked_up.append(request.path)
        return BUSY if is_busy and "/aaa/" in request.path else answer

    async with opened_region(change) as region:
        await region.context.plausible_clock.observe()
        busy, other = [await region.copy(1, 2, 3, namespace=each) for each in ("aaa", "zeta")]
        for center in (busy, other):
            await make_gap(world, center)
        lose = "DELETE FROM artifacts WHERE fingerprint = "
        await asyncio.to_thread(
            execute, world.center.database_url, f"{lose}'{busy.fingerprint(2)}'"
        )
        await region.catch_up()
        await asyncio.to_thread(
            execute, world.center.database_url, f"{lose}'{busy.fingerprint(1)}'"
        )
        for center in (busy, other):
            assert center.put(envelope(center, 1, b"other"), 1).status_code == 201
        is_busy = True
        for center in (other, busy):
            region.clock.turn(8 * DAY)
            await region.context.maintenance.run_once()
            for _ in range(9):
                looked_up.clear()
                await region.follow()
                assert len(looked_up) <= following._PAGES_AT_ONCE
            assert await region.kept(center, 1, 2, 3) == [3]
            held = await region.context.quarantine.list_withheld()
            assert len(held.artifacts) == (center is other)
            is_busy = False


async def test_failed_upload_or_download_keeps_the_copy_that_is_set_aside(opened_region, world):
    is_cut = False

    def change(request, answer):
        if is_cut and request.method == "GET" and "/artifacts/" in request.path:
            return replace(answer, body=answer.body[:-1] + b"?")
        return answer

    async def broken():
        yield b"only the beginning"
        raise ConnectionResetError

    async with opened_region(change) as region:
        center = await region.copy(1, 2, 3)
        await make_gap(world, center)
        for number in (1, 2):
            lose = f"DELETE FROM artifacts WHERE fingerprint = '{center.fingerprint(number)}'"
            await asyncio.to_thread(execute, world.center.database_url, lose)
        await region.catch_up()
        other, first = envelope(center, 1, b"other"), envelope(center, 1)

        async def kept(number):
            return await region.context.artifacts.find_row(key_in(center, number))

        for chunks, error in (
            (broken(), ConnectionResetError),
            (as_chunks(b"?" * len(other)), DigestMismatchError),
        ):
            with pytest.raises(error):
                await region.publish(center, 1, other, chunks)
        assert center.put(other, 1).status_code == 201
        is_cut = True
        fetch = region.region.fetches.fetch(
            key_in(center, 1), NamespacePolicy(), patience_seconds=60
        )
        assert not await fetch
        assert (await kept(1)).digest == Digest.of(first)
        withheld = await region.context.quarantine.list_withheld()
        assert len(withheld.artifacts) == 2
        # Jobs replace one copy, and confirm the other one.
        for number, blob in ((1, other), (2, envelope(center, 2))):
            await region.publish(center, number, blob)
            assert (await kept(number)).digest == Digest.of(blob)
        assert await region.kept(center, 1, 2, 3) == [1, 2, 3]
        assert (await region.context.quarantine.list_withheld()).artifacts == ()
        assert await region.region.publishes.count() == 2
        assert len(opened_region.blobs.blobs) == 3


async def test_withdrawal_that_a_restored_upstream_repeats_destroys_no_later_artifact(
    opened_region, world, monkeypatch
):
    """The backup has the withdrawals of two artifacts, and the second one again."""
    async with opened_region() as region:
        center = await region.copy(1, 2, 3)
        await make_withdrawals(region, center, 1, 2)
        await region.copy(1, 2)
        ask = region.region.client.ask

        def ask_for_one(path):
            return ask(f"{path}&limit=1" if "/withdrawals" in path else path)

        monkeypatch.setattr(region.region.client, "ask", ask_for_one)
        last = "SELECT mark FROM withdrawals ORDER BY number DESC LIMIT 1"
        for restore in (
            "DELETE FROM withdrawals WHERE number > 2",
            f"UPDATE withdrawal_heads SET number = 2, mark = ({last})",
            f"DELETE FROM artifacts WHERE fingerprint = '{center.fingerprint(1)}'",
        ):
            await asyncio.to_thread(execute, world.center.database_url, restore)
        query = WithdrawalQuery()
        before = (await region.context.withdrawals.read(center.namespace, query)).newest
        await region.catch_up()
        assert await region.kept(center, 1, 2, 3) == [2, 3]
        withheld = await region.context.quarantine.list_withheld()
        assert [each.key for each in withheld.artifacts] == [key_in(center, 1).key]
        after = await region.context.withdrawals.read(
            center.namespace, WithdrawalQuery(after=before)
        )
        assert not after.is_complete  # hosts set their copies aside
        await region.copy(1)
        assert await region.kept(center, 1, 2, 3) == [1, 2, 3]
        assert [center.delete(each).status_code for each in (1, 2)] == [204, 204]
        await region.catch_up()
        assert await region.kept(center, 1, 2, 3) == [3]


@pytest.mark.usefixtures("small_steps")
async def test_comparison_that_another_process_finished_is_not_resumed(opened_region, world):
    async with opened_region() as one, opened_region() as other:
        center = await one.copy(1, 2, 3)
        first, *others = sorted((1, 2, 3), key=center.fingerprint)
        await make_gap(world, center)
        await one.follow()  # compares the first artifact
        await other.catch_up()
        assert center.delete(first).status_code == 204
        await make_gap(world, center)
        await one.catch_up()
        assert await one.kept(center, first, *others) == others


@pytest.mark.usefixtures("small_steps")
async def test_host_that_copied_an_artifact_during_the_comparison_sets_it_aside(
    opened_region, world
):
    """A host reads the list and copies an artifact before the region sets the artifact aside."""
    async with opened_region() as region:
        center = await region.copy(1, 2)
        first, last = sorted((1, 2), key=center.fingerprint)
        await make_gap(world, center)
        lose = f"DELETE FROM artifacts WHERE fingerprint = '{center.fingerprint(last)}'"
        await asyncio.to_thread(execute, world.center.database_url, lose)
        await region.follow()
        assert await region.kept(center, first, last) == [first, last]
        read = region.context.withdrawals.read
        position = (await read(center.namespace, WithdrawalQuery())).newest
        await region.catch_up()
        assert await region.kept(center, first, last) == [first]
        assert not (await read(center.namespace, WithdrawalQuery(after=position))).is_complete


async def test_download_that_began_before_a_gap_stores_nothing(opened_region, world):
    is_sent, go_on = threading.Event(), threading.Event()

    def change(request, answer):
        if request.method == "GET" and f"/artifacts/jax/{DEVICE}/" in request.path and is_slow:
            is_sent.set()
            go_on.wait(60)
        return answer

    is_slow = False
    async with opened_region(change) as region:
        center = await region.copy(1)
        is_slow = True
        copying = asyncio.create_task(region.copy(2))
        await asyncio.to_thread(is_sent.wait, 60)
        assert center.delete(2).status_code == 204
        await make_gap(world, center)
        await region.catch_up()
        go_on.set()
        with pytest.raises(AssertionError):
            await copying
        assert await region.kept(center, 1, 2) == [1]


async def test_own_list_of_a_region_has_a_gap_where_the_list_of_the_upstream_has_one(
    opened_region, world
):
    """Hosts may have copies that the region has evicted."""
    async with opened_region() as region:
        center = await region.copy(1, 2)

        async def read(after):
            query = WithdrawalQuery(after=after)
            return await region.context.withdrawals.read(center.namespace, query)

        before = (await read(LIST_START)).newest
        await make_gap(world, center)
        await region.catch_up()
        page = await read(before)
        assert (page.is_complete, page.withdrawals) == (False, ())
        assert center.delete(1).status_code == 204
        await region.catch_up()
        assert not (await read(before)).is_complete
        page = await read(page.newest)
        assert page.is_complete
        assert {each.key for each in page.withdrawals} == {str(key_in(center, 1).key)}


async def test_store_that_deletes_nothing_delays_no_withdrawal(opened_region, monkeypatch):
    async def refuse(digest, **_name):
        raise ServerError(ErrorCode.UNAVAILABLE, f"cannot delete {digest}")

    monkeypatch.setattr(opened_region.blobs, "delete", refuse)
    async with opened_region() as region:
        some, other = [await region.copy(1, 2, 3, namespace=each) for each in ("team", "zeta")]
        assert [some.delete(each).status_code for each in (1, 2)] == [204, 204]
        assert other.delete(1).status_code == 204
        await region.follow()
        assert await region.kept(some, 1, 2, 3) == [3]
        assert await region.kept(other, 1, 2, 3) == [2, 3]
        heads = [
            (await region.context.withdrawals.read(each.namespace, WithdrawalQuery())).newest.number
            for each in (some, other)
        ]
        assert heads == [2, 1]  # one entry for each


@pytest.mark.parametrize("is_asked_first", [False, True], ids=["before", "after"])
async def test_artifact_that_is_withdrawn_during_its_publish_is_not_sent(
    opened_region, is_asked_first
):
    """The upstream withdraws the artifact before or after the region's last question."""
    is_asked, goes_on = threading.Event(), threading.Event()

    def change(request, answer):
        if is_held and request.path.endswith("artifacts:lookup"):
            is_asked.set()
            goes_on.wait(60)
        return answer

    is_held = False
    async with opened_region(change) as region:
        center = await region.copy(2)
        blob, publishes = envelope(center, 1), region.region.publishes
        await region.publish(center, 1, blob)

        def withdraw():
            assert center.put(blob, 1).status_code == 201
            assert center.delete(1).status_code == 204

        if not is_asked_first:
            withdraw()
        is_held = True
        (queued,) = await publishes._claim(1)
        sending = asyncio.create_task(publishes._send(queued))
        await asyncio.to_thread(is_asked.wait, 60)
        if is_asked_first:
            withdraw()
        else:
            await region.follow()
        goes_on.set()
        assert await sending == "early"
        assert center.get(1).status_code == 404
        await region.follow()
        assert await publishes._send(queued) == "gone"
        await region.publish(center, 1, blob)  # a job compiles it again
        (queued,) = await publishes._claim(1)
        assert await publishes._send(queued) == "sent"
        assert center.get(1).content == blob


async def test_publish_ends_if_a_copy_replaces_its_artifact_whose_blob_is_absent(opened_region):
    async with opened_region() as region:
        center = await region.copy(2)
        await region.publish(center, 1, envelope(center, 1, b"lost"))
        opened_region.blobs.blobs.clear()
        await region.copy(1)
        assert await region.kept(center, 1) == [1]
        (queued,) = await region.region.publishes._claim(1)
        assert await region.region.publishes._send(queued) == "gone"
        assert await region.region.publishes.count() == 0
        row = await region.context.artifacts.find_row(key_in(center, 1))
        assert (row.digest, row.pinned_until) == (Digest.of(envelope(center, 1)), None)


async def test_lease_of_a_queued_artifact_that_cannot_be_sent_ends(opened_region):
    """Its blob is absent. Jobs of other regions wait for the lease."""
    async with opened_region() as region:
        center = await region.copy(2)
        key, leases, publishes = key_in(center, 1), region.region.leases, region.region.publishes
        await region.publish(center, 1, envelope(center, 1))
        opened_region.blobs.blobs.clear()
        leases._of_queued[key] = center.acquire(1).json()["token"]
        states = []
        while leases._of_queued:
            for queued in await publishes._claim(1):
                await publishes._try(queued)
            await leases._renew_queued(key, leases._of_queued[key])
            states.append(center.acquire(1).status_code)
            region.clock.turn(600)
            assert len(states) < 10
        assert states == [202] * (len(states) - 1) + [201]
        assert len(states) > 2
        assert await publishes.count() == 1


async def test_region_remembers_positions_dense_near_the_last_one(opened_region):
    async with opened_region() as region:
        namespace, last, after = Namespace("team"), 300, LIST_START
        async with region.context.database.writing() as connection:
            await use_namespace(connection, namespace)
            for number in range(1, last + 1):
                position = ListPosition(f"{number}-{number:016x}")
                assert await put_position(connection, namespace, position, after=after)
                assert not await put_position(connection, namespace, position, after=after)
                after = position
            found = [each.number for each in await find_earlier(connection, namespace)]
        assert len(found) < 30
        for number in range(1, last):
            nearest = max(each for each in found if each <= number)
            assert last - nearest <= max(1.5 * (last - number), 2)


async def test_failed_questions_do_not_age_a_token_that_the_upstream_confirms(opened_region, world):
    is_busy = False

    def change(request, answer):
        return BUSY if is_busy and request.path.endswith("/-/access") else answer

    async with opened_region(change, upstream_offline_seconds=1000) as region:
        access, clock = region.region.access, region.clock
        access.seconds = clock.steady
        token = world.center.token("read:team")
        for number in range(60):  # each half a minute; every ninth question fails
            is_busy = number % 9 == 8
            assert await access.find(token) is not None
            clock.turn(30)
        is_busy = True
        assert await access.find(token) is not None


async def test_artifact_that_is_withdrawn_right_after_the_first_look_up_is_not_kept(
    opened_region, world
):
    """The region learns of a withdrawal of its first artifact before it begins to follow the
    namespace. Another process of the upstream still has the row in memory.
    """
    looked_up, goes_on = threading.Event(), threading.Event()
    sent = []

    def change(request, answer):
        if request.path.endswith("artifacts:lookup") and not looked_up.is_set():
            looked_up.set()
            goes_on.wait(60)
        if request.method == "GET" and "/artifacts/" in request.path:
            return sent[0]
        return answer

    async with opened_region(change) as region:
        center = world.api(world.center)
        assert center.put(envelope(center, 1), 1).status_code == 201
        found = center.get(1)
        kept = {name: found.headers[name] for name in ("repr-digest", "etag")}
        sent.append(Answer(200, kept, found.content))
        fetch = region.region.fetches.fetch(
            key_in(center, 1), NamespacePolicy(), patience_seconds=60
        )
        fetching = asyncio.create_task(fetch)
        await asyncio.to_thread(looked_up.wait, 60)
        assert center.delete(1).status_code == 204
        await region.follow()
        goes_on.set()
        await fetching
        await region.catch_up()
        assert await region.kept(center, 1) == []
