"""Rounds of random faults under mixed load: what a shared deployment promises, it keeps.

The report counts each fault that struck: every process that was killed, frozen or restarted, and
every single request that S3 or the network damaged.

CHAOS_SEED=<text>     plays the faults of a run again; how the load meets them is chance
CHAOS_ROUNDS=<number> more rounds than the default, or fewer
CHAOS_SECONDS=<time>  longer rounds, in which more requests meet faults
CHAOS_S3=<S3>         moto (the default), swift, or one that runs on this host, such as a Ceph:
                      http://ACCESS_KEY:SECRET_KEY@127.0.0.1:PORT
"""

import os
import random
import secrets
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from chaos.audit import find_discrepancies, read_everything
from chaos.cluster import Cluster
from chaos.load import Load
from chaos.proxy import FAULTS
from support.s3_proxy import S3Fault

_ROUNDS = 6
"""Of one run. CHAOS_ROUNDS makes more."""

_THREADS = 16
_ROUND_SECONDS = float(os.environ.get("CHAOS_SECONDS") or 0.4)
_NEW_KEYS = 4


class Chaos:
    """Chooses the faults of every round from a seed alone."""

    def __init__(self, cluster: Cluster, load: Load, seed: str) -> None:
        self._cluster = cluster
        self._load = load
        self._pick = random.Random(seed)
        self._collecting = []
        self.struck: Counter[str] = Counter()
        self._faults = {
            self._nothing: 8,
            self._kill_worker: 40,
            self._kill_server: 6,
            self._stop_server: 4,
            self._restart_postgres: 10,
            self._freeze_postgres: 8,
            self._freeze_server: 6,
            self._cut_sessions: 10,
            self._roll: 6,
            self._collect: 8,
        }

    def round(self):
        fault = self._pick.choices(list(self._faults), list(self._faults.values()))[0]
        is_s3_failing = self._cluster.proxy is not None and self._pick.random() < 0.5
        before, after = (self._pick.random() * _ROUND_SECONDS / 2 for _ in range(2))
        if is_s3_failing:
            kind = self._pick.choice(FAULTS)
            method = self._pick.choice((None, None, "PUT", "DELETE", "GET", "HEAD"))
            if kind is S3Fault.HOLD:
                method = "DELETE"  # whose end no caller awaits
            self._cluster.proxy.begin(
                kind, strikes=lambda seen: method is None or seen.method == method
            )
        time.sleep(before)
        if fault() is not False:
            self.struck[fault.__name__.strip("_").replace("_", " ")] += 1
        time.sleep(after)
        if is_s3_failing:
            self._cluster.proxy.end()
        self._load.newest += _NEW_KEYS  # the load adds one for each upload that it saw succeed

    def end(self):
        """Waits for what still runs."""
        self._cluster.wait_for_starts()
        for command in self._collecting:
            code, _ = command.wait()
            self.struck["kill gc"] += code == -signal.SIGKILL

    def _number(self):
        return self._pick.randrange(2)

    def _nothing(self):
        """The load alone."""
        return False

    def _kill_worker(self):
        number, which = self._number(), self._pick.random()
        return self._cluster.kill_worker(number, lambda workers: workers[int(which * len(workers))])

    def _kill_server(self):
        self._restart(is_killed=True)

    def _stop_server(self):
        self._restart(is_killed=False)

    def _restart(self, *, is_killed):
        if self._cluster.proxy is not None:
            self._cluster.proxy.end()  # else the last server might never start
        self._cluster.restart(self._number(), is_killed=is_killed)

    def _restart_postgres(self):
        pause = self._pick.random() * 0.5
        self._cluster.postgres.kill()
        time.sleep(pause)
        self._cluster.postgres.start()

    def _freeze_postgres(self):
        pause = self._pick.random()
        with self._cluster.frozen_postgres():
            time.sleep(pause)

    def _freeze_server(self):
        """Sometimes for longer than PostgreSQL waits for it."""
        pause, number = self._pick.random() * 4, self._number()
        with self._cluster.frozen_server(number):
            time.sleep(pause)

    def _cut_sessions(self):
        self._cluster.cut_sessions()

    def _roll(self):
        self._cluster.hang_up(self._number())

    def _collect(self):
        is_killed, after = self._pick.random() < 0.6, 0.8 + self._pick.random() * 1.5
        if self._collecting and not self._collecting[-1].is_over:
            return False  # one at a time is enough for a small machine
        command = self._cluster.command("gc", "--orphans-older-than", "1m")
        self._collecting.append(command)
        if is_killed:
            command.kill_after(after)
        return False  # `end` counts it


@pytest.fixture
def rounds() -> int:
    return int(os.environ.get("CHAOS_ROUNDS") or _ROUNDS)


@pytest.mark.timeout(3600)
@pytest.mark.extended
@pytest.mark.parametrize("store", ["s3", "disk"])
def test_nothing_acknowledged_is_lost_and_nothing_is_left_over(
    tmp_path: Path, store: str, rounds: int
) -> None:
    seed = os.environ.get("CHAOS_SEED") or secrets.token_hex(4)
    s3 = (os.environ.get("CHAOS_S3") or "moto") if store == "s3" else None
    print(f"CHAOS_SEED={seed} CHAOS_ROUNDS={rounds}")
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(tmp_path, s3=s3))
        load = Load(
            cluster.url, seed=seed, threads=_THREADS, flipped_since=cluster.has_flipped_since
        )
        chaos = Chaos(cluster, load, seed)
        stack.callback(_report, cluster, load, chaos)
        load.start()
        for _ in range(rounds):
            chaos.round()
            load.check()
        load.stop()
        load.check()
        chaos.end()
        if cluster.proxy is not None:
            cluster.proxy.deliver()
        _check_the_end(cluster, load)


def _check_the_end(cluster, load):
    cluster.stop()
    cluster.start_again()
    cluster.wait_until_ready()

    known = load.permanent.known
    assert read_everything(cluster, known) == []
    cluster.leave_orphan(b"whatever chance has left, this one is there")
    code, said = cluster.command("gc", "--orphans-older-than", "0s").wait()
    assert code == 0, said
    print(f"gc: {said}")
    code, said = cluster.command("fsck", "--deep", "--orphans-older-than", "0s").wait()
    assert (code, said.strip()) == (0, "0 problems found")
    cluster.stop()
    assert find_discrepancies(cluster) == []


def _report(cluster, load, chaos):
    """Print what happened, for readers of a failure."""
    struck = chaos.struck + load.struck
    if cluster.proxy is not None:
        struck += Counter({f"S3: {what}": count for what, count in cluster.proxy.struck.items()})
    for what, count in sorted((struck + load.counts).items()):
        print(f"{count:8d} {what}")
    print(f"{struck.total():8d} faults; {load.operations} operations")
    print(f"{len(load.permanent.known):8d} acknowledged artifacts that may never go")
    print(f"{load.grants.count:8d} grants; most bytes of the limited namespace:", end=" ")
    print(load.budgeted.largest_bytes)
    print(cluster.log[-20_000:])
    if kept := os.environ.get("CHAOS_LOG"):
        Path(kept).write_text(cluster.log)
