"""Runs: what processes report at their end, summed, and bounded."""

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from graphstash_schema import Digest, ErrorCode, ManifestName, Namespace
from graphstash_schema.run import (
    MAX_LISTED_RUNS,
    MAX_RUN_AHEAD,
    MAX_RUN_BYTES,
    MAX_RUN_COUNTS,
    MAX_RUN_MISSES,
    MAX_RUN_SECONDS,
    RUNS_KEPT,
    Run,
    RunName,
    RunReport,
)
from graphstash_server.db.tables import runs
from graphstash_server.errors import ServerError
from graphstash_server.services.jobs import runs as service
from graphstash_server.services.jobs.runs import RunService
from support.services import key_of

pytestmark = [pytest.mark.sql, pytest.mark.anyio]

TEAM = Namespace("team")
START = datetime(2026, 1, 1, tzinfo=UTC)
STARTED = "2026-01-01T00:00:00Z"


def counts(device_type="cpu", **fields):
    return {"kind": "jax", "device_type": device_type, **fields}


def miss(number=0, *, seconds=1.0, **fields):
    return {"key": key_of(number).key.model_dump(mode="json"), "seconds": seconds, **fields}


def report_of(**fields):
    return {"started_at": STARTED, "seconds": 60.0, **fields}


class Runs:
    """The runs of one namespace, through HTTP."""

    def __init__(self, http, namespace):
        self.http = http
        self.path = f"/v1/{namespace}/runs"
        self.namespace = namespace

    def report(self, run, process="0", **fields):
        return self.http.put(f"{self.path}/{run}/{process}", json=report_of(**fields))

    def get(self, run):
        return self.http.get(f"{self.path}/{run}")

    def names(self, **query):
        answer = self.http.get(self.path, params=query)
        assert answer.status_code == 200, answer.text
        return [each["run"] for each in answer.json()["runs"]]


@pytest.fixture
def reports(api):
    api.put(b"blob")  # nothing is reported where nothing was ever stored
    return Runs(api.http, api.namespace)


def test_a_run_is_the_sum_of_its_processes(reports):
    first = report_of(
        job="nightly",
        program="train.py",
        producer="me@host:1",
        saved_wall_seconds=5.0,
        counts=[counts(hits_server=2, misses=1, compile_seconds=3.0), counts("cuda", hits_host=1)],
        misses=[miss(1, seconds=3.0, label="jit(step)", cause="new program")],
    )
    second = report_of(
        seconds=90.0,
        started_at="2026-01-01T00:00:01Z",
        producer="me@other:1",
        saved_wall_seconds=4.0,
        counts=[counts(hits_prefetched=4, saved_compile_seconds=1.5)],
        misses=[miss(1, seconds=2.0), miss(2, seconds=4.0)],
    )
    for process, told in (("b", second), ("a", first)):
        answer = reports.http.put(f"{reports.path}/run-1/{process}", json=told)
        assert answer.status_code == 204, answer.text

    run = Run.model_validate_json(reports.get("run-1").content)
    assert (run.run, run.job, run.program, run.producer) == (
        *("run-1", "nightly", "train.py", "me@host:1"),
    )
    assert (run.started_at, run.seconds, run.processes) == (START, 90.0, 2)
    assert run.saved_wall_seconds == 5.0
    cpu, cuda = run.counts
    assert (cpu.hits_server, cpu.hits_prefetched, cpu.misses) == (2, 4, 1)
    assert (cpu.compile_seconds, cpu.saved_compile_seconds) == (3.0, 1.5)
    assert (cuda.device_type, cuda.hits_host) == ("cuda", 1)
    assert [(each.key.fingerprint, each.seconds) for each in run.misses] == [
        (key_of(2).fingerprint, 4.0),
        (key_of(1).fingerprint, 3.0),
    ]
    assert (run.misses[1].label, run.misses[1].cause) == ("jit(step)", "new program")


def test_a_report_replaces_that_of_the_same_process(reports):
    reports.report("run", counts=[counts(misses=5)], misses=[miss(1)], job="old")
    reports.report("run", counts=[counts(misses=1)])

    run = reports.get("run").json()
    assert (run["processes"], run["counts"][0]["misses"], run["misses"]) == (1, 1, [])
    assert run["job"] is None


def test_the_list_has_the_latest_first_and_no_misses(reports):
    for number in range(3):
        reports.report(f"run-{number}", job=f"job-{number % 2}", misses=[miss(1)])
    reports.report("run-0", "another", job="job-0")

    assert reports.names() == ["run-0", "run-2", "run-1"]
    assert reports.names(limit=2) == ["run-0", "run-2"]
    assert reports.names(job="job-0") == ["run-0", "run-2"]
    assert reports.names(job="nobodys") == []
    listed = reports.http.get(reports.path).json()["runs"][0]
    assert (listed["misses"], listed["processes"]) == ([], 2)


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": MAX_LISTED_RUNS + 1}, "limit"),
        ({"limit": "all"}, "limit"),
        ({"job": "no job"}, "job"),
    ],
)
def test_a_list_that_cannot_be_given_says_why(reports, problem, query, named):
    code = "invalid_name" if "job" in query else "invalid_request"
    problem(reports.http.get(reports.path, params=query), 400, code, named)


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": -1},
        {"seconds": 1e10},
        {"seconds": "NaN"},
        {"started_at": "2026-01-01T00:00:00"},
        {"started_at": "0001-01-01T00:00:00+23:00"},
        {"started_at": "9999-12-31T23:59:59-23:00"},
        {"program": "x" * 129},
        {"program": "two\nlines"},
        {"producer": "\x1b[2J"},
        {"producer": "\x00"},
        {"job": "no job"},
        {"counts": [counts(misses=-1)]},
        {"counts": [counts(misses=2**63)]},
        {"counts": [counts(unknown=1)]},
        {"counts": [counts()] * (MAX_RUN_COUNTS + 1)},
        {"misses": [miss()] * (MAX_RUN_MISSES + 1)},
        {"misses": [miss(label="a\x7fb")]},
        {"misses": [{"key": {"kind": "jax"}, "seconds": 1}]},
        {"unknown": 1},
    ],
)
def test_a_malformed_report_is_refused(reports, change):
    answer = reports.report("run", **change)
    assert answer.status_code == 400, answer.text
    assert reports.get("run").status_code == 404


def test_a_number_that_is_none_is_refused(reports):
    for number in ("NaN", "Infinity", "-Infinity"):
        body = f'{{"started_at": "{STARTED}", "seconds": {number}}}'
        answer = reports.http.put(f"{reports.path}/run/0", content=body)
        assert answer.status_code == 400, answer.text


def test_labels_of_strangers_are_kept_as_text(reports):
    label = "<script>alert('x')</script> \u202e'; DROP TABLE runs; --"
    reports.report("run", program=label, misses=[miss(1, label=label, cause=label)])
    run = reports.get("run").json()
    assert (run["program"], run["misses"][0]["label"], run["misses"][0]["cause"]) == (label,) * 3


@pytest.mark.parametrize("path", ["no run/0", "run/-0", "run/" + "x" * 65, "x" * 65 + "/0"])
def test_a_malformed_name_is_refused(reports, problem, path):
    answer = reports.http.put(f"{reports.path}/{path}", json=report_of())
    problem(answer, 400, "invalid_name", "run name")


def test_a_report_has_at_most_64_kib(reports, problem):
    full = {
        "counts": [counts("d" * 100 + str(n), misses=2**62) for n in range(MAX_RUN_COUNTS)],
        "misses": [miss(n, label="ü" * 128, cause="x" * 128) for n in range(MAX_RUN_MISSES)],
    }
    assert reports.report("run", **full).status_code == 204
    assert len(reports.get("run").json()["misses"]) == MAX_RUN_MISSES
    too_much = b" " * MAX_RUN_BYTES + b"{}"
    refused = reports.http.put(f"{reports.path}/run/0", content=too_much)
    assert problem(refused, 413, "too_large")["limit"] == MAX_RUN_BYTES


def test_nothing_is_kept_where_nothing_was_ever_stored(api, problem):
    nowhere = Runs(api.http, f"{api.namespace}-nowhere")
    problem(nowhere.report("run"), 404, "not_found", "nothing was ever stored")
    assert nowhere.names() == []


def test_who_may_read_reports_and_who_may_not_learns_nothing(guarded, api):
    team, hidden = f"{api.namespace}-team", f"{api.namespace}-hidden"
    writer = guarded.http(guarded.token(f"write:{team}", f"write:{hidden}"))
    reader = guarded.http(guarded.token(f"read:{team}"))
    for where in (team, hidden):
        _store(writer, where)
        assert Runs(writer, where).report("run").status_code == 204

    assert Runs(reader, team).report("mine").status_code == 204
    assert set(Runs(reader, team).names()) == {"run", "mine"}
    there = Runs(reader, hidden)
    for answer in (there.report("mine"), there.get("run"), there.http.get(there.path)):
        assert answer.status_code == 404
    seen, absent = (_without_id(there.get(name)) for name in ("run", "none"))
    assert seen.replace("run", "none") == absent.replace("run", "none")
    assert Runs(guarded.http(), team).report("run").status_code == 401


def test_a_run_belongs_to_who_reported_it_first(guarded, api, problem):
    team = f"{api.namespace}-team"
    writer, reader = (guarded.http(guarded.token(f"{scope}:{team}")) for scope in ("write", "read"))
    _store(writer, team)
    Runs(writer, team).report("run", "0", counts=[counts(misses=1)])

    for process in ("0", "1"):
        answer = Runs(reader, team).report("run", process, counts=[counts(misses=99)])
        problem(answer, 409, "conflict", "another caller")
    assert Runs(writer, team).get("run").json()["counts"][0]["misses"] == 1


def _store(client, where):
    digest = {"Repr-Digest": Digest.of(b"blob").repr_digest}
    answer = client.put(key_of(0, where).artifact_path, content=b"blob", headers=digest)
    assert answer.status_code == 201, answer.text


def _without_id(answer):
    return answer.text.replace(answer.headers["x-request-id"], "ID")


class Bounded:
    """Runs of one server with small limits."""

    def __init__(self, server, clock, **limits):
        self.database = server.context.database
        self.service = RunService(database=self.database, clock=clock, **limits)
        self.clock = clock

    async def report(self, run, process="0", *, writer="me", namespace=TEAM, **fields):
        self.clock.turn(1)
        told = RunReport.model_validate(report_of(**fields))
        await self.service.put(namespace, RunName(run), RunName(process), told, writer=writer)

    async def of(self, writer=None):
        """Names of runs, all or those of a caller."""
        chosen = sa.select(runs.c.run).order_by(runs.c.reported_at)
        if writer is not None:
            chosen = chosen.where(runs.c.writer == writer)
        async with self.database.reading() as connection:
            return list(await connection.scalars(chosen))


async def test_beyond_its_limit_a_caller_loses_its_own_oldest_runs(opened):
    async with opened() as server:
        for namespace in ("team", "other"):
            await server.put(b"blob", namespace=namespace)
        bounded = Bounded(server, opened.clock, max_reports=8)
        await bounded.report("theirs", writer="other")
        for number in range(40):
            await bounded.report(
                f"r{number}", namespace=Namespace("team" if number % 2 else "other")
            )
        mine = await bounded.of("me")
        assert len(mine) <= 8
        assert mine == [f"r{number}" for number in range(40 - len(mine), 40)]
        assert await bounded.of("other") == ["theirs"]


async def test_in_a_full_namespace_whoever_has_the_most_loses_the_oldest(opened):
    """A reader who floods it pushes out nobody who has fewer runs."""
    async with opened() as server:
        await server.put(b"blob")
        bounded = Bounded(server, opened.clock, max_reports=16)
        for number in range(7):
            await bounded.report(f"good-{number}", writer="team")
        for number in range(100):
            await bounded.report(f"bad-{number}", writer="flood")
        assert await bounded.of("team") == [f"good-{number}" for number in range(7)]
        assert len(await bounded.of()) <= 16


async def test_bytes_are_bounded_as_well_as_reports(opened):
    async with opened() as server:
        await server.put(b"blob")
        bounded = Bounded(server, opened.clock, max_bytes=100_000)
        told = [miss(n, label="x" * 128) for n in range(MAX_RUN_MISSES)]
        for number in range(20):
            await bounded.report(f"r{number}", misses=told)
        async with bounded.database.reading() as connection:
            kept = await connection.scalar(sa.select(sa.func.sum(runs.c.size_bytes)))
            text = await connection.scalar(sa.select(sa.func.sum(sa.func.length(runs.c.misses))))
        assert 50_000 < text < kept <= 100_000
        assert (await bounded.of())[-1] == "r19"


async def test_runs_go_as_a_whole(opened):
    """A run that lost some of its processes would report too little."""
    async with opened() as server:
        await server.put(b"blob")
        bounded = Bounded(server, opened.clock, max_reports=10)
        for run in ("old", "new"):
            for process in range(6):
                await bounded.report(run, str(process))
        assert await bounded.of() == ["new"] * 6


async def test_a_run_has_a_bounded_number_of_processes(opened, monkeypatch):
    monkeypatch.setattr(service, "MAX_PROCESSES", 3)
    async with opened() as server:
        await server.put(b"blob")
        bounded = Bounded(server, opened.clock)
        for process in range(3):
            await bounded.report("run", str(process))
        await bounded.report("run", "0")  # says it again
        with pytest.raises(
            ServerError, match="3 processes of the run run have reported"
        ) as refused:
            await bounded.report("run", "3")
        assert (refused.value.code, refused.value.limit) == (ErrorCode.TOO_LARGE, 3)


async def test_a_list_of_very_large_runs_is_shorter(opened, monkeypatch):
    monkeypatch.setattr(service, "_MAX_LISTED_REPORTS", 5)
    async with opened() as server:
        await server.put(b"blob")
        bounded = Bounded(server, opened.clock)
        for run in ("a", "b", "c"):
            for process in range(2):
                await bounded.report(run, str(process))
        listed = await bounded.service.list_latest(TEAM)
        assert [(each.run, each.processes) for each in listed.runs] == [("c", 2), ("b", 2)]


async def test_sums_are_bounded_too(opened):
    async with opened() as server:
        await server.put(b"blob")
        bounded = Bounded(server, opened.clock)
        for process in range(2):
            devices = [f"d{process}-{number}" for number in range(MAX_RUN_COUNTS - 1)]
            told = [counts(each, misses=1) for each in devices]
            told.append(counts(misses=2**63 - 1, compile_seconds=1e9))
            keys = range(process * MAX_RUN_MISSES, (process + 1) * MAX_RUN_MISSES)
            misses = [miss(n, seconds=float(n)) for n in keys]
            await bounded.report("run", str(process), counts=told, misses=misses)
        run = await bounded.service.find(TEAM, RunName("run"))
        assert (len(run.counts), len(run.misses)) == (MAX_RUN_COUNTS, MAX_RUN_MISSES)
        assert (run.counts[0].misses, run.counts[0].compile_seconds) == (2**63 - 1, MAX_RUN_SECONDS)
        assert [each.seconds for each in run.misses] == [float(n) for n in range(127, 63, -1)]
        assert Run.model_validate_json(run.model_dump_json()) == run


async def test_kinds_of_a_later_release_are_left_out(opened):
    async with opened() as server:
        await server.put(b"blob")
        bounded = Bounded(server, opened.clock)
        await bounded.report("run", counts=[counts(misses=1)], misses=[miss(1)])
        async with bounded.database.writing() as connection:
            for name in ("counts", "misses"):
                later = sa.func.replace(runs.c[name], "jax", "later")
                await connection.execute(sa.update(runs).values({name: later}))
        run = await bounded.service.find(TEAM, RunName("run"))
        assert (run.counts, run.misses, run.processes) == ((), (), 1)


async def test_reports_are_dropped_when_they_are_old(opened):
    async with opened() as server:
        await server.put(b"blob")
        bounded = Bounded(server, opened.clock)
        await bounded.report("run")
        opened.clock.now += RUNS_KEPT
        await server.context.maintenance.run_once()
        assert await bounded.of() == ["run"]
        opened.clock.now += timedelta(hours=1)  # when the chore is due again
        await server.context.maintenance.run_once()
        assert await bounded.of() == []


async def test_a_clients_clock_does_not_order_runs(opened):
    async with opened() as server:
        await server.put(b"blob")
        bounded = Bounded(server, opened.clock)
        await bounded.report("early", started_at="2026-01-02T00:00:00Z")
        await bounded.report("late", started_at="2001-01-01T00:00:00Z")
        listed = await bounded.service.list_latest(TEAM, job=None)
        assert [each.run for each in listed.runs] == ["late", "early"]


async def test_a_run_of_the_future_is_refused_and_a_clock_that_is_ahead_is_not(opened):
    """Pages sort runs by their beginning: it would stay at the top."""
    async with opened() as server:
        await server.put(b"blob")
        bounded = Bounded(server, opened.clock)
        begins = opened.clock.now + MAX_RUN_AHEAD + timedelta(seconds=2)
        named = r"2026-01-02T00:00:02\+0000.* 2026-01-01T00:00:01\+0000: 1 day"
        with pytest.raises(ServerError, match=named) as refusal:
            await bounded.report("run", started_at=str(begins))
        assert (refusal.value.code, refusal.value.limit) == ("invalid_request", 1)
        assert await bounded.of() == []
        await bounded.report("run", started_at=str(begins))  # a second later
        assert await bounded.of() == ["run"]


async def test_processes_that_end_together_are_all_in_the_run(opened):
    async with opened() as one, opened() as other:
        await one.put(b"blob")
        clock = SimpleNamespace(turn=lambda _: None)
        both = [Bounded(server, opened.clock) for server in (one, other)]
        for each in both:
            each.clock = clock
        await asyncio.gather(*(both[n % 2].report("run", str(n)) for n in range(40)))
        run = await one.context.runs.find(TEAM, RunName("run"))
        assert run.processes == 40
        assert (await other.context.runs.list_latest(TEAM, job=ManifestName("x"))).runs == ()


@pytest.mark.extended
def test_a_restarted_server_knows_the_runs_of_all_workers(start, connect):
    server = start("--workers", "2")
    api = connect(server.url)
    api.put(b"blob")
    for process in range(6):
        with connect(server.url).http as client:  # a connection of its own, to either worker
            answer = Runs(client, api.namespace).report("run", str(process))
            assert answer.status_code == 204
    server.stop()
    again = connect(start("--workers", "2").url)
    assert Runs(again.http, api.namespace).get("run").json()["processes"] == 6
