"""Jobs that must exit instead of compiling, in real processes, most under `graphstash run`."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from graphstash import ClientConfig
from graphstash._compile import compile_limit
from graphstash._compile.compile_limit import CompileLimit
from graphstash._compile.request import CompileRequest
from graphstash_schema import ArtifactKey, ArtifactMetadata, LeaseState
from support.build_job import BUILD
from support.processes import graphstash, is_running, python
from support.waiting import until, variables_of

KEY = ArtifactKey.parse("schedule", "cpu", f"{1:064x}")

_DEAF = ("sh", "-c", 'exec "$0" "$1" 2> /dev/full', sys.executable)


@pytest.fixture
def settings(config):
    return variables_of(config())


@pytest.fixture
def run(settings, tmp_path):
    """Return a function that runs a script under `graphstash run`."""

    def run(code, *options, command=(sys.executable,), **variables):
        script = tmp_path / "train.py"
        script.write_text(BUILD + code)
        return graphstash("run", *options, "--", *command, script, **settings | variables)

    return run


def test_job_that_would_compile_ends_first_with_reason(run, hosts):
    outcome = run("build(1, label='jit(step)\\x1b]0;x')\nprint('trained')", "--fail-on-miss")
    assert (outcome.returncode, outcome.stdout) == (86, "")
    message = "(schedule 000000000000) would be compiled: the cache does not have it"
    assert f"the job ends: jit(step)\\x1b]0;x {message}" in outcome.stderr
    assert "1 miss: " in outcome.stderr  # the cause depends on the artifacts of other tests
    assert "\x1b" not in outcome.stderr
    # The job that ended has left no lease.
    assert hosts("other").server.acquire(KEY).state is LeaseState.GRANTED


def test_job_ends_if_its_parent_ignores_the_signal(run):
    outcome = run("build(1)\nprint('trained')", "--fail-on-miss", command=_DEAF)
    assert (outcome.returncode, outcome.stdout) == (86, "")


def test_job_gets_default_signal_handling(run):
    """Python ignores SIGPIPE, and the programs that a job starts would inherit this."""
    code = "import subprocess; print(subprocess.run('yes | head -1', shell=True).returncode)"
    outcome = run(code, command=("sh", "-c", 'yes | head -1; exec "$0" "$1"', sys.executable))
    assert "Broken pipe" not in outcome.stderr
    assert outcome.stdout == "y\ny\n0\n"


def test_a_job_that_finds_everything_or_compiles_within_the_limit_runs_to_its_end(run, hosts):
    hosts("publisher").put(KEY, b"x", ArtifactMetadata(compile_seconds=1, raw_size_bytes=1))
    outcome = run("build(1)\nprint('trained')\nsys.exit(3)", "--fail-on-miss")
    assert (outcome.stdout, outcome.returncode) == ("trained\n", 3)
    code = "build(2)\nturn(1000)\nbuild(3)\nprint('trained')"  # training does not count
    assert run(code, "--max-compile-seconds", "500").stdout.endswith("trained\n")


def test_fallback_ends_job_with_another_status(run):
    outcome = run("build(1)", "--fail-on-miss", GRAPHSTASH_URL="http://127.0.0.1:9")
    assert (outcome.returncode, outcome.stdout) == (75, "")
    assert "would be compiled: the cache could not help (connect)" in outcome.stderr


def test_job_that_may_not_compile_ends_if_a_setting_cannot_be_used(run, settings):
    variables = settings | {"GRAPHSTASH_URL": "cache"}
    message = "graphstash: the job ends: GRAPHSTASH_URL='cache': expected http://host:port"
    alone = python(BUILD + "build(1)", **variables, GRAPHSTASH_FAIL_ON_MISS=1)
    for outcome in (alone, run("build(1)", "--fail-on-miss", GRAPHSTASH_URL="cache")):
        assert (outcome.returncode, outcome.stdout) == (75, "")
        assert outcome.stderr.startswith(message)


def test_without_graphstash_run_the_process_ends_itself(settings):
    outcome = python(BUILD + "build(1)", **settings, GRAPHSTASH_FAIL_ON_MISS=1)
    assert (outcome.returncode, outcome.stdout) == (86, "")


@pytest.mark.extended
def test_all_processes_of_a_run_end_across_intermediate_processes(run):
    """The launcher ignores its children, which run in sessions of their own."""
    code = """
import subprocess
if len(sys.argv) > 1:
    build(1)
sleep = "print('ready', flush=True)\\ntime.sleep(1000)"
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n" + sleep
for program in ("import time\\n" + sleep, stubborn):
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
    )
    child.stdout.readline()
    print(child.pid, flush=True)
subprocess.run([sys.executable, __file__, "child"])
time.sleep(1000)
"""
    outcome = run(code, "--fail-on-miss")
    assert outcome.returncode == 86
    children = outcome.stdout.split()
    assert len(children) == 2
    until(lambda: not any(is_running(child) for child in children))


@pytest.mark.extended
def test_compile_seconds_of_all_processes_count_towards_the_limit(run):
    code = """
import subprocess
if len(sys.argv) > 1:
    build(int(sys.argv[1]), seconds=300)
else:
    for number in (1, 2, 3, 4):
        subprocess.run([sys.executable, __file__, str(number)])
"""
    outcome = run(code, "--max-compile-seconds", "500")
    assert outcome.returncode == 86
    assert outcome.stdout.split() == ["compiling", "1", "compiling", "2"]
    assert "the limit is 500 s" in outcome.stderr


def test_a_compilation_that_does_not_end_is_ended_and_those_before_are_published(run, hosts):
    outcome = run("build(1)\nbuild(2, sleep=1000)", "--max-compile-seconds", "1")
    assert outcome.returncode == 86
    assert hosts("other").get(KEY) == b"x"


def test_nested_compilation_counts_once_towards_the_limit_of_a_running_one(monkeypatch):
    clock, seen, ends = [0.0], [], []

    def now():
        if threading.current_thread().name == "graphstash-compile-limit":
            seen.append(clock[0])
        return clock[0]

    monkeypatch.setattr(compile_limit, "monotonic", now)
    outer, inner, later = (
        CompileRequest(ArtifactKey.parse("schedule", "cpu", f"{number:064x}"))
        for number in (1, 2, 3)
    )
    limit = CompileLimit(
        ClientConfig(max_compile_seconds=500), lambda *_, **__: ends.append(seen[-1])
    )
    limit.begin(outer, None)
    clock[0] = 100.0
    limit.begin(inner, None)
    clock[0] = 400.0
    limit.add_compilation(300.0)
    limit.end(inner.key)
    until(lambda: 400.0 in seen)
    clock[0] = 600.0  # 300 s of the inner compilation, and 200 s of the outer one since then
    limit.begin(later, None)
    until(lambda: ends)
    assert ends == [600.0]


def test_exiting_process_waits_for_thread_that_ends_the_run(settings):
    """Otherwise other processes would wait for the end, and the run would have no limit."""
    code = """
import threading
session, is_ending = graphstash.install(), threading.Event()

def finish(*_, **__):
    is_ending.set()
    time.sleep(0.5)

session._finish = finish
end = threading.Thread(target=session._end_job, args=("",), kwargs={"status": 86}, daemon=True)
end.start()
is_ending.wait()
"""
    assert python(BUILD + code, **settings).returncode == 86


def test_command_ends_with_its_supervisor_and_inherits_files_and_signal_masks(settings, tmp_path):
    """The same holds without a limit, because `graphstash run` then becomes the command."""
    code = """
import os, signal, time
os.write(3, b"written ")
print(signal.pthread_sigmask(0, ()), os.getpid(), flush=True)
time.sleep(1000)
"""
    for options, end in (("--fail-on-miss", signal.SIGTERM), ("--max-compile-seconds=9", 9)):
        command = ["-m", "graphstash", "run", options, "--", sys.executable, "-c", code]
        with subprocess.Popen(
            ["bash", "-c", 'exec "$@" 3>&2', "bash", sys.executable, *command],
            env=os.environ | settings | {"TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            mask, child = process.stdout.readline().split()
            try:
                assert (mask, int(child) != process.pid) == ("set()", True)
                process.send_signal(end)
                assert process.wait(60) == -end
                until(lambda: not is_running(child))  # noqa: B023 - awaited at once
                assert process.stderr.read() == "written "
            finally:
                process.kill()
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)


def test_run_without_limit_replaces_itself_by_the_command(settings):
    command = [sys.executable, "-m", "graphstash", "run", "--", sys.executable, "-c"]
    process = subprocess.Popen(
        [*command, "import os; print(os.getpid())"],
        env=os.environ | settings | {"GRAPHSTASH_FAIL_ON_MISS": "0"},
        stdout=subprocess.PIPE,
    )
    output, _ = process.communicate(timeout=60)
    assert int(output) == process.pid
