"""Causes of misses: at the end of a run, and immediately with GRAPHSTASH_EXPLAIN=live."""

import re
import shutil
import threading

import certifi
import httpx
import pytest

from support.build_job import BUILD_PROGRAM
from support.hostile import Middlebox
from support.http_server import Answer
from support.server import Server
from support.tiers import most_extended
from support.waiting import PATIENT

JOB = (
    BUILD_PROGRAM
    + """
import os, sys
from hashlib import sha256
from pathlib import Path
from graphstash._compile.request import CompileRequest
from graphstash._process import session

def refuse(label):
    key = ArtifactKey.parse("schedule", "cpu", sha256(label.encode()).hexdigest())
    session.open_cache().note_unshared(CompileRequest(key, label=label), "it calls back")

Path(sys.argv[1]).write_text("{}")
"""
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server without the namespaces of other tests, through which an explanation would search."""
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def box(server):
    with Middlebox(server.url) as box:
        yield box


@pytest.fixture
def run(jobs, box, namespace, tmp_path):
    """Return a function that runs a job with unique programs and returns its miss lines."""

    def run(host, *lines, **settings):
        script = tmp_path / "train.py"
        script.write_text(JOB + "\n".join(lines).replace("_ns", f"_{namespace}"))
        settings = {"url": box.url, "namespace": namespace} | PATIENT | settings
        job = jobs.start(tmp_path / host, script=script, under="tuning", **settings)
        output = job.finish().errors.replace(f"_{namespace}", "")
        assert "Traceback" not in output
        return re.findall("^graphstash: (missed .*)$", output, re.MULTILINE)

    return run


def explanations(box):
    return box.to("artifacts:explain")


def test_run_ends_with_most_frequent_cause_and_address_of_its_page(run, box, namespace):
    run("a", "build('step_ns', jax='1')", "build('loss_ns', jax='1')")
    box.requests.clear()
    assert run("b", "build('step_ns', jax='1')", "build('loss_ns', jax='1')") == []
    assert explanations(box) == []

    (line,) = run("c", *(f"build('{name}_ns', jax='2')" for name in ("step", "loss", "norm")))
    brief, _, address = line.partition(" -> ")
    assert brief == "missed 3: jax differs (2 of 3)"
    assert address.startswith(f"{box.url}/runs/{namespace}/")
    page = httpx.get(address, timeout=30)
    assert page.status_code == 200
    assert "jax: 2 here, 1 there" in page.text


def test_quiet_run_explains_nothing(run, box):
    assert run("a", "build('step_ns')", summary=False) == []
    assert explanations(box) == []


def test_live_run_logs_each_miss_with_its_cause(run):
    run("a", "build('step_ns', jax='1')")
    lines = run("b", "build('step_ns', jax='2')", "build('loss_ns')", explain="live")
    assert lines[:2] == [
        "missed step: jax: 2 here, 1 there",
        "missed loss: new program: nothing like it is stored",
    ]
    assert re.match(r"missed 2: .* \(1 of 2\) -> ", lines[2])


def test_live_run_logs_a_bounded_number_of_misses_and_counts_the_others(run, box):
    job = ["for number in range(40):", "    build(f'step{number}_ns')"]
    *lines, more, _ = run("a", *job, explain="live")
    assert len(lines) == len(explanations(box)) == 32
    assert more == "missed 8 programs more, not logged"


UNSHAREABLE = "the cache could not help (unshareable: it calls back)"


def test_repeated_unshareable_program_hides_no_miss(run):
    job = ["for _ in range(40):", "    refuse('callback')", "build('step_ns')"]
    *lines, end = run("a", *job, explain="live", report_runs=False)
    new = "new program: nothing like it is stored"
    assert lines == [f"missed callback: {UNSHAREABLE}", f"missed step: {new}"]
    assert end == "missed 1: new program"


@pytest.mark.parametrize(("explain", "logged"), [("live", 32), ("false", 0)])
def test_unshareable_programs_hide_no_miss(run, explain, logged):
    job = ["for number in range(40):", "    refuse(f'callback{number}')", "build('step_ns')"]
    lines = run("a", *job, explain=explain, report_runs=False)
    assert sum(UNSHAREABLE in line for line in lines) == logged
    assert lines[-1] == "missed 1: new program"
    if logged:
        assert lines[-3:-1] == [
            "missed step: new program: nothing like it is stored",
            "missed 8 programs more, not logged",
        ]


def test_live_run_that_ends_before_explanations_counts_all_misses(run, box):
    ended = threading.Event()

    def change(request, answer):
        if "artifacts:explain" not in request.path:
            return answer
        ended.wait(60)
        return Answer(500, {}, b"")

    box.change = change
    job = ["for number in range(20):", "    build(f'step{number}_ns')"]
    try:
        lines = run("a", *job, explain="live", drain_seconds=0)
    finally:
        ended.set()
    assert lines == ["missed 20 programs more, not logged"]


def test_certificate_file_that_vanishes_stops_no_background_work(run, box, tmp_path):
    """Late uploads start again after the upload that fails."""
    box.change = lambda request, answer: Answer(500, {}, b"") if request.method == "PUT" else answer
    ca_file = tmp_path / "ca.pem"
    shutil.copy(certifi.where(), ca_file)
    job = ["graphstash.install()", f"os.remove({str(ca_file)!r})", "build('step_ns')"]
    assert run("a", *job, ca_file=ca_file, report_runs=False) == ["missed 1: new program"]


def test_live_run_without_server_names_the_reason(run):
    lines = run("a", "build('step_ns')", explain="live", url="http://127.0.0.1:9")
    reason = "the cache could not help (connect): the server was down or unreachable"
    assert lines == [f"missed step: {reason}"]


@pytest.mark.parametrize("fault", most_extended(["hangs", "fails", "is unknown"], quick=["hangs"]))
def test_explanation_that_fails_costs_no_look_up(run, box, fault):
    """Otherwise the circuit breaker would open, and a busy answer would pause all calls."""
    run("a", *(f"build('old{number}_ns')" for number in range(4)))
    ended = threading.Event()
    answers = {"fails": 503, "is unknown": 404}

    def change(request, answer):
        if "artifacts:explain" not in request.path:
            return answer
        if fault == "hangs":
            ended.wait(60)
            return Answer(500, {}, b"")
        return Answer(answers[fault], {"graphstash-protocol": "1", "retry-after": "60"}, b"?")

    box.change = change
    box.requests.clear()
    job = [f"build('{name}{number}_ns')" for number in range(4) for name in ("new", "old")]
    try:
        (line,) = run("b", *job, **({"first_byte_seconds": 4} if fault == "hangs" else {}))
    finally:
        ended.set()
    assert re.fullmatch(r"missed 4 -> \S+", line)
    assert len(explanations(box)) == 1
