"""The history: what was served, by hour and by day, and what it costs to know it."""

import asyncio
import sqlite3
import threading
from collections import defaultdict
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import product
from unittest.mock import AsyncMock

import pytest
import sqlalchemy as sa

from graphstash_schema.history import (
    HISTORY_KEPT,
    MAX_GROUPED_STEPS,
    MAX_HISTORY_GROUPS,
    OTHERS,
    Grouping,
    HistoryPoint,
    HistoryQuery,
    Step,
)
from graphstash_server.db.queries import history as queries
from graphstash_server.db.tables import history
from graphstash_server.errors import ServerError
from graphstash_server.services import accounting
from graphstash_server.services import history as services
from graphstash_server.services.accounting import MAX_GROUPS
from graphstash_server.testing import LiveServer
from support.api import Api
from support.services import ACTOR, key_of
from support.statements import recorded
from support.waiting import until

pytestmark = pytest.mark.anyio

START = datetime(2026, 1, 1, tzinfo=UTC)
"""Of the clock that tests turn."""
HOUR = 3600
DAY = 24 * HOUR


async def rows(server, *columns):
    """Every row of the table, or some columns of it."""
    chosen = [history.c[name] for name in columns] or list(history.c)
    async with server.context.database.reading() as connection:
        return sorted(map(tuple, await connection.execute(sa.select(*chosen))))


async def hit(server, number=0, *, job="", namespace="team", times=1):
    for _ in range(times):
        server.context.accounting.count_hit(
            key_of(number, namespace), saved_seconds=2.5, job=job, sent_bytes=10
        )


async def flush(server):
    await server.context.accounting.flush()


async def points(server, namespaces=None, **asked):
    """Hits of every point that has some, by its time and group."""
    found = await server.context.history.read(HistoryQuery(**asked), namespaces=namespaces)
    return {(each.at, each.group): each.hits for each in found.points if each.hits}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_server_that_stops_in_the_middle_of_a_flush_counts_once(opened, tmp_path):
    async with opened() as server:
        await server.put(b"blob")
        await hit(server)
        context = server.context
        with closing(sqlite3.connect(tmp_path / "graphstash.sqlite3")) as neighbour:
            neighbour.execute("BEGIN IMMEDIATE")
            flushing = asyncio.create_task(context.accounting.run(every_seconds=0))
            await asyncio.to_thread(until, context.database._turn.locked)
            flushing.cancel()
        await asyncio.wait([flushing])
        await flush(server)

        assert (await server.used()).hits == 1


@pytest.mark.sql
async def test_hits_misses_and_uploads_count_in_their_hour_and_day(opened):
    async with opened() as server:
        opened.clock.turn(13 * HOUR + 59)
        await server.put(b"blob", seconds=2.5)
        await hit(server, job="nightly", times=2)
        server.context.accounting.count_miss(key_of(7), job="nightly")
        await flush(server)
        opened.clock.turn(HOUR)
        await hit(server)
        await flush(server)

        hour, day = START + timedelta(hours=13), START
        numbers = ("hits", "misses", "served_bytes", "puts", "saved_compile_seconds")
        assert await rows(server, "step", "at", "job", *numbers) == [
            ("day", day, "", 1, 0, 10, 1, 2.5),
            ("day", day, "nightly", 2, 1, 20, 0, 5.0),
            ("hour", hour, "", 0, 0, 0, 1, 0.0),
            ("hour", hour, "nightly", 2, 1, 20, 0, 5.0),
            ("hour", hour + timedelta(hours=1), "", 1, 0, 10, 0, 2.5),
        ]
        usage = await server.used()
        assert (usage.hits, usage.misses, usage.served_bytes, usage.puts) == (3, 1, 30, 1)


@pytest.mark.sql
async def test_points_are_grouped_as_requested(opened):
    async with opened() as server:
        for namespace in ("team", "other"):
            await server.put(b"blob", namespace=namespace)
        await hit(server, job="a", times=3)
        await hit(server, namespace="other", job="b", times=2)
        await flush(server)
        opened.clock.turn(DAY)
        await hit(server, job="b")
        await flush(server)
        opened.clock.turn(1)
        next_day = START + timedelta(days=1)

        async def by(grouping, **asked):
            return await points(server, step=Step.DAY, by=grouping, **asked)

        assert await by(Grouping.NONE) == {(START, ""): 5, (next_day, ""): 1}
        assert await by(Grouping.JOB) == {(START, "a"): 3, (START, "b"): 2, (next_day, "b"): 1}
        assert await by(Grouping.NAMESPACE) == {
            (START, "other"): 2,
            (START, "team"): 3,
            (next_day, "team"): 1,
        }
        assert await by(Grouping.KIND) == {(START, "jax"): 5, (next_day, "jax"): 1}
        assert await by(Grouping.DEVICE_TYPE) == {(START, "cpu"): 5, (next_day, "cpu"): 1}
        assert await by(Grouping.JOB, namespaces=["other"]) == {(START, "b"): 2}
        assert await by(Grouping.NONE, namespaces=[]) == {}
        hours = await points(server)  # those of the last day, from the one in which it began
        assert hours == {(START, ""): 5, (next_day, ""): 1}
        await server.context.artifacts.delete(key_of(), actor=ACTOR)  # it leaves its history
        last = await points(server, since=START + timedelta(minutes=59), until=next_day)
        assert last == {(START, ""): 5}  # the hour it is in; the end is excluded


async def test_answer_names_only_its_largest_groups_and_is_built_alone_in_a_thread(
    opened, most_at_once, monkeypatch
):
    running, builders = most_at_once(services, "list_points"), set()

    def build(**fields):
        builders.add(threading.get_ident())
        return HistoryPoint(**fields)

    monkeypatch.setattr(queries, "HistoryPoint", build)
    async with opened() as server:
        await server.put(b"blob")
        for number in range(MAX_HISTORY_GROUPS + 5):
            await hit(server, job=f"job-{number:02}", times=1 + number)
        await flush(server)
        opened.clock.turn(1)
        since = opened.clock.now - MAX_GROUPED_STEPS * timedelta(hours=1)
        asked = (points(server, since=since, by=Grouping.JOB) for _ in range(4))
        found = await asyncio.gather(*asked)
    largest = {(START, f"job-{n:02}"): 1 + n for n in range(5, MAX_HISTORY_GROUPS + 5)}
    assert found == 4 * [largest | {(START, OTHERS): 1 + 2 + 3 + 4 + 5}]
    assert running() == 1
    assert builders
    assert threading.get_ident() not in builders


@pytest.mark.sql
async def test_an_hour_has_a_bounded_number_of_groups_and_loses_no_count(opened):
    """Whoever may read names as many jobs, and device types of misses, as they like."""
    async with opened() as one, opened() as other:
        await one.put(b"blob")
        await hit(one, job="known")
        await flush(one)
        for server, number in product((one, other), range(3 * MAX_GROUPS)):
            await hit(server, job=f"job-{number}-{id(server)}")
            key = key_of()._replace(device_type=f"none-{number}")
            server.context.accounting.count_miss(key)
        await hit(other, job="known")
        await flush(one)
        await flush(other)

        for step in Step:
            columns = ("step", "job", "device_type", "hits", "misses")
            found = [row[1:] for row in await rows(one, *columns) if row[0] == step]
            assert len(found) <= MAX_GROUPS + 1
            assert sum(hits for *_, hits, _ in found) == 6 * MAX_GROUPS + 2
            assert sum(misses for *_, misses in found) == 6 * MAX_GROUPS
            assert ("known", "cpu", 2, 0) in found  # what was there keeps its place


async def test_unwritten_counts_are_bounded_and_made_up_namespaces_leave_nothing(
    opened, monkeypatch
):
    monkeypatch.setattr(accounting, "_MAX_IN_MEMORY", 50)
    async with opened() as server:
        server.context.accounting.count_miss(key_of(1, "nowhere"), job="x")
        await flush(server)
        assert await rows(server) == []

        await server.put(b"blob")
        await flush(server)
        for number in range(500):
            await hit(server, job=f"job-{number}")
        assert len(server.context.accounting._counts.new) == 51
        await flush(server)
        assert (await server.used()).hits == 500


async def test_counts_keep_the_hour_of_a_failed_flush_or_of_a_clock_set_back(opened, monkeypatch):
    async with opened() as server:
        await server.put(b"blob")
        await flush(server)
        await hit(server, job="a")
        with monkeypatch.context() as patch:
            refuse = AsyncMock(side_effect=ServerError("unavailable", "not now"))
            patch.setattr(accounting, "add_requests", refuse)
            with pytest.raises(ServerError):
                await flush(server)
        assert (await server.used()).hits == 0
        for turn in (2 * HOUR, -5 * HOUR, 5 * HOUR):
            opened.clock.turn(turn)
            await hit(server, job="a")
            await flush(server)
        before, after = START - timedelta(hours=3), START + timedelta(hours=2)
        found = await points(server, since=before, until=after + timedelta(hours=1))
        assert found == {(before, ""): 1, (START, ""): 1, (after, ""): 2}
        assert (await server.used()).hits == 4


@pytest.mark.sql
async def test_old_hours_and_days_are_dropped(opened):
    async with opened() as server:
        await server.put(b"blob")
        await hit(server)
        await flush(server)
        for step, length in ((Step.HOUR, timedelta(hours=1)), (Step.DAY, timedelta(days=1))):
            dropped_at = START + length + HISTORY_KEPT[step]
            opened.clock.turn((dropped_at - opened.clock.now).total_seconds())
            await server.context.maintenance.run_once()
            assert step in {row[0] for row in await rows(server, "step")}
            opened.clock.turn(HOUR)  # when the chore is due again
            await server.context.maintenance.run_once()
            assert step not in {row[0] for row in await rows(server, "step")}
        assert await rows(server) == []


@pytest.mark.sql
async def test_a_flush_takes_as_many_statements_for_many_groups_as_for_one_and_a_hit_none(opened):
    async with opened() as server:
        await server.put(b"blob")
        await flush(server)
        counts = []
        for jobs in (1, 100):
            with recorded("history") as of_hits:
                for number in range(jobs):
                    await hit(server, job=f"job-{number}")
                assert await server.get() == b"blob"
            assert of_hits == []
            with recorded() as statements:
                await flush(server)
            counts.append(len(statements))
        # Whether the namespace is known; which groups there are; the artifact, counters and groups.
        assert counts == [3, 3] if server.context.database.is_postgresql else [5, 5]


def asked(api, **query):
    """The points of a namespace."""
    answer = api.http.get("/v1/stats/history", params={"namespace": api.namespace, **query})
    assert answer.status_code == 200, answer.text
    return answer.json()["points"]


@pytest.mark.parametrize("aside", [{}, {"X_Unheard_Of": "1"}], ids=["fast", "slow"])
def test_requests_count_for_the_job_that_they_name_well_formed(api, aside):
    large = bytes(3_000_000)
    api.put(b"blob", 1, seconds=1.5, Graphstash_Job="builder")
    api.put(large, 3)
    api.get(1, Graphstash_Job="train-gpt", **aside)
    api.get(2, Graphstash_Job="train-gpt", **aside)
    api.get(1, Range="bytes=1-", Graphstash_Job="train-gpt", **aside)
    api.get(3, Graphstash_Job="large", **aside)
    api.get(1, **aside)

    names = ("hits", "misses", "served_bytes", "puts", "saved_compile_seconds")
    expected = {
        "builder": (0, 0, 0, 1, 0.0),
        "train-gpt": (1, 1, 7, 0, 1.5),
        "large": (1, 0, len(large), 0, 0.0),
        "": (1, 0, 4, 1, 1.5),
    }

    def by_job():
        found = defaultdict(list)
        for point in asked(api, by="job"):  # one for each hour: the test may see two
            found[point["group"]].append([point[name] for name in names])
        return {group: tuple(map(sum, zip(*each, strict=True))) for group, each in found.items()}

    until(lambda: by_job() == expected)

    sent = [(name.replace("_", "-"), value) for name, value in aside.items()]
    jobs = ["", "a b", "-x", "x" * 129, "../x", "<script>", "a\tb", "(others)", "\xff"]
    for job in jobs:
        headers = [("Graphstash-Job", job.encode("latin-1")), *sent]
        assert api.http.get(api.path(1), headers=headers).content == b"blob"
    until(lambda: by_job()[""][0] == 1 + len(jobs))
    assert by_job().keys() == expected.keys()


def test_caller_without_read_right_gets_no_points(guarded, namespace):
    team, hidden = f"{namespace}-team", f"{namespace}-hidden"
    for where in (team, hidden):
        assert guarded.api(where).put(b"blob").status_code == 201
    reader = guarded.http(guarded.token(f"read:{team}"))

    def seen(client, **query):
        answer = client.get("/v1/stats/history", params={"by": "namespace", **query})
        return {each["group"] for each in answer.json()["points"]}

    writer = guarded.http(guarded.token(f"write:{team}", f"write:{hidden}"))
    until(lambda: seen(writer) == {team, hidden})
    assert seen(guarded.http(guarded.admin), namespace=hidden) == {hidden}
    assert seen(reader) == {team}
    assert seen(reader, namespace=hidden) == set()
    assert guarded.http().get("/v1/stats/history").status_code == 401


def test_invalid_query_is_refused_with_reason(api, problem):
    begin = "2026-01-01T00:00:00Z"
    for query, named in (
        ({"since": "2026-01-01T00:00:00"}, "timezone"),
        ({"since": "0001-01-01T00:00:00+23:00"}, "since"),
        ({"until": "9999-12-31T23:59:59-23:00"}, "until"),
        ({"since": "2026-01-02T00:00:00Z", "until": begin}, "begin before"),
        ({"since": begin, "until": "2026-02-01T00:00:01Z"}, "744 hours"),
        ({"since": begin, "until": "2027-02-06T00:00:00Z", "step": "day"}, "400 days"),
        ({"since": begin, "until": "2026-01-17T16:00:01Z", "by": "job"}, "at most 400 hours"),
    ):
        answer = api.http.get("/v1/stats/history", params=query)
        problem(answer, 400, "invalid_request", named)
    answer = api.http.get("/v1/stats/history", params={"namespace": "No Namespace"})
    problem(answer, 400, "invalid_namespace", "namespace")


def test_counts_of_workers_and_restarted_servers_add_up(start, connect, tmp_path):
    server = start("--workers", "2")
    api = connect(server.url)
    api.put(b"blob", 1)
    for _ in range(20):
        with closing(Api(api.url)) as client:  # a connection of its own, to either worker
            assert client.get(1, Graphstash_Job="j").content == b"blob"
    server.stop()  # each worker writes what it has counted
    with LiveServer(tmp_path / "data") as again:
        found = asked(connect(again.url), by="job")
    assert sum(each["hits"] for each in found if each["group"] == "j") == 20
    assert sum(each["puts"] for each in found) == 1
