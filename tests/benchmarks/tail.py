"""Measure the slowest answers of a core that is 60 % busy, beside nginx and a trivial event loop.

A server and the generator, wrk, have a core each. 512 connections pause for random times, so that
requests arrive whether or not earlier ones are answered; wrk corrects for the few that it could not
send in time. All targets get the same rate, which keeps graphstash's core busy for 60 % of the
time. A quarter of the reads ask for one hot artifact, the others for 2,048 artifacts in random
order.

The trivial loop answers every request with the same 4 KiB, after look-ups in a large dictionary
that take about as much CPU time as graphstash's answer. Its tail is that of the machine.

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from benchmarks.costs import threads_of
from benchmarks.figures import part, rotated
from benchmarks.load import run_wrk, wrk
from benchmarks.server import RANDOM, cpu_of, row, start
from benchmarks.targets import Graphstash, Nginx, Peer, artifact_path

SHARE = 0.6
SATURATING, PACED = 64, 512  # connections
HOT_EVERY = 4
BYTES = 4096
BEGINNING = b"x" * (BYTES - 32)  # of the body of a PUT
READS, PUTS = "reads beside 10 % PUTs", "PUTs beside 90 % reads"


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
        if wrk() is None or len(cores) < 2:
            bench.figures.note("not measured: it needs wrk (apt install wrk) and two cores")
            return
        prefix = ["taskset", "--cpu-list", str(cores[0])]
        prefix += ["chrt", "--rr", "2"] if bench.settings.realtime else []
        os.sched_setaffinity(0, {cores[-1]})  # the servers inherit it
        kinds = [Graphstash, Loop] + ([] if Nginx.missing() else [Nginx])
        targets = [start(stack, kind, bench.directory, None) for kind in kinds]
        for target in targets:
            for number in range(RANDOM):
                target.publish(row(number), secrets.token_bytes(BYTES))
        ours = targets[0]
        for number in bench.rounds():
            if bench.settings.realtime:
                prefer(targets)
            rate = rate_at(SHARE, ours, reads, prefix)
            for target in rotated(targets, number):
                bench.now(f"reads: {target.name}")
                measure(bench, target, {"reads": (rate, reads)}, prefix)
            rate = rate_at(SHARE, ours, mixed, prefix)
            bench.now("reads and PUTs")
            loads = {READS: (0.9 * rate, reads), PUTS: (0.1 * rate, puts)}
            measure(bench, ours, loads, prefix)


def rate_at(share, target, lines_of, prefix):
    """Return the requests per second that keep a share of a core busy.

    Requests that arrive one by one cost more than those of connections that never pause, so a paced
    load corrects the first estimate.
    """
    seconds, connections, pause = 3, SATURATING, {}
    rate = 20_000.0
    for _ in range(2):
        cpu = cpu_of(target)
        lines = lines_of(target, int(rate * seconds))
        load = send(target, lines, prefix, connections, seconds, **pause)
        rate = share * load.requests / (cpu_of(target) - cpu)
        connections, pause = PACED, {"PAUSE_MS": str(PACED / rate * 1e3)}
    return rate


def measure(bench, target, loads, prefix):
    """Send loads at the same time, each a rate and a function that returns its requests."""
    seconds, everything = bench.settings.seconds, sum(rate for rate, _ in loads.values())

    def paced(load):
        rate, lines_of = load
        connections = round(PACED * rate / everything)
        pause = {"PAUSE_MS": str(connections / rate * 1e3)}
        lines = lines_of(target, int(rate * (seconds + 1)))
        return send(target, lines, prefix, connections, seconds, **pause)

    cpu = cpu_of(target)
    with ThreadPoolExecutor() as threads:
        done = list(threads.map(paced, loads.values()))
    busy = (cpu_of(target) - cpu) / seconds
    for label, load in zip(loads, done, strict=True):
        times = [each / 1e3 for each in load.latency_us]
        cells = dict(zip(("p50, ms", "p99, ms", "p99.9, ms", "longest, ms"), times, strict=True))
        cells |= {"p99.9 / p50": times[2] / times[0], "answers per second": load.per_second}
        for column, value in (cells | {"busy share of a core": busy}).items():
            bench.figures.add(label, target.name, column, value)


def send(target, lines, prefix, connections, seconds, **settings):
    more = {"prefix": prefix, "connections": connections, "seconds": seconds}
    load, refused = run_wrk(target.port, lines, PUT_BYTES=str(len(BEGINNING)), **more, **settings)
    assert not refused, (target.name, refused)
    return load


def reads(target, count):
    """Return lines for `wrk.lua`."""
    names = itertools.cycle(map(row, random.sample(range(RANDOM), RANDOM)))
    return [
        target.path(row(0) if number % HOT_EVERY == 0 else next(names)) for number in range(count)
    ]


def puts(_target, count):
    return [put_line() for _ in range(count)]


def mixed(target, count):
    lines = reads(target, count)
    lines[::10] = puts(target, len(lines[::10]))
    return lines


def put_line():
    """Return a line for a PUT of a new artifact."""
    rest = secrets.token_hex(16)
    digest = hashlib.sha256(BEGINNING + rest.encode()).digest()
    return f"{artifact_path(secrets.token_hex(32))} {base64.b64encode(digest).decode()} {rest}"


def prefer(targets):
    """Give the servers real-time priority, and their event loops a higher one."""
    for target in targets:
        for pid in target.pids:
            for thread, is_main in threads_of(pid):
                os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(2 if is_main else 1))


if __name__ == "__main__":
    main()
