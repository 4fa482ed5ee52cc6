"""Number of database statements per request, and requests that share a statement."""

import asyncio
import functools
import json
import sqlite3
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from sqlalchemy import text
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import make_url

from graphstash_schema import ErrorCode, LookupRequest, Namespace, NamespacePolicy
from graphstash_schema.history import HistoryQuery, Step
from graphstash_server.api.bodies import _plain_keys
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import find_artifact, find_stored
from graphstash_server.db.queries.usage import UsageChange, add_usage, list_usage
from graphstash_server.db.reads import PostgresLane, SqliteLane
from graphstash_server.db.sqlite import SqliteConnection, SqliteHere
from graphstash_server.db.tables import UtcTime
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.services import accounting
from graphstash_server.services.accounting import MAX_AT_ONCE
from graphstash_server.services.artifacts.uploads import CommitBatcher
from support.services import ACTOR, OVERWRITE, FakeClock, key_of
from support.statements import recorded

pytestmark = [pytest.mark.sql, pytest.mark.anyio]

TEAM = Namespace("team")
ONCE = NamespacePolicy()


def read_in_threads(monkeypatch):
    """Let threads read SQLite, as on a slow disk. Otherwise the event loop reads each row itself,
    which is cheaper than sharing a read.
    """
    monkeypatch.setattr(SqliteHere, "fetch", lambda *_: None)


def without_policies(statements):
    """Leave out the reads of policies, and of the mark of their last change, every two seconds."""
    return [
        each
        for each in statements
        if not any(f"FROM {table}" in each.sql for table in ("namespaces", "identifiers"))
    ]


async def test_concurrent_readers_of_an_uncached_artifact_share_one_statement(opened, monkeypatch):
    async with opened() as one, opened() as other:
        await one.put(b"blob", policy=ONCE)
        with recorded() as statements:
            assert await one.get() == b"blob"
            assert statements == []
            assert await other.get() == b"blob"
            assert len(statements) == 1
            assert await other.get(1) is None
            assert len(statements) == 2
            assert await other.get() == b"blob"
            assert len(statements) == 2

        read_in_threads(monkeypatch)
        await one.put(b"other", 2)
        with recorded() as statements:
            found = await asyncio.gather(*(other.get(2) for _ in range(50)))
            missed = await asyncio.gather(*(other.get(1) for _ in range(50)))
        assert set(found) == {b"other"}
        assert set(missed) == {None}
        assert len(statements) == 2


async def test_request_does_not_join_a_read_that_has_begun(opened, monkeypatch):
    """A read that began before an upload may miss it, but a request after the upload must not."""
    has_read, may_return = asyncio.Event(), asyncio.Event()

    def held_back(fetch):
        async def late(lane, wanted):
            answers = await fetch(lane, wanted)
            has_read.set()
            await may_return.wait()
            return answers

        return late

    async with opened() as one, opened() as other:
        with monkeypatch.context() as patch:
            for lane in (SqliteLane, PostgresLane):
                patch.setattr(lane, "fetch", held_back(lane.fetch))
            read_in_threads(patch)
            early = asyncio.create_task(other.get())
            await has_read.wait()
        await one.put(b"blob")
        late = await other.get()
        may_return.set()
        assert late == b"blob"
        assert await early is None
        assert await other.get() == b"blob"


async def test_deleted_replaced_or_evicted_artifact_is_not_served_from_memory(opened):
    async with opened() as server:
        await server.put(b"blob", 1)
        await server.context.artifacts.delete(key_of(1), actor=ACTOR)
        await server.put(b"old", 2)
        await server.put(b"new", 2, policy=OVERWRITE)
        assert await server.get(1) is None
        assert await server.get(2) == b"new"
        await server.context.evictor.shrink(None, goal_bytes=0, actor=ACTOR, reason="by this test")
        assert await server.get(2) is None  # although its blob exists


async def test_single_upload_takes_few_statements(opened):
    async with opened() as server:
        await server.put(b"the first", 99, policy=ONCE)
        with recorded() as statements:
            await server.put(b"blob", policy=ONCE)
        # Two reads; locks and states of blobs; artifact, counters, lease, notification, log.
        made = without_policies(statements)
        assert len(made) <= (10 if server.context.database.is_postgresql else 7), made


async def test_uploads_that_wait_for_a_commit_share_statements(opened, monkeypatch):
    """The first commit is held until every upload has been sent."""
    sent, are_all_sent = 0, asyncio.Event()
    commit, commit_all = CommitBatcher.commit, CommitBatcher._commit_all

    async def sending(committer, upload):
        nonlocal sent
        sent += 1
        if sent == 16:
            are_all_sent.set()
        return await commit(committer, upload)

    async def held(committer, uploads):
        await are_all_sent.wait()
        return await commit_all(committer, uploads)

    monkeypatch.setattr(CommitBatcher, "commit", sending)
    monkeypatch.setattr(CommitBatcher, "_commit_all", held)
    async with opened() as server:
        with recorded() as statements:
            await asyncio.gather(
                *(server.put(b"blob %d" % number, number, policy=ONCE) for number in range(16))
            )
    assert sum("INTO artifacts" in each.sql for each in statements) == 16
    assert 1 <= sum("INTO audit" in each.sql for each in statements) <= 2, statements


async def test_number_of_statements_does_not_depend_on_the_number_of_keys(opened):
    async with opened() as server:
        await asyncio.gather(*(server.put(b"%04d" % number, number) for number in range(40)))
        with recorded() as statements:
            evicted = await server.context.evictor.shrink(
                None, goal_bytes=0, actor=ACTOR, reason="by this test"
            )
        assert evicted == 40
        assert len(statements) <= 20, statements

        await server.put(b"blob")
        keys = [key_of(number) for number in range(1000)]
        look_up, merge = server.context.artifacts.lookup, server.context.manifests.merge
        found = await look_up(TEAM, keys, caller="")
        assert len(found.artifacts) == 1  # this look-up protects it
        with recorded() as statements:
            assert len((await look_up(TEAM, keys, caller="")).artifacts) == 1
        assert len(statements) == 1

        counts = []
        for named in (keys[:1], keys):
            with recorded() as statements:
                entries, _ = await merge(TEAM, "job", named, writer="", actor=ACTOR)
            assert len(entries) == len(named)
            counts.append(len(without_policies(statements)))
        assert counts[0] == counts[1]


async def test_upload_single_read_and_transaction_return_same_row(opened):
    async with opened() as server, opened() as other:
        await server.put(b"blob", seconds=1.25)
        database = server.context.database
        alone = await find_artifact(database, key_of())
        async with database.reading() as connection:
            assert await find_artifact(connection, key_of()) == alone
        async with database.writing_in_steps() as steps:
            assert await steps.run(lambda each: find_stored(each, key_of())) == alone
        assert alone.created_at.utcoffset() == timedelta(0)
        for each in (server, other):  # cached since the upload, and from the database
            assert (await each.context.artifacts.open(key_of())).row == alone


async def test_concurrent_flushes_of_two_servers_lose_and_repeat_no_count(opened):
    names = [f"team-{number}" for number in range(15)]
    async with opened() as one, opened() as other:
        for name in names:
            await one.put(b"blob", namespace=name)

        async def count(server, order):
            for _ in range(20):
                for name in order:
                    server.context.accounting.count_hit(key_of(0, name), saved_seconds=1)
                await server.context.accounting.flush()

        async def upload():
            for number in range(1, 10):
                await asyncio.gather(
                    *(one.put(b"%d" % number, number, namespace=name) for name in names)
                )

        await asyncio.gather(count(one, names), count(other, names[::-1]), upload())
        written = await list_usage(one.context.database)
        assert {UsageChange(*counters).hits for _, *counters in written} == {40}
        found = [await find_artifact(one.context.database, key_of(0, name)) for name in names]
        assert {artifact.hits for artifact in found} == {40}
        opened.clock.turn(1)
        points = (await one.context.history.read(HistoryQuery(step=Step.DAY))).points
        assert sum(point.hits for point in points) == 40 * len(names)


async def test_flush_that_is_cancelled_after_its_commit_writes_no_count_twice(opened, monkeypatch):
    """As at a forced stop, which cancels the flush that runs, and then flushes what is left."""
    add = accounting.add_requests
    async with opened() as server:
        await server.put(b"blob")
        server.context.accounting.count_hit(key_of(), saved_seconds=1)
        loop = asyncio.get_running_loop()

        async def add_and_cancel(*arguments, **named):
            skipped = await add(*arguments, **named)
            loop.call_soon_threadsafe(flushing.cancel)
            return skipped

        monkeypatch.setattr(accounting, "add_requests", add_and_cancel)
        flushing = asyncio.create_task(server.context.accounting.flush())
        await asyncio.wait({flushing})
        monkeypatch.undo()
        await server.context.accounting.flush()
        (written,) = await list_usage(server.context.database)
        assert UsageChange(*written[1:]).hits == 1
        assert (await find_artifact(server.context.database, key_of())).hits == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_counters_of_many_namespaces_share_transactions_and_survive_a_failed_one(
    opened, monkeypatch, fails
):
    add, failures = accounting.add_requests, []
    names = [f"team-{number}" for number in range(MAX_AT_ONCE + 44)]

    async def add_later(*arguments, **named):
        if fails and not failures:
            failures.append(ServerError(ErrorCode.UNAVAILABLE, "a deadlock: retry"))
            raise failures[0]
        return await add(*arguments, **named)

    monkeypatch.setattr(accounting, "add_requests", add_later)
    async with opened() as server:
        await add_usage_of(server.context.database, names)
        for name in names:
            server.context.accounting.count_hit(key_of(0, name), saved_seconds=1)
        with recorded("UPDATE usage") as statements:
            await server.context.accounting.flush()
        assert len(failures) == fails
        assert fails or len(statements) == 2
        written = await list_usage(server.context.database)
        assert [UsageChange(*counters).hits for _, *counters in written] == [1] * len(names)


async def add_usage_of(database, names):
    async def add_all(connection):
        for name in names:
            await add_usage(connection, name, UsageChange(artifacts=1))

    async with database.writing_in_steps() as steps:
        await steps.run(add_all, is_last=True)


async def test_flush_of_many_uses_lets_requests_run_between_its_parts(opened):
    turns, flushed = 0, []

    async def count_turns():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with opened() as server:
        await server.put(b"blob")
        accounting = server.context.accounting
        for number in range(4 * MAX_AT_ONCE):
            accounting.count_hit(key_of(number), saved_seconds=1)
        accounting.when_written = lambda keys: flushed.append((turns, len(keys)))
        counting = asyncio.create_task(count_turns())
        with recorded("UPDATE artifacts") as statements:
            await accounting.flush()
        counting.cancel()
    assert len(statements) == 4
    assert [count for _, count in flushed] == [MAX_AT_ONCE] * 4
    assert len({turn for turn, _ in flushed}) == 4


async def test_flush_adds_each_artifacts_own_hits(opened):
    counts = [3, 1, 0, 3, 2]
    async with opened() as server:
        for namespace in ("one", "two"):
            for number, count in enumerate(counts):
                await server.put(b"%d" % number, number, namespace=namespace)
                server.context.accounting.count_use(key_of(number, namespace))
                for _ in range(count):
                    server.context.accounting.count_hit(key_of(number, namespace), saved_seconds=1)
        await server.context.accounting.flush()
        found = [
            (await find_artifact(server.context.database, key_of(number, namespace))).hits
            for namespace in ("one", "two")
            for number in range(len(counts))
        ]
    assert found == counts * 2


async def test_failing_step_rolls_back_its_transaction(opened):
    def add_many(connection):
        return add_usage(connection, "team", UsageChange(hits=100))

    async def fail(connection):
        await add_many(connection)
        raise LookupError("after a change")

    async def write(step):
        async with database.writing_in_steps() as steps:
            await steps.run(step)
            raise LookupError("between two steps")

    async with opened() as server:
        database = server.context.database
        await add_hit(database)
        for step in (fail, add_many):
            with pytest.raises(LookupError):
                await write(step)
        await add_hit(database)
        assert await hits(database) == 2


async def test_step_of_cancelled_caller_blocks_no_other_step(opened):
    async with opened() as server:
        database = server.context.database
        has_begun = asyncio.Event()

        async def stay():
            async with database.writing_in_steps() as steps:
                await steps.run(lambda each: add_usage(each, "team", UsageChange(hits=100)))
                has_begun.set()
                await asyncio.Event().wait()

        staying = asyncio.create_task(stay())
        await has_begun.wait()
        waiting = asyncio.create_task(add_hit(database))
        staying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await staying
        await waiting
        assert await hits(database) == 1


async def test_caller_cancelled_repeatedly_waits_for_the_thread(tmp_path):
    """Otherwise the transaction would continue while the next one runs."""
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'db'}")
    has_begun, may_end = threading.Event(), threading.Event()

    async def stay(_):
        has_begun.set()
        may_end.wait()

    async def write():
        async with database.writing_in_steps() as steps:
            await steps.run(stay, is_last=True)

    writing = asyncio.create_task(write())
    await asyncio.to_thread(has_begun.wait)
    for _ in range(5):
        writing.cancel()
        await asyncio.wait([writing], timeout=0.05)
        assert not writing.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await database.close()


async def test_statement_of_cancelled_caller_leaves_no_lock(tmp_path):
    """This holds even while the caller's traceback keeps the statement alive."""
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'db'}")
    begun = "WITH RECURSIVE n(x) AS (SELECT begin() UNION ALL SELECT x + 1 FROM n LIMIT 3000000)"
    has_begun = threading.Event()

    async def write():
        async with database.writing() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            await driver.create_function("begin", 0, lambda: has_begun.set() or 1)
            await connection.execute(text(f"{begun} SELECT max(x) FROM n"))

    writing = asyncio.create_task(write())
    await asyncio.to_thread(has_begun.wait)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError) as kept:
        await writing
    with closing(sqlite3.connect(tmp_path / "db", timeout=0)) as neighbour:
        neighbour.execute("BEGIN IMMEDIATE")
    del kept
    await database.close()

    connection = sqlite3.connect(tmp_path / "db", factory=SqliteConnection)
    connection.execute("BEGIN")
    for _ in range(2):  # a caller may be cancelled twice; its thread would run for ever
        connection.close()


async def test_event_loop_leaves_reads_to_threads_after_a_slow_read(tmp_path, monkeypatch):
    clock, blocks = FakeClock(), 0
    slow = SimpleNamespace(seconds=0.0, blocks=0)

    def getrusage(_):
        return SimpleNamespace(ru_inblock=blocks)

    def work():
        nonlocal blocks
        clock.turn(slow.seconds)
        blocks += slow.blocks
        return 1

    time = SimpleNamespace(monotonic=clock.steady)
    monkeypatch.setattr("graphstash_server.db.sqlite.time", time)
    monkeypatch.setattr("graphstash_server.db.sqlite.getrusage", getrusage)
    here = SqliteHere(make_url(f"sqlite+aiosqlite:///{tmp_path / 'db'}"))
    assert here.fetch("SELECT 1", ()) is None  # a thread opens it
    await here._opening
    await asyncio.sleep(0)
    here._connection.create_function("work", 0, work)
    read = functools.partial(here.fetch, "SELECT work()", ())

    assert read() == [(1,)]
    slow.seconds = 0.01  # the core ran other work
    assert read() == read() == [(1,)]
    slow.blocks = 8
    assert read() == [(1,)]
    assert read() is None
    clock.turn(0.9)
    assert read() is None
    clock.turn(0.1)
    slow.seconds, slow.blocks = 0.1, 0  # a disk that reports no blocks
    assert read() == [(1,)]
    clock.turn(5)
    assert read() is None
    clock.turn(5)
    assert read() == [(1,)]
    assert here.fetch("SELECT 1 FROM nowhere", ()) is None
    await here.close()


async def add_hit(database):
    async with database.writing_in_steps() as steps:
        await steps.run(lambda each: add_usage(each, "team", UsageChange(hits=1)), is_last=True)


async def hits(database):
    ((_, *counters),) = await list_usage(database)
    return UsageChange(*counters).hits


async def test_read_is_retried_after_connection_ends(postgres, opened, database_url, tmp_path):
    """A restarted database must not fail a request. A missing database does."""
    gone = Database(f"sqlite+aiosqlite:///{tmp_path / 'no' / 'where'}")
    with pytest.raises(ServerError, match="retry"):
        await find_artifact(gone, key_of())
    await gone.close()
    async with opened() as server:
        database = server.context.database
        await server.put(b"blob")
        assert await find_artifact(database, key_of()) is not None
        if database.is_postgresql:
            ended = await asyncio.to_thread(
                postgres.execute,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                f"WHERE datname = '{database.url.database}' AND pid <> pg_backend_pid()",
            )
            assert ended
        assert await find_artifact(database, key_of()) is not None


GOOD = {"kind": "jax", "device_type": "cpu", "fingerprint": "a" * 64}
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just("a" * 64),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from([*GOOD, "keys", "x"]), inner, max_size=4)
    ),
    max_leaves=5,
)
KEYS = st.one_of(
    st.just(GOOD),
    st.just({**GOOD, "kind": "triton"}),
    st.fixed_dictionaries({}, optional=dict.fromkeys([*GOOD, "more"], ODD)).map(
        lambda odd: GOOD | odd
    ),
    ODD,
)
BODIES = st.one_of(
    st.lists(KEYS, max_size=4).map(lambda keys: {"keys": keys}),
    st.lists(KEYS, max_size=4).map(lambda keys: {"keys": keys, "more": 1}),
    ODD,
)


@given(BODIES)
def test_fast_parser_of_key_lists_agrees_with_model(body):
    plain, model = read_both_ways(json.dumps(body).encode())
    assert plain == model


@pytest.mark.parametrize(
    "raw",
    [
        b'{"keys": [%s], "keys": []}',
        b'{"keys": [], "keys": [%s]}',
        b'{"keys": [%s]} x',
        b'\xef\xbb\xbf{"keys": [%s]}',
        b'{"keys": [%s, NaN]}',
        b'{"keys": [{"kind": "triton", "kind": "jax", "device_type": "cpu", "fingerprint": "%s"}]}'
        % (b"a" * 64),
    ],
)
def test_fast_parser_agrees_with_model_on_unusual_json(raw):
    plain, model = read_both_ways(raw.replace(b"%s", json.dumps(GOOD).encode()))
    assert plain in (None, model)


def read_both_ways(raw):
    """Return the keys of a body from the fast parser and from the model, or None for a refusal."""
    plain = _plain_keys(raw, TEAM, max_keys=1000)
    try:
        model = LookupRequest.model_validate_json(raw)
    except ValidationError:
        return plain, None
    return plain, [StoredKey.of(TEAM, key) for key in model.keys]


@pytest.mark.parametrize(
    "time",
    [
        datetime(2026, 11, 28, 23, 59, 59, 999_999, UTC),
        datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=5, minutes=30))),
        datetime(1, 1, 1, tzinfo=UTC),
    ],
)
def test_sqlite_stores_times_as_sqlalchemy_does(time):
    dialect = sqlite.dialect()
    naive = time.astimezone(UTC).replace(tzinfo=None)
    own, theirs = UtcTime(), sqlite.DATETIME()

    stored = own.bind_processor(dialect)(time)

    assert stored == theirs.bind_processor(dialect)(naive)
    read = own.result_processor(dialect, None)(stored)
    assert (read, read.tzinfo) == (time, UTC)
    with pytest.raises(ValueError, match="no time zone"):
        own.bind_processor(dialect)(naive)
