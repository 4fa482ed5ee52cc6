"""Sums through aggregators, between real processes over UDP on this host."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from graphstash.training.reduce.aggregators import sockets
from graphstash.training.reduce.aggregators.colocated import ColocatedAggregator
from graphstash.training.reduce.aggregators.datagrams import Header, Kind, Seal
from graphstash.training.reduce.aggregators.secret_file import read_secret
from support.aggregation_formula import rounds_of, streams_of
from support.ranks import reports_of_ranks, running_ranks

JOB = Path(__file__).parents[2] / "support" / "aggregate_job.py"
MODULE = "graphstash.training.reduce.aggregators"
WORLD = 3


@pytest.fixture(scope="module")
def reports(jobs, tmp_path_factory):
    return reports_of_ranks(jobs, tmp_path_factory.mktemp("aggregated"), JOB, WORLD)


def cases_of(reports, name):
    return zip(*(report[name]["cases"] for report in reports), strict=True)


@pytest.mark.parametrize("name", ["sums", "again", "small", "IPv6", "lossy", "hostile"])
def test_sums_are_those_of_a_dense_all_reduce_with_the_same_bits_everywhere(reports, name):
    if name == "IPv6" and name not in reports[0]:
        pytest.skip("this host has no IPv6")
    first = {case["name"]: case["digest"] for case in reports[0]["sums"]["cases"]}
    assert reports[0][name]["cases"]
    for cases in cases_of(reports, name):
        assert all(case["equal"] for case in cases), cases[0]["name"]
        assert {case["digest"] for case in cases} == {first[cases[0]["name"]]}, cases[0]["name"]


@pytest.mark.parametrize("name", ["sums", "small", "lossy"])
def test_bytes_are_those_of_the_formula(reports, name):
    for report in reports:
        for case in report[name]["cases"]:
            block_bytes = 64 * case["itemsize"] + 4
            capacity = (report[name]["payload"] - 72) // block_bytes
            streams = streams_of(case["blocks"], capacity, report[name]["pool"])
            headers = 72 * rounds_of(case["nonzero"], capacity, streams)
            union = len(set().union(*case["nonzero"]))
            assert case["union"] == union
            assert case["said"] == case["sent"] == headers + case["own"] * block_bytes, case["name"]
            assert case["received"] == headers + union * block_bytes, case["name"]


def test_datagrams_were_lost_and_sent_again(reports):
    for report in reports:
        assert report["lossy"]["faults"] > 20
    assert sum(report["lossy"]["again"] for report in reports) > 10


def test_strangers_did_send_something(reports):
    assert all(report["hostile"]["attacks"] > 20 for report in reports)


def test_a_whole_tensor_is_sent_with_its_zeros(reports):
    blocks = -(-1000 // 64)
    for report in reports:
        assert report["whole"]["sums"] == [1.0] * WORLD
        assert report["whole"]["sent"] == blocks * (64 * 4 + 4) + 72


@pytest.mark.parametrize("name", ["as it is", "quantized", "bf16 on the wire"])
def test_ddp_trains_the_same_through_aggregators(reports, name):
    cases = [report["in DDP"][name] for report in reports]
    assert all(case["equal"] for case in cases), cases
    assert len({case["digest"] for case in cases}) == 1
    for case in cases:
        statistics = case["statistics"]
        assert statistics["whole"] == 0 < statistics["looks"]
        assert 0 < statistics["density"] < statistics["union_density"] < 0.4
        assert statistics["sent_bytes"] < 0.05 * statistics["saved_bytes"]


def test_statistics_of_ddp_are_what_was_sent(reports):
    for report in reports:
        cases = report["in DDP"]
        for name in ("as it is", "quantized", "whole"):
            assert cases[name]["statistics"]["sent_bytes"] == cases[name]["sent"], name
        assert cases["whole"]["statistics"]["whole"] > 0


def test_a_rank_that_is_busy_for_long_is_not_taken_for_dead(reports):
    for report in reports:
        assert report["late"]["sum"] == WORLD * 100_000
    assert all(report["late"]["again"] > 0 for report in reports[1:])  # they have waited


def test_mistakes_are_told_on_every_rank(reports):
    for rank, report in enumerate(reports):
        told = report["mistakes"]
        assert told["sizes"]["kind"] == told["types"]["kind"] == "ConfigError"
        numbers = [n for n in (10, 11, 12) if f"tensor 0 of {n} float32" in told["sizes"]["text"]]
        assert len(numbers) == 2
        assert "of 10 float64 in" in told["types"]["text"]
        assert "of 10 float32 in" in told["types"]["text"]
        assert "these sums have ended: the ranks want" in told["after it"]["text"]
        assert "rank 0: Settings(block_size=8" in told["blocks"]["text"]
        assert "rank 2: Settings(block_size=10" in told["blocks"]["text"]
        assert "192.0.2.1:0 cannot be listened on" in told["address"]["text"]
        assert "payload_bytes=70: take more than 72" in told["payload"]["text"]
        assert "dedicated aggregators need secret_file=" in told["no secret"]["text"]
        assert "listen='127.0.0.1:7171' is no address by which" in told["port"]["text"]
        assert "listen='0.0.0.0' is no address by which" in told["any address"]["text"]
        assert "give a list, ['a:1']" in told["one text"]["text"]
        assert "secret_file='mine' is for aggregators that run" in told["secret alone"]["text"]
        assert "lost_after_seconds=inf: take 0.001 to" in told["for ever"]["text"]
        assert "timeout_seconds=0: take more than 0" in told["no time"]["text"]
        assert "a:1 cannot be reached" in told["long name"]["text"]
        for each in ("two dimensions", "two dimensions whole"):
            assert "a tensor of shape (2, 128): give one dimension" in told[each]["text"]
        assert "name each of them once" in told["named twice"]["text"]
        assert "aggregator 0 at 127.0.0.1:9 has not answered rank 0" in told["nobody"]["text"]
        assert "a datagram of 1452 has 1380 for a block" in told["too large"]["text"]
        assert "a tensor has 4294967294 blocks at most" in told["too many"]["text"]
        assert "this is torch.complex64" in told["complex"]["text"]
        assert "complex64 cannot be sent as wire_dtype=torch.float32" in told["imaginary"]["text"]
        assert "these sums have ended: closed" in told["closed"]["text"]
        if rank == 0:
            assert told["alone"] == [1, [1.0, 1.0, 1.0]]
            assert (
                "over the ranks [0], and this state over [0, 1, 2]" in told["other ranks"]["text"]
            )


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("speaks first", "rank 2: the aggregator process did not start: its first line is b'-P -m"),
        ("no thread", "rank 2 has given up: RuntimeError can't start new thread"),
        ("own error", "rank 2 has given up: ValueError of mine"),
    ],
)
def test_what_goes_wrong_on_one_rank_is_told_on_all(reports, case, text):
    told = [report["on one rank"][case] for report in reports]
    assert all(text in each["text"] for each in told[:2]), told
    assert told[2]["text"] == "of mine" or text in told[2]["text"]


def test_a_fork_is_no_rank_and_does_not_delay_the_end(reports):
    for report in reports:
        assert "of which this one is a fork" in report["with a fork"]["text"]
        assert report["with a fork"]["sum"] == 10 * WORLD
        assert report["with a fork"]["status"] == 0  # it was told to end, and not killed


def test_signals_to_all_processes_leave_the_aggregator_to_its_rank(reports):
    assert {report["told to end"] for report in reports} == {10 * WORLD}


# --- processes that are killed


@pytest.fixture
def ranks(jobs, tmp_path):
    """Starts the processes of the job."""
    return lambda *more: running_ranks(jobs, tmp_path, JOB, WORLD, *more)


@contextmanager
def dedicated(secret, port=0, host="127.0.0.1"):
    """An aggregator that runs already, and its address."""
    command = [sys.executable, "-m", MODULE, "--listen", f"{host}:{port}", "--secret-file", secret]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
    try:
        host, port = json.loads(process.stdout.readline())["address"]
        yield process, f"{host}:{port}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(os.urandom(16).hex().encode())
    path.chmod(0o600)
    return path


def until(condition):
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def has_gone(rank):
    return rank.report.with_suffix(".going").exists()


def children_of(running):
    ready = [rank.report.with_suffix(".ready") for rank in running]
    return [json.loads(path.read_text())["child"] for path in ready]


def told_by(running, killed=()):
    statuses = [rank.status() for rank in running]
    assert statuses == [-9 if number in killed else 0 for number in range(WORLD)]
    left = (rank for number, rank in enumerate(running) if number not in killed)
    return [json.loads(rank.report.read_text()) for rank in left]


def test_a_killed_rank_ends_the_others_at_once_and_leaves_no_process(ranks):
    with ranks("--do", "worker") as running:
        told = told_by(running, killed=[WORLD - 1])
    for each in told:
        assert each["kind"] == "AggregationError"
        assert each["text"] == "the process of rank 2 has ended"
    until(lambda: not any(map(is_running, children_of(running))))


@pytest.mark.extended
def test_a_killed_aggregator_of_a_rank_ends_all_ranks(ranks):
    with ranks("--do", "child") as running:
        told = told_by(running)
    for each in told:
        assert each["kind"] == "AggregationError"
        assert "the aggregator process of rank 2 on" in each["text"] or (
            "aggregator 2 has not answered" in each["text"]
        )
    until(lambda: not any(map(is_running, children_of(running))))


def test_a_killed_dedicated_aggregator_ends_all_ranks_within_the_bound(ranks, secret):
    with dedicated(secret) as (killed, first), dedicated(secret) as (_, second):
        given = ("--do", "sums until an error", "--dedicated", f"{first},{second}")
        with ranks(*given, "--secret", secret) as running:
            until(lambda: all(has_gone(rank) for rank in running))
            killed.send_signal(signal.SIGKILL)
            told = told_by(running)
    for each in told:
        assert each["kind"] == "AggregationError"
        assert "aggregator 0 has not answered rank" in each["text"]
        assert each["text"].endswith("for 3 seconds")


@pytest.mark.extended
def test_a_killed_rank_of_dedicated_aggregators_ends_the_others_within_the_bound(ranks, secret):
    with dedicated(secret) as (_, first), dedicated(secret) as (_, second):
        given = ("--do", "worker", "--dedicated", f"{first},{second}")
        with ranks(*given, "--secret", secret) as running:
            told = told_by(running, killed=[WORLD - 1])
    for each in told:
        assert each["text"] == "nothing was heard of rank 2 for 3 seconds"


@pytest.mark.extended
def test_an_aggregator_that_was_started_anew_ends_all_ranks(ranks, secret):
    with dedicated(secret) as (killed, first):
        given = ("--do", "sums until an error", "--dedicated", first)
        with ranks(*given, "--secret", secret) as running:
            until(lambda: all(has_gone(rank) for rank in running))
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            with dedicated(secret, first.rpartition(":")[2]):
                told = told_by(running)
    for each in told:
        assert each["text"] == "aggregator 0 has been started anew"


@pytest.mark.extended
def test_a_dedicated_aggregator_that_is_stopped_says_so(ranks, secret):
    with dedicated(secret) as (stopped, first):
        given = ("--do", "sums until an error", "--dedicated", first)
        with ranks(*given, "--secret", secret) as running:
            until(lambda: all(has_gone(rank) for rank in running))
            stopped.terminate()
            told = told_by(running)
            assert stopped.wait(20) == 0
    assert {each["text"] for each in told} == {"an aggregator was stopped"}


@pytest.mark.extended
def test_a_job_that_is_suspended_goes_on(ranks, tmp_path):
    with ranks("--do", "suspended") as running:
        until(lambda: all(has_gone(rank) for rank in running))
        everybody = [rank.pid for rank in running] + children_of(running)
        for each in everybody:
            os.kill(each, signal.SIGSTOP)
        time.sleep(8)  # longer than a silent one is waited for; and below, as long as one looks
        for each in everybody:
            os.kill(each, signal.SIGCONT)
        time.sleep(3)
        (tmp_path / f"store-{WORLD}.enough").touch()
        assert told_by(running) == [WORLD] * WORLD


def test_an_idle_aggregator_waits_for_datagrams_and_uses_no_cpu(secret):
    with dedicated(secret) as (process, _):
        stat = Path(f"/proc/{process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")
        until(lambda: _switches_in_a_second(process.pid) <= 1)


def _switches_in_a_second(process):
    before = _switches(process)
    time.sleep(1)  # nothing can be observed of a process that does nothing
    return _switches(process) - before


def _switches(process):
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def test_a_dedicated_aggregator_with_64_sessions_says_so(secret):
    with dedicated(secret) as (_, address), socket.socket(type=socket.SOCK_DGRAM) as at:
        at.settimeout(100)
        at.connect(sockets.parsed(address))
        for number in range(65):
            seal = Seal(read_secret(secret), number)
            at.send(seal.close(Header(Kind.OPEN, filled=1, round=100_000)))
            answer = seal.open(at.recv(1000))
            assert answer.header.kind == (Kind.WELCOME if number < 64 else Kind.FAILED)
    assert answer.text.startswith("aggregator 0 has 64 sessions, and takes no more: wait until")


def test_a_session_that_is_over_is_not_begun_again(secret):
    """Or 64 recorded ones would keep all others out."""
    with dedicated(secret) as (_, address), socket.socket(type=socket.SOCK_DGRAM) as at:
        at.settimeout(100)
        at.connect(sockets.parsed(address))
        seal = Seal(read_secret(secret), 7)

        def answer(header):
            at.send(seal.close(header))
            return seal.open(at.recv(1000))

        begin = Header(Kind.OPEN, filled=1, round=100_000)
        assert answer(begin).header.kind == Kind.WELCOME
        assert answer(Header(Kind.LEAVE)).header.kind == Kind.LEFT
        until(lambda: answer(begin).header.kind == Kind.FAILED)
        assert answer(begin).text == "aggregator 0 has ended that aggregation session"


def test_an_aggregator_without_a_secret_or_an_address_says_what_is_missing(tmp_path):
    command = [sys.executable, "-m", MODULE, "--listen", "127.0.0.1:0"]
    missing = subprocess.run([*command], capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert "--secret-file" in missing.stderr
    command += ["--secret-file", str(tmp_path / "none")]
    unreadable = subprocess.run([*command], capture_output=True, text=True, check=False)
    assert unreadable.returncode == 2
    assert json.loads(unreadable.stdout)["error"].endswith("/none: No such file or directory")


def test_an_aggregator_imports_no_torch():
    script = f"import sys, {MODULE}.__main__; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert found.stdout == b"False\n"


def test_a_rank_s_aggregator_imports_nothing_of_the_job_s_folder(tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("raise RuntimeError('a file of the job')")
    monkeypatch.chdir(tmp_path)
    aggregator = ColocatedAggregator("127.0.0.1", rank=0)
    aggregator.close()
    assert aggregator.address[1]
