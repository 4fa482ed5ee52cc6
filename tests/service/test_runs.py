"""Runs: what processes report at their end, summed, and bounded."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

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
    RunQuery,
    RunReport,
    RunTimes,
)
from graphstash_server.db.tables import runs
from graphstash_server.errors import ServerError
from graphstash_server.services.jobs import runs as service
from graphstash_server.services.jobs.runs import RunService
from support.services import key_of

pytestmark = pytest.mark.anyio

TEAM = Namespace("team")
START = datetime(2026, 1, 1, tzinfo=UTC)
STARTED = "2026-01-01T00:00:00Z"


def counts(device_type="cpu", **fields):
    return {"kind": "jax", "device_type": device_type, **fields}


def miss(number=0, *, seconds=1.0, **fields):
    return {"key": asdict(key_of(number).key), "seconds": seconds, **fields}


def report_of(**fields):
    return {"started_at": STARTED, "seconds": 60.0, **fields}


class Runs:
    """The runs of one namespace, through HTTP."""

    def __init__(self, http, namespace):
        self.http = http
        self.path = f"/v1/{namespace}/runs"
        self.namespace = namespace

    def report(self, run, process="0", times=None, **fields):
        path = f"{self.path}/{run}/{process}"
        return self.http.put(path, json=report_of(**fields), params=times)

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
    first = {
        "job": "nightly",
        "program": "train.py",
        "producer": "me@host:1",
        "saved_wall_seconds": 5.0,
        "counts": [
            counts(hits_server=2, misses=1, compile_seconds=3.0),
            counts("cuda", hits_host=1),
        ],
        "misses": [miss(1, seconds=3.0, label="jit(step)", cause="new program")],
    }
    second = {
        "seconds": 90.0,
        "started_at": "2026-01-01T00:00:01Z",
        "producer": "me@other:1",
        "saved_wall_seconds": 4.0,
        "counts": [counts(hits_prefetched=4, saved_compile_seconds=1.5)],
        "misses": [miss(1, seconds=2.0), miss(2, seconds=4.0)],
    }
    for process, values in (("b", second), ("a", first)):
        assert reports.report("run-1", process, **values).status_code == 204

    run = Run.model_validate_json(reports.get("run-1").content)
    assert (run.run, run.job, run.program) == ("run-1", "nightly", "train.py")
    assert (run.started_at, run.seconds, run.processes) == (START, 90.0, 2)
    assert (run.producer, run.saved_wall_seconds) == ("me@host:1", 5.0)
    cpu, cuda = run.counts
    assert (cpu.hits_server, cpu.hits_prefetched, cpu.misses) == (2, 4, 1)
    assert (cpu.compile_seconds, cpu.saved_compile_seconds) == (3.0, 1.5)
    assert (cuda.device_type, cuda.hits_host) == ("cuda", 1)
    other, missed = run.misses
    assert (other.key.fingerprint, other.seconds) == (key_of(2).fingerprint, 4.0)
    assert (missed.key.fingerprint, missed.seconds) == (key_of(1).fingerprint, 3.0)
    assert (missed.label, missed.cause) == ("jit(step)", "new program")


@pytest.mark.sql
def test_run_is_ready_when_its_slowest_process_is(reports, problem):
    reports.report("run-1", "a", {"first_step_seconds": 20.5, "last_program_seconds": 300})
    reports.report("run-1", "b", {"first_step_seconds": 31, "a_later_parameter": "x"})
    reports.report("run-1", "launcher")
    reports.report("run-2")
    for answer in (reports.get("run-1"), reports.http.get(reports.path, params={"limit": 2})):
        found = answer.json()
        run = found["runs"][1] if "runs" in found else found
        assert (run["first_step_seconds"], run["last_program_seconds"]) == (31.0, 300.0)
    run = reports.get("run-2").json()
    assert (run["first_step_seconds"], run["last_program_seconds"]) == (None, None)

    reports.report("run-1", "b", {"first_step_seconds": 9})  # replaces the report of its process
    assert reports.get("run-1").json()["first_step_seconds"] == 20.5
    for wrong in ("-1", "nan", "inf", "1e10", "soon"):
        refused = reports.report("run-1", "b", {"first_step_seconds": wrong})
        problem(refused, 400, "invalid_request", "first_step_seconds")


def test_the_list_has_the_latest_first_and_a_report_replaces_that_of_its_process(reports):
    label = "<script>alert('x')</script> \u202e'; DROP TABLE runs; --"
    for number in range(3):
        reports.report(f"run-{number}", job=f"job-{number % 2}", misses=[miss(1), miss(2)])
    reports.report("run-0", "another", job="job-0")

    assert reports.names() == ["run-0", "run-2", "run-1"]
    assert reports.names(limit=2) == ["run-0", "run-2"]
    assert reports.names(job="job-0") == ["run-0", "run-2"]
    assert reports.names(job="nobodys") == []
    listed = reports.http.get(reports.path).json()["runs"][0]
    assert (listed["misses"], listed["processes"]) == ([], 2)

    misses = [miss(1, label=label, cause=label)]
    reports.report("run-1", counts=[counts(misses=1)], program=label, misses=misses)
    run = reports.get("run-1").json()
    assert (run["processes"], run["counts"][0]["misses"], run["job"]) == (1, 1, None)
    (only,) = run["misses"]
    assert (run["program"], only["label"], only["cause"]) == (label,) * 3


@pytest.mark.sql
def test_runs_of_a_month_are_listed_page_by_page(reports, problem):
    for number in range(7):
        month = 1 + number % 2
        assert reports.report(f"run-{number}", started_at=f"2025-0{month}-03T00:00:00Z").is_success
        reports.report(f"run-{number}", "1", started_at="2025-02-27T00:00:00Z")
    january = {"since": "2025-01-01T00:00:00Z", "until": "2025-02-01T00:00:00Z", "limit": 3}
    answers = [reports.http.get(reports.path, params=january).json()]
    while answers[-1]["next"]:
        query = january | {"after": answers[-1]["next"]}
        answers.append(reports.http.get(reports.path, params=query).json())
    found = [[each["run"] for each in answer["runs"]] for answer in answers]
    assert found == [["run-6", "run-4", "run-2"], ["run-0"]]
    assert {each["processes"] for answer in answers for each in answer["runs"]} == {2}
    for after in ("x", "2025-01-01T00:00:00/run", "2025-01-01T00:00:00Z/a b"):
        answer = reports.http.get(reports.path, params={"after": after})
        problem(answer, 400, "invalid_request", "after=")


def test_malformed_or_oversized_report_name_or_query_is_refused(reports, problem):
    for query, code, named in (
        ({"limit": MAX_LISTED_RUNS + 1}, "invalid_request", "limit"),
        ({"job": "no job"}, "invalid_name", "job"),
    ):
        problem(reports.http.get(reports.path, params=query), 400, code, named)
    for path in ("no run/0", "run/-0", "run/" + "x" * 65, "x" * 65 + "/0"):
        answer = reports.http.put(f"{reports.path}/{path}", json=report_of())
        problem(answer, 400, "invalid_name", "run name")
    for number in ("NaN", "Infinity", "-Infinity"):
        body = f'{{"started_at": "{STARTED}", "seconds": {number}}}'
        assert reports.http.put(f"{reports.path}/run/0", content=body).status_code == 400
    for change in (
        {"seconds": 1e10},
        {"started_at": "9999-12-31T23:59:59-23:00"},
        *({"program": "two\nlines"}, {"producer": "\x1b[2J\x00"}),
        {"counts": [counts(misses=2**63)]},
        {"misses": [miss(label="a\x7fb")]},
    ):
        assert reports.report("run", **change).status_code == 400, change
    assert reports.get("run").status_code == 404

    full = {
        "counts": [counts("d" * 100 + str(n), misses=2**62) for n in range(MAX_RUN_COUNTS)],
        "misses": [miss(n, label="ü" * 128, cause="x" * 128) for n in range(MAX_RUN_MISSES)],
    }
    assert reports.report("run", **full).status_code == 204
    assert len(reports.get("run").json()["misses"]) == MAX_RUN_MISSES
    too_much = b" " * MAX_RUN_BYTES + b"{}"
    refused = reports.http.put(f"{reports.path}/run/0", content=too_much)
    assert problem(refused, 413, "too_large")["limit"] == MAX_RUN_BYTES
    nowhere = Runs(reports.http, f"{reports.namespace}-nowhere")
    problem(nowhere.report("run"), 404, "not_found", "nothing was ever stored")
    assert nowhere.names() == []


def test_reports_are_served_to_readers_and_a_run_is_changed_by_its_first_reporter(
    guarded, api, problem
):
    team, hidden = f"{api.namespace}-team", f"{api.namespace}-hidden"
    writer = guarded.http(guarded.token(f"write:{team}", f"write:{hidden}"))
    reader = guarded.http(guarded.token(f"read:{team}"))
    for where in (team, hidden):
        digest = {"Repr-Digest": Digest.of(b"blob").repr_digest}
        assert writer.put(
            key_of(0, where).artifact_path, content=b"blob", headers=digest
        ).is_success
        assert Runs(writer, where).report("run", counts=[counts(misses=1)]).status_code == 204

    here, there = Runs(reader, team), Runs(reader, hidden)
    assert here.report("mine").status_code == 204
    assert set(here.names()) == {"run", "mine"}
    for answer in (there.report("mine"), there.get("run"), there.http.get(there.path)):
        assert answer.status_code == 404
    seen, absent = (
        answer.text.replace(answer.headers["x-request-id"], "ID")
        for answer in map(there.get, ("run", "none"))
    )
    assert seen.replace("run", "none") == absent.replace("run", "none")
    assert Runs(guarded.http(), team).report("run").status_code == 401

    for process in ("0", "1"):
        answer = here.report("run", process, counts=[counts(misses=99)])
        problem(answer, 409, "conflict", "another caller")
    assert here.get("run").json()["counts"][0]["misses"] == 1


class Bounded:
    """Runs of one server with small limits."""

    def __init__(self, server, clock, **limits):
        self.server = server
        self.database = server.context.database
        self.service = RunService(database=self.database, clock=clock, **limits)
        self.clock = clock

    async def report(self, run, process="0", *, writer="me", namespace=TEAM, **fields):
        self.clock.turn(1)
        report = RunReport.model_validate(report_of(**fields))
        names = namespace, RunName(run), RunName(process)
        await self.service.put(*names, report, RunTimes(), writer=writer)

    async def of(self, writer=None):
        """Names of runs, all or those of a caller."""
        chosen = sa.select(runs.c.run).order_by(runs.c.reported_at)
        if writer is not None:
            chosen = chosen.where(runs.c.writer == writer)
        async with self.database.reading() as connection:
            return list(await connection.scalars(chosen))


@pytest.fixture
def bounded(opened):
    """Opens a server that has an artifact, and its runs with limits."""

    @asynccontextmanager
    async def make(**limits):
        async with opened() as server:
            await server.put(b"blob")
            yield Bounded(server, opened.clock, **limits)

    return make


@pytest.mark.sql
async def test_beyond_its_limit_a_caller_loses_its_own_oldest_runs(bounded):
    async with bounded(max_reports=8) as server:
        await server.server.put(b"blob", namespace="other")
        await server.report("theirs", writer="other")
        for number in range(40):
            where = Namespace("team" if number % 2 else "other")
            await server.report(f"r{number}", namespace=where)
        mine = await server.of("me")
        assert len(mine) <= 8
        assert mine == [f"r{number}" for number in range(40 - len(mine), 40)]
        assert await server.of("other") == ["theirs"]


async def test_all_reports_of_a_run_are_dropped_together(bounded):
    """A run that lost some of its processes would report too little."""
    async with bounded(max_reports=10) as server:
        for run in ("old", "new"):
            for process in range(6):
                await server.report(run, str(process))
        assert await server.of() == ["new"] * 6


async def test_full_namespace_drops_oldest_report_of_largest_caller(bounded):
    """A reader who floods it pushes out nobody who has fewer runs."""
    async with bounded(max_reports=16) as server:
        for number in range(7):
            await server.report(f"good-{number}", writer="team")
        for number in range(60):
            await server.report(f"bad-{number}", writer="flood")
        assert await server.of("team") == [f"good-{number}" for number in range(7)]
        assert len(await server.of()) <= 16


async def test_bytes_of_reports_are_bounded(bounded):
    async with bounded(max_bytes=100_000) as server:
        misses = [miss(n, label="x" * 128) for n in range(MAX_RUN_MISSES)]
        for number in range(20):
            await server.report(f"r{number}", misses=misses)
        async with server.database.reading() as connection:
            kept = await connection.scalar(sa.select(sa.func.sum(runs.c.size_bytes)))
            text = await connection.scalar(sa.select(sa.func.sum(sa.func.length(runs.c.misses))))
        assert 50_000 < text < kept <= 100_000
        assert (await server.of())[-1] == "r19"


async def test_processes_of_a_run_and_listed_reports_are_bounded(bounded, monkeypatch):
    monkeypatch.setattr(service, "MAX_PROCESSES", 2)
    monkeypatch.setattr(service, "_MAX_LISTED_REPORTS", 5)
    async with bounded() as server:
        for run in ("a", "b", "c"):
            for process in range(2):
                await server.report(run, str(process))
        await server.report("c", "0")  # says it again
        listed = await server.service.list_latest(TEAM, RunQuery())
        assert [(each.run, each.processes) for each in listed.runs] == [("c", 2), ("b", 2)]
        named = "2 processes of the run c have reported"
        with pytest.raises(ServerError, match=named) as refused:
            await server.report("c", "2")
        assert (refused.value.code, refused.value.limit) == (ErrorCode.TOO_LARGE, 2)


async def test_sums_of_a_run_are_bounded(bounded):
    async with bounded() as server:
        for process in range(2):
            devices = [f"d{process}-{number}" for number in range(MAX_RUN_COUNTS - 1)]
            counted = [counts(each, misses=1) for each in devices]
            counted.append(counts(misses=2**63 - 1, compile_seconds=1e9))
            keys = range(process * MAX_RUN_MISSES, (process + 1) * MAX_RUN_MISSES)
            misses = [miss(n, seconds=float(n)) for n in keys]
            await server.report("run", str(process), counts=counted, misses=misses)
        run = await server.service.find(TEAM, RunName("run"))
        assert (len(run.counts), len(run.misses)) == (MAX_RUN_COUNTS, MAX_RUN_MISSES)
        assert (run.counts[0].misses, run.counts[0].compile_seconds) == (2**63 - 1, MAX_RUN_SECONDS)
        assert [each.seconds for each in run.misses] == [float(n) for n in range(127, 63, -1)]
        assert Run.model_validate_json(run.model_dump_json()) == run


async def test_kinds_of_a_later_release_are_left_out(bounded):
    async with bounded() as server:
        await server.report("run", counts=[counts(misses=1)], misses=[miss(1)])
        async with server.database.writing() as connection:
            for name in ("counts", "misses"):
                later = sa.func.replace(runs.c[name], "jax", "later")
                await connection.execute(sa.update(runs).values({name: later}))
        run = await server.service.find(TEAM, RunName("run"))
        assert (run.counts, run.misses, run.processes) == ((), (), 1)


@pytest.mark.sql
async def test_server_clock_orders_and_drops_runs_and_future_runs_are_refused(bounded):
    """Pages sort runs by their beginning: a run of the future would stay at the top."""
    async with bounded() as server:
        await server.report("early", started_at="2026-01-02T00:00:00Z")
        await server.report("late", started_at="2001-01-01T00:00:00Z")
        listed = await server.service.list_latest(TEAM, RunQuery())
        assert [each.run for each in listed.runs] == ["late", "early"]

        begins = server.clock.now + MAX_RUN_AHEAD + timedelta(seconds=2)
        named = r"2026-01-02T00:00:04\+0000, more than 1 day after 2026-01-01T00:00:03\+0000"
        with pytest.raises(ServerError, match=named) as refusal:
            await server.report("run", started_at=str(begins))
        assert (refusal.value.code, refusal.value.limit) == ("invalid_request", 1)
        assert await server.of() == ["early", "late"]
        await server.report("run", started_at=str(begins))  # a second later
        assert (await server.of())[-1] == "run"

        maintenance = server.server.context.maintenance
        server.clock.turn((RUNS_KEPT - timedelta(seconds=3)).total_seconds())
        await maintenance.run_once()
        assert len(await server.of()) == 3
        server.clock.turn(3600)  # when the chore is due again
        await maintenance.run_once()
        assert await server.of() == []


@pytest.mark.sql
async def test_processes_that_end_together_are_all_in_the_run(opened):
    async with opened() as one, opened() as other:
        await one.put(b"blob")
        both = [Bounded(server, opened.clock) for server in (one, other)]
        await asyncio.gather(*(both[n % 2].report("run", str(n)) for n in range(40)))
        run = await one.context.runs.find(TEAM, RunName("run"))
        assert run.processes == 40
        of_x = RunQuery(job=ManifestName("x"))
        assert (await other.context.runs.list_latest(TEAM, of_x)).runs == ()
