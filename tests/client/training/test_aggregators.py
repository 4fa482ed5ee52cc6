"""Sums through aggregators between real processes, over UDP on this host."""

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
from graphstash.training.reduce.aggregators.server import read_secret
from support.processes import is_running
from support.tiers import most_extended
from support.waiting import until
from support.warm_ranks import WarmRanks

MODULE = "graphstash.training.reduce.aggregators"
WORLD = 3


@pytest.fixture
def run(ranks):
    """Return a function that runs a case in three processes."""
    return lambda case, **keywords: ranks(WORLD).run(f"aggregates:{case}", **keywords)


SMALL = {"payload_bytes": 1_452, "slots": 3}
WAYS = ["float32", "quantized", "whole", "bf16 on the wire"]


@pytest.mark.parametrize("settings", most_extended([{}, SMALL], quick=[SMALL]), ids=str)
def test_sums_equal_dense_all_reduce_and_bytes_equal_formula(run, settings):
    run("sums", count=10, **settings)


@pytest.mark.extended
def test_sums_over_ipv6_equal_dense_all_reduce(run):
    run("sums_on_ipv6", count=6)


def test_lost_duplicated_and_late_datagrams_change_no_bit(run):
    assert sum(run("lossy", count=10)) > 10


def test_datagrams_of_strangers_change_no_bit(run):
    run("hostile", count=4)


@pytest.mark.parametrize("name", most_extended(WAYS, quick=["quantized", "whole"]))
def test_ddp_trains_the_same_through_aggregators(run, name):
    run("trains_the_same", name=name)


@pytest.mark.parametrize("case", ["whole", "with_a_fork", "told_to_end"])
def test_whole_tensors_forks_and_signals_do_not_disturb_a_sum(run, case):
    run(case)


MISTAKES = {
    "after it": "these sums have ended: the ranks want",
    "address": "192.0.2.1:0 cannot be listened on",
    "payload": "payload_bytes=70: take more than 72",
    "no secret": "dedicated aggregators need secret_file=",
    "port": "listen='127.0.0.1:7171' is not an address of this host",
    "any address": "listen='0.0.0.0' is not an address of this host",
    "one text": "give a list, ['a:1']",
    "secret alone": "secret_file='mine' is for aggregators that run",
    "for ever": "lost_after_seconds=inf: take 0.001 to",
    "no time": "timeout_seconds=0: take more than 0",
    "long name": "a:1 cannot be reached",
    "two dimensions": "a tensor of shape (2, 128): give one dimension",
    "two dimensions whole": "a tensor of shape (2, 128): give one dimension",
    "named twice": "name each of them once",
    "absent aggregator": "aggregator 0 at 127.0.0.1:9 has not answered rank 0",
    "too large": "a datagram of 1452 has 1380 for a block",
    "too many": "a tensor has 4294967294 blocks at most",
    "complex": "this is torch.complex64",
    "imaginary": "complex64 cannot be sent as wire_dtype=torch.float32",
    "closed": "these sums have ended: closed",
}


def test_mistakes_are_reported_on_every_rank(run, tmp_path):
    reports = run("mistakes", directory=tmp_path)
    for messages in reports:
        for name, text in MISTAKES.items():
            assert text in messages[name], name
        kinds = {name: text.partition(":")[0] for name, text in messages.items()}
        configured = {"sizes", "blocks", "address", "no secret", "port", "any address", "long name"}
        assert {kinds[name] for name in configured} == {"ConfigError"}, kinds
        assert kinds["absent aggregator"] == kinds["after it"] == "AggregationError"
        numbers = [n for n in (10, 11, 12) if f"tensor 0 of {n} float32" in messages["sizes"]]
        assert len(numbers) == 2
        assert messages["types"].startswith("ConfigError: ")
        assert "of 10 float64 in" in messages["types"]
        assert "of 10 float32 in" in messages["types"]
        assert "rank 0: Settings(block_size=8" in messages["blocks"]
        assert "rank 2: Settings(block_size=10" in messages["blocks"]
    assert "over the ranks [0], and this state over [0, 1, 2]" in reports[0]["other ranks"]


def test_failure_on_one_rank_is_reported_on_all(run):
    texts = {
        "speaks first": "rank 2: the aggregator process did not start: its first line is b'-P -m",
        "no thread": "rank 2 has given up: RuntimeError can't start new thread",
        "own error": "rank 2 has given up: ValueError of mine",
    }
    *others, last = run("on_one_rank")
    for name, text in texts.items():
        assert all(text in messages[name] for messages in others), name
        assert last[name] == "ValueError: of mine" or text in last[name]


# --- killed processes


@pytest.fixture
def broken(jobs, tmp_path):
    """Return a context manager that starts sums in new processes, for a test that kills one."""

    @contextmanager
    def broken(case="broken", **keywords):
        with WarmRanks(jobs, tmp_path, WORLD) as ranks:
            ranks.begin(f"aggregates:{case}", directory=tmp_path, **keywords)
            yield ranks

    return broken


@contextmanager
def dedicated(secret, port=0):
    """Start an aggregator, and yield its process and address."""
    options = ("--listen", f"127.0.0.1:{port}", "--secret-file", secret)
    command = [sys.executable, "-m", MODULE, *options]
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


def are_going(directory):
    """Return whether all ranks have made 20 sums. If a rank had ended before, this would hang."""
    return len(list(directory.glob("going-*"))) == WORLD


def children(directory):
    return [json.loads(path.read_text()) for path in directory.glob("child-*")]


@pytest.mark.parametrize(
    ("kills", "killed", "texts"),
    [
        ("rank", [WORLD - 1], ["the process of rank 2 has ended"]),
        pytest.param(
            "child",
            [],
            ["the aggregator process of rank 2 on", "aggregator 2 has not answered"],
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_killed_process_ends_all_ranks_at_once_and_leaves_no_process(
    broken, tmp_path, kills, killed, texts
):
    with broken(kills=kills) as ranks:
        for message in ranks.answers(killed=killed):
            assert message.startswith("AggregationError: ")
            assert any(text in message for text in texts), message
    until(lambda: not any(map(is_running, children(tmp_path))))


@pytest.mark.extended
def test_a_killed_dedicated_aggregator_ends_all_ranks_within_the_bound(broken, secret, tmp_path):
    with dedicated(secret) as (killed, first), dedicated(secret) as (_, second):
        given = {"aggregators": [first, second], "secret_file": secret}
        with broken(kills="", **given) as ranks:
            until(lambda: are_going(tmp_path))
            killed.send_signal(signal.SIGKILL)
            for message in ranks.answers():
                assert message.startswith("AggregationError: aggregator 0 has not answered rank")
                assert message.endswith("for 3 seconds")


@pytest.mark.extended
def test_a_killed_rank_of_dedicated_aggregators_ends_the_others_within_the_bound(broken, secret):
    with (
        dedicated(secret) as (_, first),
        dedicated(secret) as (_, second),
        broken(kills="rank", aggregators=[first, second], secret_file=secret) as ranks,
    ):
        for message in ranks.answers(killed=[WORLD - 1]):
            assert message == "AggregationError: nothing was heard of rank 2 for 3 seconds"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("anew", "text"),
    [(True, "aggregator 0 was restarted"), (False, "an aggregator was stopped")],
    ids=["restarted", "stopped"],
)
def test_dedicated_aggregator_that_exits_ends_all_ranks_with_cause(
    broken, secret, tmp_path, anew, text
):
    with (
        dedicated(secret) as (process, first),
        broken(kills="", aggregators=[first], secret_file=secret) as ranks,
    ):
        until(lambda: are_going(tmp_path))
        if anew:
            process.kill()
            process.wait()
            with dedicated(secret, first.rpartition(":")[2]):
                messages = ranks.answers()
        else:
            process.terminate()
            messages = ranks.answers()
            assert process.wait(20) == 0
    assert set(messages) == {f"AggregationError: {text}"}


@pytest.mark.extended
def test_suspended_job_continues(broken, tmp_path):
    with broken("suspended") as ranks:
        until(lambda: are_going(tmp_path))
        everybody = ranks.pids + children(tmp_path)
        for each in everybody:
            os.kill(each, signal.SIGSTOP)
        # Longer than the timeout of a silent rank; the sleep below gives ranks time to detect one.
        time.sleep(8)
        for each in everybody:
            os.kill(each, signal.SIGCONT)
        time.sleep(3)
        (tmp_path / "enough").touch()
        ranks.answers()


def test_an_idle_aggregator_waits_for_datagrams_and_uses_no_cpu(secret):
    with dedicated(secret) as (process, _):
        stat = Path(f"/proc/{process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")
        until(lambda: _switches_in_a_second(process.pid) <= 1)


def _switches_in_a_second(process):
    before = _switches(process)
    time.sleep(1)  # an idle process causes no event to wait for
    return _switches(process) - before


def _switches(process):
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def test_dedicated_aggregator_refuses_more_than_64_sessions(secret):
    with dedicated(secret) as (_, address), socket.socket(type=socket.SOCK_DGRAM) as at:
        at.settimeout(100)
        at.connect(sockets.parsed(address))
        for number in range(65):
            seal = Seal(read_secret(secret), number)
            at.send(seal.close(Header(Kind.OPEN, filled=1, round=100_000)))
            answer = seal.open(at.recv(1000))
            assert answer.header.kind == (Kind.WELCOME if number < 64 else Kind.FAILED)
    assert answer.text.startswith("aggregator 0 has 64 sessions, and takes no more: wait until")


def test_finished_session_is_not_restarted(secret):
    """Otherwise 64 recorded sessions would block new ones."""
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


def test_aggregator_names_secret_that_cannot_be_read(tmp_path):
    command = [sys.executable, "-m", MODULE, "--listen", "127.0.0.1:0"]
    command += ["--secret-file", str(tmp_path / "none")]
    unreadable = subprocess.run([*command], capture_output=True, text=True, check=False)
    assert unreadable.returncode == 2
    assert json.loads(unreadable.stdout)["error"].endswith("/none: No such file or directory")


def test_colocated_aggregator_imports_nothing_from_folder_of_the_job(tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("raise RuntimeError('a file of the job')")
    monkeypatch.chdir(tmp_path)
    aggregator = ColocatedAggregator("127.0.0.1", rank=0)
    aggregator.close()
    assert aggregator.address[1]
