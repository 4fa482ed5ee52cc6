"""A wrong clock deletes nothing. The tests set the clocks of real servers."""

import asyncio
import re
import sqlite3
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from graphstash_schema import AuditAction, Digest, LeaseRequest, LeaseState
from graphstash_schema.run import RunName, RunReport, RunTimes
from graphstash_server.db import database_clock, tables
from graphstash_server.db.database_clock import DatabaseClock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import pin_artifacts
from graphstash_server.db.queries.deletions import claim_blobs
from graphstash_server.errors import ServerError
from graphstash_server.services.plausible_clock import TOLERANCE
from graphstash_server.testing import LiveServer
from support.clocks import HostClock
from support.services import ACTOR, FakeClock, key_of, new_token
from support.tiers import most_extended
from support.waiting import until

pytestmark = pytest.mark.anyio

DAY = timedelta(days=1)
START = datetime(2026, 1, 1, tzinfo=UTC)

WRONG = {
    "an hour behind": -timedelta(hours=1),
    "200 days ahead": 200 * DAY,
    "in 2106": datetime(2106, 2, 7, 6, 28, 16, tzinfo=UTC) - START,  # more than 32 bits
}
"""Time by which a wrong clock is ahead."""

ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
"""For long tests whose outcome does not depend on the database."""

HOUR_SECONDS = 3600
DAY_SECONDS = 24 * HOUR_SECONDS
_CHORES = {"GRAPHSTASH_MAINTENANCE_SECONDS": "0.1", "GRAPHSTASH_RETAIN_DAYS": "30"}


def test_clock_ahead_for_a_moment_deletes_nothing_and_leases_still_end(start, connect, tmp_path):
    host_clock = HostClock(tmp_path)
    server = start(environment=_CHORES | host_clock.environment)
    api = connect(server.url)

    def says(word):
        """Return a condition to wait for, because a busy disk may delay the report."""
        return lambda: word in api.http.get("/readyz").json().get("clock", "")

    def has_compared():
        """Return whether the server has claimed the last chore of a round."""
        with sqlite3.connect(server.data_dir / "graphstash.sqlite3", timeout=60) as database:
            chores = database.execute("SELECT name FROM chores").fetchall()
            return ("compare rows and blobs",) in chores

    assert api.put(b"blob").status_code == 201
    until(has_compared)
    for number, name in enumerate(("an hour behind", "in 2106"), 2):
        ahead = WRONG[name]
        for jump in (ahead, timedelta(0)):
            host_clock.set(jump)
            until(says("suspended" if abs(jump) > TOLERANCE else "ok"))
            assert api.get().content == b"blob"
        assert api.put(b"blob", number).status_code == 201

    assert api.acquire(1, ttl_seconds=2).status_code == 201
    host_clock.set(-DAY)
    assert api.acquire(1, wait=60).json()["state"] == "granted"


@pytest.mark.sql
@pytest.mark.parametrize(
    ("database_url", "days"),
    [("sqlite", -1), ("sqlite", 200), ("postgresql", 200)],
    indirect=["database_url"],
)
async def test_lease_keeps_its_duration_and_renewal_when_the_clock_is_set(opened, days):
    async with opened() as one, opened() as other:
        opened.clock.jump(max(days, 0) * DAY_SECONDS)
        granted = await one.acquire()
        opened.clock.jump(-abs(days) * DAY_SECONDS)
        held = await other.acquire()
        assert (held.state, held.expires_in_seconds) == (LeaseState.HELD, 30)
        opened.clock.turn(20)
        request = LeaseRequest(ttl_seconds=30)
        await other.context.leases.renew(key_of(), token=granted.token, request=request)
        opened.clock.turn(29)
        assert (await one.acquire()).state is LeaseState.HELD
        opened.clock.turn(2)
        assert (await other.acquire()).state is LeaseState.GRANTED


async def test_server_follows_a_change_of_the_databases_clock(on_postgresql):
    """A day passes for the server only, as if the database's clock was set back."""
    database, passed = Database(on_postgresql), FakeClock()
    clock = await DatabaseClock.open(database, steady=passed.steady)
    passed.turn(DAY_SECONDS)
    before = clock()
    await clock.read()
    await database.close()
    assert before - clock() > DAY / 2


async def test_unexpected_failure_of_a_reading_does_not_end_the_clock(on_postgresql, monkeypatch):
    monkeypatch.setattr(database_clock, "_READ_SECONDS", 0)
    database, readings = Database(on_postgresql), []
    clock = await DatabaseClock.open(database, steady=FakeClock().steady)
    read, has_read = clock.read, asyncio.Event()

    async def failing_once():
        readings.append(1)
        if len(readings) == 1:
            raise RuntimeError("by this test")
        await read()
        has_read.set()

    monkeypatch.setattr(clock, "read", failing_once)
    running = asyncio.create_task(clock.run())
    waiting = asyncio.create_task(has_read.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    waiting.cancel()
    await database.close()
    assert has_read.is_set()


def test_servers_of_one_database_agree_on_leases_despite_a_wrong_clock(
    start, connect, tmp_path, postgres
):
    url = postgres.new_database()
    host_clock = HostClock(tmp_path)
    host_clock.set(DAY)
    variables = {"GRAPHSTASH_DATABASE_URL": url, **host_clock.environment}
    wrong = connect(start(environment=variables).url)
    with LiveServer(tmp_path / "right", database_url=url, log_level="error") as live:
        right = connect(live.url)
        assert right.acquire(0, ttl_seconds=600).status_code == 201
        assert wrong.acquire(0).status_code == 202
        assert wrong.acquire(1, ttl_seconds=1).status_code == 201
        assert right.acquire(1, wait=60).json()["state"] == "granted"


def test_dashboard_of_a_server_whose_clock_was_never_set(start, connect, tmp_path):
    host_clock = HostClock(tmp_path)
    host_clock.set(datetime(1970, 1, 2, tzinfo=UTC) - datetime.now(UTC))
    server = connect(start(environment=host_clock.environment).url)
    assert server.http.get("/?step=day&by=job", headers={"Accept": "text/html"}).is_success


@ON_SQLITE
@pytest.mark.parametrize("wrong", most_extended(list(WRONG), quick=["in 2106"]))
async def test_temporarily_wrong_clock_loses_nothing_and_blocks_nothing_later(opened, wrong):
    ahead = WRONG[wrong]
    """The clock jumps during a lease and before each chore. Servers start while it is wrong."""
    async with opened(retain_days=5) as server:
        for number in (1, 2):
            await server.put(b"blob %d" % number, number)
        await new_token(server.context.tokens, expires_at=opened.clock() + 9 * DAY)
        await rounds(opened.clock, server, days=1)

        for _ in range(2):
            assert (await server.acquire()).state is LeaseState.GRANTED
            opened.clock.jump(ahead.total_seconds())
            # A lease is advice, so a clock that is ahead ends it.
            is_over = ahead > timedelta(0)
            assert (await server.acquire()).state is (
                LeaseState.GRANTED if is_over else LeaseState.HELD
            )
            async with opened(retain_days=5) as other:
                for each in (server, other):
                    opened.clock.turn(8)
                    await each.context.maintenance.run_once()
                assert (await other.acquire()).state is LeaseState.HELD
                await other.use(1)
            opened.clock.jump(-ahead.total_seconds())
            await server.acquire()
            for _ in range(2):
                opened.clock.turn(31)  # no lease lasts longer, regardless of when it was granted
                assert (await server.acquire()).state is LeaseState.GRANTED
            opened.clock.turn(31)
            await server.context.maintenance.run_once()

        assert not server.context.plausible_clock.is_suspended
        assert [await server.get(number) for number in (1, 2)] == [b"blob 1", b"blob 2"]
        assert len((await server.context.tokens.list_all()).tokens) == 1
        assert len((await server.context.audit.read(limit=10)).entries) == 3
        await rounds(opened.clock, server, days=6)
        assert [await server.get(number) for number in (1, 2)] == [None, None]


async def test_tolerated_clock_error_does_not_age_artifacts(opened):
    minute = 60
    async with opened(retain_days=40 / (24 * 60)) as server:
        await server.put(b"blob")
        await server.context.maintenance.run_once()
        opened.clock.turn(15 * minute)
        await server.context.maintenance.run_once()
        opened.clock.jump(50 * minute)  # makes retention due, which is an hourly chore
        opened.clock.turn(8)
        await server.context.maintenance.run_once()
        assert not server.context.plausible_clock.is_suspended
        assert await server.get() == b"blob"
        opened.clock.jump(-50 * minute)
        await server.context.maintenance.run_once()
        assert await server.get() == b"blob"
        opened.clock.turn(2 * HOUR_SECONDS)
        await server.context.maintenance.run_once()
        assert await server.get() is None


async def test_claim_of_a_dead_server_ends_although_the_clock_was_set_back(opened):
    async with opened() as server:
        digest = Digest.of(b"blob")
        async with server.context.database.writing() as connection:
            ends_at = opened.clock() + timedelta(seconds=90)
            await claim_blobs(connection, [digest], until=ends_at)
        opened.clock.jump(-DAY_SECONDS)
        await server.put(b"blob")
        assert await server.get() == b"blob"


async def test_session_begun_while_the_clock_was_ahead_ends_with_its_correction(opened):
    async with opened(insecure=False) as server:
        token = (await new_token(server.context.tokens)).token
        opened.clock.jump(200 * DAY_SECONDS)
        session = await server.context.sessions.begin(token)
        assert await server.context.sessions.find(session.id) is not None
        opened.clock.jump(-200 * DAY_SECONDS)
        assert await server.context.sessions.find(session.id) is None


async def rounds(clock, *servers, days):
    """Let days pass, with two rounds of maintenance on each server per day."""
    for _ in range(days * 2):
        clock.turn(DAY_SECONDS / 2)
        for server in servers:
            await server.context.maintenance.run_once()


@pytest.mark.sql
async def test_servers_that_were_off_delete_by_age_after_a_tenth_of_their_downtime(opened):
    async with opened(retain_days=30) as server:
        await server.put(b"blob")
        await rounds(opened.clock, server, days=1)
    opened.clock.jump(60 * DAY_SECONDS)
    async with opened(retain_days=30) as one, opened(retain_days=30) as other:
        for server in (one, other):
            await server.context.maintenance.run_once()
        assert "60 days ahead" in (await one.context.health.check()).clock
        await rounds(opened.clock, one, other, days=6)
        assert await one.get() == b"blob"
        await rounds(opened.clock, one, other, days=1)
        assert not one.context.plausible_clock.is_suspended  # a report is a second old
        assert await one.get() is None


@ON_SQLITE
async def test_deletions_are_refused_until_an_operator_accepts_a_doubtful_clock(opened):
    async with opened(retain_days=30) as server:
        clock = server.context.plausible_clock
        await server.put(b"blob")
        await rounds(opened.clock, server, days=1)
        for hours, said in ((2, r"2\.0 hours ahead"), (60 * 24, "60 days ahead")):
            opened.clock.jump(hours * HOUR_SECONDS)
            with pytest.raises(ServerError, match=said):
                await clock.require()
        await server.context.maintenance.run_once()
        assert await server.get() == b"blob"
        await clock.accept()
        await server.context.maintenance.run_once()
        assert await server.get() is None


async def accept(clock, server):
    clock.turn(600)
    await server.context.plausible_clock.accept()


async def wait_for_belief(clock, server):
    while server.context.plausible_clock.is_suspended:
        await rounds(clock, server, days=1)


@pytest.mark.sql
@pytest.mark.parametrize(
    ("database_url", "end"),
    [("postgresql", accept), ("sqlite", wait_for_belief)],
    indirect=["database_url"],
)
async def test_uses_during_a_suspension_of_deletion_count_as_uses_at_its_end(opened, end):
    async with opened(retain_days=5) as server:
        for number in range(2):
            await server.put(b"blob %d" % number, number)
        await rounds(opened.clock, server, days=1)
    opened.clock.jump(60 * DAY_SECONDS)
    async with opened(retain_days=5) as one, opened(retain_days=5) as other:
        await one.context.maintenance.run_once()
        await one.use(0)
        await one.put(b"blob 2", 2)
        await other.context.plausible_clock.observe()
        await end(opened.clock, one)
        await other.put(b"blob 3", 3)  # this server has not observed the end yet
        await one.context.maintenance.run_once()
        kept = [await one.get(number) for number in range(4)]
        assert kept == [b"blob 0", None, b"blob 2", b"blob 3"]
        await rounds(opened.clock, one, days=6)
        assert [await one.get(number) for number in range(4)] == [None] * 4


async def test_correction_of_a_clock_late_at_the_first_start_deletes_nothing(opened):
    opened.clock.jump(-200 * DAY_SECONDS)
    async with opened(retain_days=30) as server:
        await server.context.maintenance.run_once()
        opened.clock.jump(200 * DAY_SECONDS)
        await server.context.maintenance.run_once()
        await server.put(b"blob")
        await accept(opened.clock, server)
        await server.context.maintenance.run_once()
        assert await server.get() == b"blob"


async def count_records(server):
    """Return the number of rows of each table whose old rows the server deletes by age."""
    counts = {}
    async with server.context.database.reading() as connection:
        for table in (tables.audit, tables.tokens, tables.runs, tables.history, tables.leases):
            count = sa.select(sa.func.count()).select_from(table)
            counts[table.name] = (await connection.execute(count)).scalar_one()
    return counts


@pytest.mark.sql
async def test_records_of_a_late_clock_outlive_its_correction(opened):
    opened.clock.jump(-800 * DAY_SECONDS - HOUR_SECONDS)  # the last hour of a day
    async with opened() as server:
        context = server.context
        await context.maintenance.run_once()
        await server.put(b"blob")
        await server.acquire(1)
        await server.use()
        report = RunReport(started_at=opened.clock(), seconds=1.0)
        run, process = RunName("x"), RunName("0")
        await context.runs.put(key_of().namespace, run, process, report, RunTimes(), writer="w")
        issued = await new_token(context.tokens)
        await context.tokens.revoke(issued.info.id, actor=ACTOR)
        before = await count_records(server)
        assert 0 not in before.values()
        opened.clock.jump(800 * DAY_SECONDS)
        await context.maintenance.run_once()
        assert await count_records(server) == before
        await accept(opened.clock, server)
        await context.maintenance.run_once()
        assert await count_records(server) == before


async def test_uses_before_and_after_the_end_of_a_suspension_count_equally(opened):
    async with opened() as server:
        await server.put(b"blob 0", 0, seconds=100)
        await server.put(b"blob 1", 1, seconds=1)
        await rounds(opened.clock, server, days=1)
        opened.clock.jump(60 * DAY_SECONDS)
        await server.context.maintenance.run_once()
        await server.use(0)
        await accept(opened.clock, server)
        await server.context.maintenance.run_once()
        await server.use(1)
        assert await server.evict_one()
        assert [await server.get(number) for number in range(2)] == [b"blob 0", None]


@ON_SQLITE
async def test_server_that_runs_an_hour_a_day_deletes_by_age(opened):
    async with opened(retain_days=10) as server:
        await server.put(b"blob")
        await rounds(opened.clock, server, days=1)
    believed = []
    for _ in range(14):
        opened.clock.jump(23 * HOUR_SECONDS)
        async with opened(retain_days=10) as server:
            for _ in range(3):
                await server.context.maintenance.run_once()
                opened.clock.turn(1200)
            believed.append(not server.context.plausible_clock.is_suspended)
    assert sum(believed) >= 3
    async with opened() as server:
        assert await server.get() is None


@ON_SQLITE
async def test_clock_that_jumps_at_every_start_is_not_accepted(opened):
    async with opened(retain_days=30) as server:
        await server.put(b"blob")
        await rounds(opened.clock, server, days=1)
    for _ in range(8):
        opened.clock.jump(20 * DAY_SECONDS)
        async with opened(retain_days=30) as server:
            await server.context.maintenance.run_once()
            opened.clock.turn(600)
            await server.context.maintenance.run_once()
            assert server.context.plausible_clock.is_suspended
            assert await server.get() == b"blob"
            jump = server.context.plausible_clock.jump
    assert jump > 159 * DAY


@ON_SQLITE
@pytest.mark.parametrize(("up_seconds", "believed_days"), [(600, 0.5), (7200, 3)])
async def test_downtime_accepted_at_a_start_is_limited_by_uptime_and_three_days(
    opened, up_seconds, believed_days
):
    async def hours_to_wait(server):
        await server.context.plausible_clock.observe()
        state = server.context.plausible_clock.state
        return float(re.search(r"they believe it in ([\d.]+) hours", state)[1])

    async with opened() as server:
        await server.context.plausible_clock.observe()
    opened.clock.jump(10 * DAY_SECONDS)
    async with opened() as server:
        await server.context.plausible_clock.observe()
        opened.clock.turn(up_seconds)
        before = await hours_to_wait(server)
    opened.clock.jump(10 * DAY_SECONDS)
    async with opened() as server:
        waits_longer = await hours_to_wait(server) - before
    # A server that runs for one day accepts ten days of a jump. It reports hours with one decimal.
    assert waits_longer == pytest.approx((10 - believed_days) * 24 / 10, abs=0.15)


async def test_chore_that_a_wrong_clock_planned_too_late_runs_when_due(opened):
    async with opened(retain_days=30) as server:
        opened.clock.jump(200 * DAY_SECONDS)
        await server.context.maintenance.run_once()
        opened.clock.jump(-200 * DAY_SECONDS)
        await server.context.plausible_clock.accept()
        await server.put(b"blob")
        opened.clock.turn(31 * DAY_SECONDS)
        await server.context.maintenance.run_once()
        assert await server.get() is None


async def test_first_round_after_an_upgrade_compares_clock_with_planned_chores(opened):
    async with opened(retain_days=30) as server:
        await server.put(b"blob")
        await server.context.maintenance.run_once()
        async with server.context.database.writing() as connection:
            await connection.execute(sa.delete(tables.recorded_times))
    opened.clock.jump(200 * DAY_SECONDS)
    async with opened(retain_days=30) as server:
        await server.context.maintenance.run_once()
        assert await server.get() == b"blob"


async def test_pin_survives_a_clock_that_is_ahead(opened):
    async with opened() as server:
        await server.put(b"pinned", 0)
        ends_at = opened.clock() + 30 * DAY
        async with server.context.database.writing() as connection:
            await pin_artifacts(connection, [key_of(0)], until=ends_at)
        await server.context.plausible_clock.observe()
        opened.clock.jump(200 * DAY_SECONDS)
        assert not await server.evict_one()
        assert await server.get(0) == b"pinned"


async def test_use_while_the_clock_was_ahead_protects_no_longer_than_other_uses(opened):
    async with opened() as server:
        for number in range(2):
            await server.put(b"blob %d" % number, number)
        await server.context.plausible_clock.observe()
        opened.clock.jump(200 * DAY_SECONDS)
        await server.use(0)
        opened.clock.jump(-200 * DAY_SECONDS)
        opened.clock.turn(DAY_SECONDS)
        await server.use(1)
        assert await server.evict_one()
        assert [await server.get(number) for number in range(2)] == [None, b"blob 1"]


@pytest.mark.sql
async def test_rows_written_while_the_clock_was_behind_age_from_recorded_time(opened):
    async with opened(retain_days=30) as server:
        maintenance, audit = server.context.maintenance, server.context.audit
        await server.put(b"first", 1)
        await maintenance.run_once()
        opened.clock.jump(-200 * DAY_SECONDS)
        await server.put(b"blob")
        opened.clock.jump(200 * DAY_SECONDS)
        opened.clock.turn(HOUR_SECONDS)
        await server.put(b"third", 3)
        await maintenance.run_once()
        assert await server.get() == b"blob"
        assert len((await audit.read(limit=10)).entries) == 3
        opened.clock.turn(91 * DAY_SECONDS)
        await maintenance.run_once()
        await maintenance.run_once()
        actions = {each.action for each in (await audit.read(limit=10)).entries}
        assert AuditAction.PUT not in actions


async def test_uptime_does_not_depend_on_the_clock(opened):
    async with opened() as server:
        opened.clock.jump(200 * DAY_SECONDS)
        opened.clock.turn(5)
        assert (await server.context.statistics.read()).uptime_seconds == 5


async def test_clock_that_was_set_back_makes_no_cached_row_or_token_valid_again(opened):
    """Each was read before a change by another process, and not used until the clock arrives at the
    same time again.
    """
    async with opened() as one, opened() as other:
        await one.put(b"shared", 1)
        await one.put(b"shared", 2)  # keeps the blob
        issued = await new_token(one.context.tokens)
        tokens = other.context.access.tokens
        assert await other.get(1) == b"shared"
        assert await tokens.find(issued.info.id) is not None
        opened.clock.jump(-HOUR_SECONDS)
        assert await one.context.artifacts.withdraw(key_of(1), actor=ACTOR)
        assert await one.context.tokens.revoke(issued.info.id, actor=ACTOR)
        opened.clock.turn(HOUR_SECONDS)
        assert await other.get(1) is None
        assert tokens.find_now(issued.info.id) is None
        assert await tokens.find(issued.info.id) is None
