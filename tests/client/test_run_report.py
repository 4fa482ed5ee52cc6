"""The reports that a process sends to the server, as recorded on the wire."""

import json
import re
import socket
import sys
import threading
from datetime import UTC, datetime
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest

from graphstash._process.run_record import read_last_run
from graphstash._process.run_report import fit_to_limit
from graphstash_schema.run import MAX_RUN_BYTES, MAX_RUN_MISSES, RunMiss, RunReport, RunTimes
from support.build_job import BUILD
from support.host import key
from support.hostile import Middlebox
from support.http_server import Answer
from support.processes import graphstash, started
from support.waiting import until, variables_of

JOB = (
    BUILD
    + """
for number in sys.argv[1].split(","):
    build(int(number), label=f"jit(step{number})", seconds=1000 * float(number))
"""
)


@pytest.fixture
def recorder(server):
    with Middlebox(server.url) as box:
        yield box


def reports_in(recorder):
    sent = recorder.to("/runs/")
    return [(each, RunReport.model_validate_json(each.body)) for each in sent]


@pytest.fixture
def run(recorder, config, tmp_path):
    """Return a function that runs a script under `graphstash run` on a host."""

    def run(host, *arguments, options=(), script="train.py", code=JOB, **variables):
        script = tmp_path / script
        script.write_text(code)
        settings = variables_of(config(host, url=recorder.url))
        command = ("run", *options, "--", sys.executable, script, *arguments)
        return graphstash(*command, check=True, **settings | variables)

    return run


def test_failed_upload_is_a_fallback_neither_in_the_summary_nor_in_the_report(
    run, recorder, monkeypatch
):
    ask = recorder.ask
    full = Answer(507, {"graphstash-protocol": "1"}, b"")
    is_upload = re.compile("/v1/.*/artifacts/").match
    monkeypatch.setattr(
        recorder,
        "ask",
        lambda each: full if each.method == "PUT" and is_upload(each.path) else ask(each),
    )
    ran = run("a", "1")
    ((_, report),) = reports_in(recorder)
    assert "0 hits, 1 miss, 0 fallbacks and 1 failure (store_full 1)" in ran.stderr
    assert [(each.misses, each.fallbacks) for each in report.counts] == [(1, 0)]


def test_process_reports_its_compilations_and_its_hits(run, recorder, namespace):
    run("a", "1,5")
    run("b", "1,5,9", "--api-key", "hunter2", options=("--explain", "--job", "mine"))

    (first, cold), (second, warm) = reports_in(recorder)
    assert first.method == "PUT"
    assert first.path.startswith(f"/v1/{namespace}/runs/")
    assert first.path.split("/")[4] != second.path.split("/")[4]  # another run
    (counts,) = cold.counts
    assert (counts.kind, counts.device_type) == ("schedule", "cpu")
    assert (counts.misses, counts.hits_server, counts.fallbacks) == (2, 0, 0)
    assert counts.compile_seconds >= 6000
    assert cold.program == "train.py"
    assert cold.producer.split(":")[0].endswith(f"@{socket.gethostname()}")
    assert cold.seconds > 0
    assert [miss.label for miss in cold.misses] == ["jit(step5)", "jit(step1)"]  # longest first
    assert all(miss.cause for miss in cold.misses)

    (counts,) = warm.counts
    assert warm.job == "mine"
    assert (counts.hits_server + counts.hits_prefetched, counts.misses) == (2, 1)
    assert counts.saved_compile_seconds >= 6000
    assert warm.saved_wall_seconds <= counts.saved_compile_seconds
    (miss,) = warm.misses
    assert miss.label == "jit(step9)"
    assert miss.cause
    assert second.headers["graphstash-job"] == "mine"
    assert not any(b"hunter2" in request.body for request in recorder.requests)


STEPS = """
from graphstash._process.session import record_step  # which the training loop calls

for number in (1, 2):
    build(number)
    record_step()
build(3)
"""


def test_report_tells_when_first_step_of_training_loop_and_last_program_were_ready(
    run, recorder, server, namespace
):
    run("a", "1", options=("--job", "mine"))
    run("a", code=BUILD + STEPS, options=("--job", "mine"))

    times = [
        RunTimes.model_validate(dict(parse_qsl(urlsplit(each.path).query)))
        for each, _ in reports_in(recorder)
    ]
    assert times[0].first_step_seconds is None
    assert 0 < times[0].last_program_seconds < reports_in(recorder)[0][1].seconds
    assert 0 < times[1].first_step_seconds < times[1].last_program_seconds
    url = f"{server.url}/v1/{namespace}/runs"
    listed = httpx.get(url, params={"job": "mine"}, timeout=30).json()["runs"]
    reported = [(each["first_step_seconds"], each["last_program_seconds"]) for each in listed]
    assert reported == [tuple(each.model_dump().values()) for each in reversed(times)]


IMPATIENT = (
    """
from graphstash._process import settled
settled._QUIET_SECONDS = settled._MAX_QUIET_SECONDS = 0.1
"""
    + BUILD
    + "for line in sys.stdin: build(int(line))"
)


def test_process_that_is_killed_has_reported_and_recorded_what_it_compiled(config, recorder):
    """Servers and preempted jobs end by a signal, so nothing of theirs runs at exit."""
    settings = config(url=recorder.url)

    def reported():
        answer = httpx.get(f"{recorder.url}/v1/{settings.namespace}/runs", timeout=60)
        return [
            sum(count.get("misses", 0) for count in run["counts"]) for run in answer.json()["runs"]
        ]

    with started(IMPATIENT, **variables_of(settings), GRAPHSTASH_JOB="mine") as process:
        for number in (1, 2):
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            until(lambda number=number: reported() == [number])
        process.kill()

    (record,) = read_last_run(settings.cache_dir)
    assert record.stats.misses == 2
    of_namespace = f"{recorder.url}/v1/{settings.namespace}"
    manifest = httpx.get(f"{of_namespace}/manifests/mine", timeout=60).json()
    assert [entry["runs"] for entry in manifest["entries"]] == [1, 1]
    listed = httpx.get(f"{of_namespace}/artifacts", timeout=60).json()["artifacts"]
    assert [each["label"] for each in listed] == 2 * ["jit(step)"]


def test_process_that_ends_while_its_report_waits_does_not_wait_again(
    config, recorder, monkeypatch
):
    ask, ended, asked = recorder.ask, threading.Event(), []

    def wait(request):
        if request.method == "PUT" and "/manifests/" in request.path:
            asked.append(request)
            ended.wait(60)
        return ask(request)

    monkeypatch.setattr(recorder, "ask", wait)
    settings = variables_of(config(url=recorder.url, drain_seconds=0.5))
    with started(IMPATIENT, **settings, GRAPHSTASH_JOB="mine") as process:
        process.stdin.write("1\n")
        process.stdin.flush()
        until(lambda: asked)
        process.communicate(timeout=60)
        ended.set()
    assert len(asked) == 1


@pytest.mark.parametrize("is_used", [True, False])
def test_a_setting_or_an_unused_cache_sends_no_report(run, recorder, is_used):
    code = JOB if is_used else "import graphstash; graphstash.install()"
    outcome = run("a", "1", code=code, GRAPHSTASH_REPORT_RUNS=str(not is_used))
    assert ("1 miss" in outcome.stderr) == is_used
    assert reports_in(recorder) == []


def test_server_that_refuses_reports_gets_one_call_and_causes_no_log_line(run, recorder):
    def refused(request, answer):
        if "/runs/" in request.path:
            answer.status = 500
        return answer

    recorder.change = refused
    outcome = run("a", "1")
    assert len(recorder.to("/runs/")) == 1
    assert outcome.stderr.splitlines() == ["graphstash: 0 hits, 1 miss, 1 published"]


FORKING = """
if os.fork() == 0:
    build(7)
    sys.exit()
os.wait()
"""


def test_every_process_of_a_run_reports_under_its_own_name_and_the_server_adds_them_up(
    run, recorder, server, namespace
):
    for host in ("a", "b"):
        run(host, "1,2", code=JOB + FORKING, options=("--job", "mine"))
    paths = [request.path.split("/")[4:] for request, _ in reports_in(recorder)]
    assert len({run for run, _ in paths}) == 2
    assert len({process for _, process in paths}) == len(paths) == 4
    url = f"{server.url}/v1/{namespace}/runs"
    listed = httpx.get(url, params={"job": "mine"}, timeout=30).json()["runs"]
    assert [run["processes"] for run in listed] == [2, 2]
    sums = [run["counts"][0] for run in listed]  # latest first
    assert [each["misses"] for each in sums] == [0, 3]
    assert sums[0]["hits_server"] + sums[0]["hits_prefetched"] == 3


def test_a_report_that_is_too_long_names_the_misses_that_took_longest():
    misses = [
        RunMiss(
            key=key(number),
            label="\N{ELEPHANT}" * 128,
            cause="\N{ELEPHANT}" * 128,
            seconds=99 - number,
        )
        for number in range(MAX_RUN_MISSES)
    ]
    report = RunReport(started_at=datetime.now(UTC), seconds=1, misses=tuple(misses))
    sent = fit_to_limit(report)
    assert len(report.model_dump_json().encode()) > MAX_RUN_BYTES
    assert len(sent.model_dump_json().encode()) <= MAX_RUN_BYTES
    assert sent.misses == tuple(misses[: len(sent.misses)])
    assert sent.misses


@pytest.mark.extended
def test_largest_report_with_hostile_labels_is_accepted_and_displayed_as_lines(
    run, recorder, server, namespace
):
    hostile = "\\x1b]0;owned\\x07\\n\\N{SNOWMAN}"
    code = JOB.replace("jit(step", hostile * 300).replace("1000 * float(number)", "0")
    numbers = ",".join(["0", *(str(number) for number in range(100, 170))])
    run("a", numbers, script="evil\x1b[2J.py", code=code)
    ((_, report),) = reports_in(recorder)
    assert len(report.misses) == MAX_RUN_MISSES
    shown = json.dumps([report.program, report.misses[0].label])
    assert "\\u001b" not in shown
    assert "\\n" not in shown
    url = f"{server.url}/v1/{namespace}/runs"
    (listed,) = httpx.get(url, timeout=30).json()["runs"]
    received = httpx.get(f"{url}/{listed['run']}", timeout=30).json()
    assert len(received["misses"]) == MAX_RUN_MISSES
