"""Maintenance: chores run once per interval, and failures end neither them nor the loop."""

import asyncio
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
import sqlalchemy as sa

from graphstash_schema import Digest, ErrorCode, NamespacePolicy
from graphstash_server.db.queries.artifacts import replace_artifact, withhold_artifact
from graphstash_server.db.queries.identifiers import claim_recount, last_recount
from graphstash_server.db.queries.usage import recount_usage
from graphstash_server.db.tables import usage
from graphstash_server.errors import DigestMismatchError, ServerError
from graphstash_server.services.maintenance import reconciler, schedule
from graphstash_server.testing.stores import as_chunks
from support.services import ACTOR, DAY, HOUR, TEAM, key_of, upload_of
from support.statements import recorded

pytestmark = pytest.mark.anyio

START = datetime(2026, 1, 1, tzinfo=UTC)


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


async def absent_blobs(store, *numbers):
    """Take blobs out of the store, and let the daily comparison run. Return the blobs."""
    rows = [await store.context.artifacts.find(key_of(each)) for each in numbers]
    taken = {row.digest.sha256: store.blobs.blobs.pop(row.digest.sha256) for row in rows}
    await store.context.reconciler.reconcile(blobs_before=START)
    return taken


@pytest.mark.sql
async def test_artifact_is_dropped_if_its_blob_is_absent_in_two_looks_an_hour_apart(opened):
    async with opened() as store:
        await store.fill(12)
        taken = await absent_blobs(store, 0, 1)
        look_again = store.context.reconciler.look_again
        for _ in range(2):
            await look_again()
            assert (await store.used()).artifacts == 12
            assert await store.get(0) is None
            store.clock.turn(HOUR / 2 - 1)
        (back, blob), _ = sorted(taken.items())
        store.blobs.blobs[back] = blob
        store.clock.turn(HOUR / 2)
    async with opened() as other:  # the first look is in the database
        assert len(await other.kept(12)) == 11
        await other.context.reconciler.look_again()
        assert (await other.used()).artifacts == 11
        del store.blobs.blobs[back]
        await absent_blobs(other)
        await other.context.reconciler.look_again()
        assert (await other.used()).artifacts == 11


async def test_no_artifact_is_dropped_while_many_blobs_are_absent(opened, caplog):
    async with opened() as store:
        await store.fill(12)
        rows = [await store.context.artifacts.find(key_of(each)) for each in range(12)]
        taken = {each.digest.sha256: store.blobs.blobs.pop(each.digest.sha256) for each in rows}
        assert [await store.get(each) for each in range(12)] == [None] * 12  # notes the absences
        store.clock.turn(2 * HOUR)
        await store.context.reconciler.look_again()
        assert "12 of 12 artifacts are absent" in caplog.text
        store.blobs.blobs.update(taken)
        assert len(await store.kept(12)) == 12
        await store.context.reconciler.look_again()
        store.blobs.blobs.clear()
        await store.context.reconciler.look_again()
        assert (await store.used()).artifacts == 12


@pytest.mark.sql
@pytest.mark.parametrize("text", [b"other", b"lost"], ids=["other bytes", "same bytes"])
async def test_upload_replaces_an_artifact_whose_blob_is_absent(opened, text):
    async with opened() as store:
        await store.put(b"lost", policy=NamespacePolicy())
        store.blobs.blobs.clear()
        assert await store.get() is None
        assert await store.put(text, policy=NamespacePolicy())
        assert await store.get() == text
        store.clock.turn(2 * HOUR)
        await store.context.reconciler.look_again()
        assert await store.get() == text
        assert await store.collect() == 0
        used = await store.used()
        assert (used.artifacts, used.size_bytes) == (1, len(text))


@pytest.mark.sql
async def test_artifact_that_was_stored_again_is_not_replaced_as_the_earlier_one(opened):
    """An upload of other bytes has read the earlier one, and its transaction comes later."""
    async with opened() as store:
        await store.put(b"lost", policy=NamespacePolicy())
        earlier = await store.context.artifacts.find_row(key_of())
        store.blobs.blobs.clear()
        store.clock.turn(1)
        assert await store.put(b"lost", policy=NamespacePolicy())
        other = earlier._replace(digest=Digest.of(b"other"))
        async with store.context.database.writing() as connection:
            assert not await replace_artifact(connection, other, replaces=earlier)
        assert await store.get() == b"lost"


@pytest.mark.sql
async def test_artifact_that_was_released_since_it_was_read_is_not_evicted(opened):
    async with opened() as store:
        await store.put(b"kept")
        artifacts, database = store.context.artifacts, store.context.database
        async with database.writing() as connection:
            await withhold_artifact(connection, key_of(), Digest.of(b"kept"), now=store.clock())
        row = await artifacts.find_row(key_of())
        assert await store.context.quarantine.release(key_of(), actor=ACTOR)
        assert await artifacts.evict([row], actor=ACTOR, reason="it is set aside") == 0
        assert await store.get() == b"kept"
        assert await artifacts.delete(key_of(), actor=ACTOR)


@pytest.mark.sql
async def test_failed_upload_keeps_an_artifact_whose_blob_is_absent_for_a_while(opened):
    async def broken():
        yield b"oth"
        raise ConnectionResetError

    async def late():
        store.blobs.blobs.update(taken)
        yield b"other"

    async with opened() as store:
        await store.put(b"lost", policy=NamespacePolicy())
        taken = dict(store.blobs.blobs)
        upload = upload_of(key_of(), b"other", policy=NamespacePolicy())
        for chunks, error in (
            (broken(), ConnectionResetError),
            (as_chunks(b"wrong"), DigestMismatchError),
            (late(), ServerError),  # the blob is back before the commit
        ):
            store.blobs.blobs.clear()
            with pytest.raises(error):
                await store.context.uploads.publish(upload, chunks)
            store.blobs.blobs.update(taken)
            assert await store.get() == b"lost"


async def test_no_artifact_is_dropped_while_more_blobs_are_absent_than_a_look_drops(
    opened, monkeypatch
):
    """More than a tenth of all artifacts are absent, and a look drops less than a tenth."""
    monkeypatch.setattr(reconciler, "_MAX_PENDING", 2)
    async with opened() as store:
        await store.fill(24)
        for number in range(6):
            row = await store.context.artifacts.find(key_of(number))
            del store.blobs.blobs[row.digest.sha256]
            assert await store.get(number) is None  # notes the absence
        store.clock.turn(2 * HOUR)
        await store.context.reconciler.look_again()
        assert (await store.used()).artifacts == 24
