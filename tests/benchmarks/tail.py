"""Measure the slowest answers of a core that is 60 % busy, beside nginx and a trivial event loop.

A server and the generator (`paced`) have a core each. Requests arrive at random times, whether or
not earlier ones are answered, on 512 connections. All targets get the same rate, which keeps
graphstash's core busy for 60 % of the time. A quarter of the reads ask for one hot artifact, the
others for 2,048 artifacts in random order.

The trivial loop answers every request with the same 4 KiB, after look-ups in a large dictionary
that take about as much CPU time as graphstash's answer. Its tail is that of the machine.

A processor may slow down to a fraction of its speed, and requests then queue. So the figures come
twice: for all answers, and for those while both cores had their usual speed (`speed`).

    PYTHONPATH=tests .venv/bin/python -m benchmarks.tail --rounds 3 --realtime 1

On a shared machine, `--realtime 1` (as root) gives server and generator real-time priority.
"""

import base64
import hashlib
import itertools
import os
import random
import secrets
import sys
from bisect import bisect
from contextlib import ExitStack
from math import inf
from operator import attrgetter
from typing import NamedTuple

from benchmarks.costs import threads_of
from benchmarks.figures import part, rotated
from benchmarks.paced import Answer, send_paced
from benchmarks.server import RANDOM, cpu_of, row, start
from benchmarks.speed import EVERY_SECONDS, slow_times, watch
from benchmarks.targets import Graphstash, Nginx, Peer, artifact_path

SHARE = 0.6
FIRST_RATE, RATE_SECONDS = 500, 3
CONNECTIONS = 512
HOT_EVERY = 4
BYTES = 4096
LONG = 20  # times the median
READS, PUTS = "reads beside 10 % PUTs", "PUTs beside 90 % reads"
MIX = {READS: 0.9, PUTS: 0.1}  # shares of the requests


class Loop(Peer):
    """One uvloop that answers every request after some look-ups."""

    name = "trivial loop"
    has_ranges = has_puts = False

    @classmethod
    def found(cls):
        return sys.executable

    def command(self, _directory):
        return [self.found(), "-c", LOOP, str(self.port), str(BYTES)], {}

    def publish(self, _name, _payload):
        """Store nothing."""

    def path(self, name):
        return f"/{name}"


LOOP = """
import asyncio, gc, itertools, random, sys
import uvloop

answer = b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % int(sys.argv[2])
answer += bytes(int(sys.argv[2]))
rows = {f"row-{number}": (number, [str(number)]) for number in range(20_000)}
names = itertools.cycle(random.sample(list(rows), len(rows)))
gc.collect()
gc.freeze()

class Connection(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        for _ in range(data.count(b"\\r\\n\\r\\n")):
            for name in itertools.islice(names, 100):
                rows[name][1][0].encode().decode().split("-")
            self.transport.write(answer)

async def main():
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", int(sys.argv[1]), backlog=4096)
    await server.serve_forever()

uvloop.run(main())
"""


def main():
    extra = [
        ("seconds", 10, "length of one measurement"),
        ("realtime", 0, "1 for real-time priority, which needs root"),
    ]
    with (
        part("tail", __doc__, rounds=3, extra=extra, has_server=False) as bench,
        ExitStack() as stack,
    ):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            bench.figures.note("not measured: it needs two cores")
            return
        os.sched_setaffinity(0, {cores[-1]})  # the servers inherit it
        kinds = [Graphstash, Loop] + ([] if Nginx.missing() else [Nginx])
        targets = [start(stack, kind, bench.directory, None) for kind in kinds]
        for target in targets:
            for number in range(RANDOM):
                target.publish(row(number), secrets.token_bytes(BYTES))
        ours = targets[0]
        on = Cores(cores[0], cores[-1], is_realtime=bool(bench.settings.realtime))
        for number in bench.rounds():
            if on.is_realtime:
                prefer(targets)
            rate = rate_at(SHARE, on, ours, {"reads": 1})
            for target in rotated(targets, number):
                bench.now(f"reads: {target.name}")
                measure(bench, on, target, {"reads": rate})
            rate = rate_at(SHARE, on, ours, MIX)
            bench.now("reads and PUTs")
            measure(bench, on, ours, {label: part * rate for label, part in MIX.items()})


class Cores(NamedTuple):
    generator: int
    server: int
    is_realtime: bool


def rate_at(share, on, target, mix):
    """Return the requests per second that keep a share of a core busy. Each load of the mix has a
    share of the requests. A higher rate costs less per request, so each step corrects the last.
    """
    rate = FIRST_RATE
    for _ in range(3):
        cpu = cpu_of(target)
        send(on, target, {label: part * rate for label, part in mix.items()}, RATE_SECONDS)
        rate *= share * RATE_SECONDS / (cpu_of(target) - cpu)
    return rate


def send(on, target, rates, seconds):
    """Send loads at the same time, each with its rate. Return the answers of each."""
    prefix = ["taskset", "--cpu-list", str(on.generator)]
    prefix += ["chrt", "--rr", "2"] if on.is_realtime else []
    loads = [
        (rate, (puts if label == PUTS else reads)(target, int(rate * seconds) + 1))
        for label, rate in rates.items()
    ]
    return send_paced(target.port, loads, connections=CONNECTIONS, seconds=seconds, prefix=prefix)


def measure(bench, on, target, rates):
    """Add the figures of loads that are sent at the same time."""
    seconds = bench.settings.seconds
    cpu = cpu_of(target)
    with watch((on.generator, on.server), is_realtime=on.is_realtime) as samples:
        loads = send(on, target, rates, seconds)
    busy = (cpu_of(target) - cpu) / seconds
    times = sorted(at for core in samples for at in slow_times(core))
    slow = answers_while_slow(times, sorted(itertools.chain(*loads)))
    for label, load in zip(rates, loads, strict=True):
        usual = [answer for answer in load if answer not in slow]
        longest = LONG * percentile(load, 0.5)
        long = [answer for answer in load if answer.seconds > longest]
        cells = {
            "rate": len(load) / seconds,
            "busy share of a core": busy,
            "share of answers while slow": 1 - len(usual) / len(load),
            f"longer than {LONG} p50": len(long),
            "of these while slow": len(slow.intersection(long)),
            "sent late, p99.9, ms": percentile(load, 0.999, lambda each: each.sent - each.due)
            * 1e3,
        }
        for column, value in (shown(load) | cells).items():
            bench.figures.add(label, target.name, column, value)
        for column, value in shown(usual).items():
            bench.figures.add(label, f"{target.name}, usual speed", column, value)


def shown(answers):
    shares = {"p50, ms": 0.5, "p99, ms": 0.99, "p99.9, ms": 0.999, "longest, ms": 1}
    cells = {name: percentile(answers, share) * 1e3 for name, share in shares.items()}
    return cells | {"p99.9 / p50": cells["p99.9, ms"] / cells["p50, ms"]}


def answers_while_slow(times, answers):
    """Return the answers of busy periods in which a core was slow. A busy period lasts while any
    request is in progress, so it includes the requests that queued because of a slow core.

    Args:
        times: when samples found a core slow, sorted.
        answers: all answers, sorted.
    """
    slow, period, end = set(), [], 0.0
    for answer in [*answers, Answer(inf, inf, inf)]:
        if answer.due > end:
            first = period[0].due - EVERY_SECONDS if period else inf
            if bisect(times, end + EVERY_SECONDS) > bisect(times, first):
                slow.update(period)
            period = []
        period.append(answer)
        end = max(end, answer.done)
    return slow


def percentile(answers, share, seconds=attrgetter("seconds")):
    times = sorted(map(seconds, answers))
    return times[min(int(share * len(times)), len(times) - 1)]


def reads(target, count):
    names = itertools.cycle(map(row, random.sample(range(RANDOM), RANDOM)))
    paths = (
        target.path(row(0) if number % HOT_EVERY == 0 else next(names)) for number in range(count)
    )
    return [f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode() for path in paths]


def puts(_target, count):
    return [put() for _ in range(count)]


def put():
    """Return a PUT of a new artifact."""
    body = secrets.token_bytes(BYTES)
    digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
    head = (
        f"PUT {artifact_path(secrets.token_hex(32))} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Repr-Digest: sha-256=:{digest}:\r\nContent-Length: {BYTES}\r\n\r\n"
    )
    return head.encode() + body


def prefer(targets):
    """Give the servers real-time priority, and their event loops a higher one."""
    for target in targets:
        for pid in target.pids:
            for thread, is_main in threads_of(pid):
                os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(2 if is_main else 1))


if __name__ == "__main__":
    main()
