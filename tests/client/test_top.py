"""`graphstash top` shows the running jobs of this host and the team, once or until Ctrl-C."""

import getpass
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from graphstash._cli.top import Snapshot, _print
from graphstash_schema import ArtifactKey, ArtifactMetadata
from support.hostile import Middlebox
from support.http_server import Answer
from support.json_page import fields_of
from support.processes import graphstash_here
from support.waiting import PATIENT_VARIABLES, until


@pytest.fixture
def busy(hosts, namespace):
    """A namespace with an artifact, a job's hit, and a running compilation."""
    host = hosts("publisher")
    key, running = (
        ArtifactKey.parse("jax", "cpu", f"{namespace}{end}".encode().hex().ljust(64, "0"))
        for end in "ab"
    )
    host.put(key, b"x", ArtifactMetadata(compile_seconds=40, raw_size_bytes=1))
    host.server.acquire(running)
    return running


@pytest.fixture
def job(tmp_path):
    """A waiting job under `graphstash run`."""
    program = "import sys; print('runs', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "graphstash", "run", "--job", "nightly", "--"),
            *(sys.executable, "-c", program, str(tmp_path)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"GRAPHSTASH_URL": "none"},
    )
    with process:
        assert process.stdout.readline() == b"runs\n"
        yield process
        process.stdin.close()


def own_run(runs, tmp_path):
    """Return the run of the fixture `job`, without the runs of other tests."""
    (run,) = (each for each in runs if str(tmp_path) in each["command"])
    return run


def test_json_has_the_fields_of_the_page_and_names_runs_and_compilations(
    command, busy, job, tmp_path, namespace
):
    overview = json.loads(command("top", "--json").stdout)
    assert set(overview) == fields_of("top")
    (lease,) = overview["leases"]
    assert lease["key"]["fingerprint"] == busy.fingerprint
    assert lease["holder"] == f"{getpass.getuser()}@{socket.gethostname()}:{os.getpid()}"
    run = own_run(overview["runs"], tmp_path)
    assert (run["job"], run["pids"], run["compiling"]) == ("nightly", [job.pid], 0)
    assert (overview["namespace"], overview["error"]) == (namespace, "")


def test_plain_output_has_a_line_for_each_run_and_compilation(command, busy, job, tmp_path):
    lines = command("top").stdout.splitlines()
    assert "1 compiling, 0 waiting" in lines[0]
    (run,) = (line for line in lines if str(tmp_path) in line)
    assert re.match(r" +0 +1 .* nightly ", run)
    (lease,) = (line for line in lines if busy.fingerprint[:12] in line)
    assert lease.split()[:3] == ["jax", busy.fingerprint[:12], "0"]


def test_without_server_the_runs_of_this_host_are_shown(job, tmp_path):
    for url, text in (("http://127.0.0.1:9", "127.0.0.1:9"), ("none", "set GRAPHSTASH_URL")):
        done = graphstash_here("top", "--url", url, COLUMNS="500")
        assert done.returncode == 1
        assert str(tmp_path) in done.stdout
        assert "the team" not in done.stdout
        assert text in done.stderr
        answer = json.loads(graphstash_here("top", "--url", url, "--json").stdout)
        assert text in answer["error"]
        assert own_run(answer["runs"], tmp_path)["job"] == "nightly"


@pytest.mark.parametrize("status", [403, 404])
def test_without_running_compilations_the_other_figures_are_shown(
    server, command, busy, job, tmp_path, status
):
    def refuse(request, answer):
        refused = Answer(status, {"graphstash-protocol": "1"}, b"")
        return refused if request.path.endswith("/leases") else answer

    with Middlebox(server.url, refuse) as box:
        shown = command("top", url=box.url).stdout
        overview = json.loads(command("top", "--json", url=box.url).stdout)
    assert "waiting" not in shown.splitlines()[0]
    assert re.search(r"compiling now\nunknown: .*\n\nthe team, by job", shown), shown
    assert re.search(rf"\n +- +1 .*{tmp_path}", shown), shown
    assert (overview["error"], bool(overview["leases_error"])) == ("", True)


def test_full_list_of_compilations_is_marked_incomplete(server, command, busy):
    def full(request, answer):
        if not request.path.endswith("/leases"):
            return answer
        leases = json.loads(answer.body)["leases"] * 200
        return Answer(200, answer.headers, json.dumps({"leases": leases}).encode())

    with Middlebox(server.url, full) as box:
        shown = command("top", url=box.url).stdout
    assert "200 or more compiling, 0 or more waiting" in shown.splitlines()[0]


def test_rates_are_only_of_two_complete_snapshots(capsys):
    counts = {"namespace": "ex", "hits": 1409, "misses": 1, "served_bytes": 1, "leases": []}
    rest = {"jobs": [], "runs": [], "leases_error": ""}
    start = datetime(2026, 1, 1, tzinfo=UTC)
    before, after = (
        Snapshot(at=start + timedelta(seconds=number), error="", **counts, **rest)
        for number in (0, 2)
    )
    for first, second, has_rates in (
        (before, after, True),
        (replace(before, error="down", hits=0), after, False),
        (before, replace(after, error="down", hits=0), False),
    ):
        _print(second, first)
        assert ("hits/s" in capsys.readouterr().out) == has_rates


def test_terminal_is_updated_until_interrupted(server, namespace, busy):
    reading, writing = pty.openpty()
    with os.fdopen(writing) as terminal:
        process = subprocess.Popen(
            [sys.executable, "-m", "graphstash", "top", "--interval", "0.5"],
            env=os.environ
            | PATIENT_VARIABLES
            | {"GRAPHSTASH_URL": server.url, "GRAPHSTASH_NAMESPACE": namespace}
            | {"COLUMNS": "100", "LINES": "40", "TERM": "xterm"},
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=subprocess.PIPE,
        )
    shown = b""

    def has_rates():
        nonlocal shown
        shown += os.read(reading, 65536)
        return b"hits/s" in shown

    with process:
        until(has_rates)  # of the second update
        process.send_signal(signal.SIGINT)
        with open(reading, "rb", buffering=0) as rest:  # noqa: PTH123 - of a descriptor
            try:
                while rest.read(65536):
                    pass
            except OSError:  # a terminal without writers
                pass
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""
    assert busy.fingerprint[:12].encode() in shown
