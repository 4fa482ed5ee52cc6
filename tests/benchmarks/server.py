"""Compare the server with its peers and the release before: the same bytes in the same minutes.

The figure with the least noise is CPU time per request, of a server's whole process tree. Targets
take turns in every round, so that other load affects all of them. Everything served is in the page
cache, because the benchmark compares servers and not disks. PUTs do write to the disk. The column
`disk alone` shows the durable writes of 16 threads without a server.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.server --rounds 5 --seconds 2

With `--postgresql 1`, both releases run on a PostgreSQL of their own, whose CPU time is not
counted.
"""

import asyncio
import hashlib
import json
import os
import random
import secrets
import statistics
import time
from contextlib import ExitStack
from functools import partial

from benchmarks.costs import cpu_seconds, peak_bytes
from benchmarks.figures import part, rotated
from benchmarks.load import many, wrk
from benchmarks.targets import (
    NAMESPACE,
    PEERS,
    Graphstash,
    Redis,
    ReleaseBefore,
    artifact_path,
    base_of,
    fetch_sha256,
    unique_body,
)
from support.postgres import Postgres

KIB, MIB = 1024, 1024**2
LOADS = (1, 16)
"""Connections of a small read. With one, a server also pays for its sleep before each request."""
LARGE = (("GET 1 MiB", "1MiB", MIB, LOADS), ("GET 64 MiB", "64MiB", 64 * MIB, (1, 64)))
HOT = "4KiB"
RANDOM = 2048  # artifacts in random order: twice the rows that a server keeps in memory
RANGE = "Range: bytes=1024-2047\r\n"
PROXY = (
    "X-Forwarded-For: 192.0.2.1\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Port: 443\r\n"
    "X-Real-IP: 192.0.2.1\r\nVia: 1.1 proxy\r\nCookie: affinity=1\r\nX-Request-Id: %d\r\n"
)
"""Headers that a load balancer adds. The ID differs in each request."""
WRITERS = (1, 16)
PUTS = (("4 KiB", 4 * KIB), ("1 MiB", MIB))
WAITERS = (1, 16, 256)
LOOKUP_KEYS = 1000
CPU = "CPU time per request, ms"
RATE = "answers per second"
TIMES = "times and memory"


def main():
    extra = [
        ("seconds", 2, "length of one measurement"),
        ("postgresql", 0, "1 for both releases on PostgreSQL, without peers"),
        ("puts", 0, "1 for PUTs alone, of both releases, without peers"),
    ]
    with part("server", __doc__, rounds=3, extra=extra, has_server=False) as bench:
        settings, figures = bench.settings, bench.figures
        tool = "wrk, 1 thread" if wrk() else "threads of Python"
        figures.note(f"GETs were made by {tool}.")
        figures.note(
            "HEAD, lookup, PUT and all of Redis were asked by threads of Python: at most 10,000 a "
            "second."
        )
        figures.note(
            "redis and varnish answer from memory; turborepo's PUTs do not wait for the disk."
        )
        kinds = [Graphstash, ReleaseBefore]
        for peer in () if settings.postgresql or settings.puts else PEERS:
            if how := peer.missing():
                figures.note(f"{peer.name} is not installed: {how}")
            else:
                kinds.append(peer)
        with ExitStack() as stack:
            postgres = stack.enter_context(Postgres()) if settings.postgresql else None
            targets = [start(stack, kind, bench.directory, postgres) for kind in kinds]
            if not settings.puts:
                publish(targets)
            measure_one_round = measure_puts if settings.puts else measure
            for number in bench.rounds():
                for target in rotated(targets, number):
                    bench.now(target.name)
                    measure_one_round(figures, target, settings.seconds)
                measure_disk(figures, bench.directory / "alone", settings.seconds)
                os.sync()  # otherwise writing these back would slow the next round's first target


def start(stack, kind, directory, postgres):
    databases = [postgres.new_database()] if postgres else []
    target = kind(directory / kind.name.replace(" ", "-"), *databases)
    stack.callback(target.close)
    return target


def publish(targets):
    """Publish the same files on every target, and require that it serves exactly these."""
    large = {name: secrets.token_bytes(size) for _, name, size, _ in LARGE}
    small = {name: secrets.token_bytes(4 * KIB) for name in (HOT, *map(row, range(RANDOM)))}
    for target in targets:
        for name, payload in large.items():
            target.publish(name, payload)
            if not isinstance(target, Redis):
                digest = hashlib.sha256(payload).hexdigest()
                assert fetch_sha256(target, name) == digest, target.name
        for name, payload in small.items():
            target.publish(name, payload)


def row(number):
    return f"row-{number}"


def measure(figures, target, seconds):
    count = partial(measure_one, figures, target, seconds=seconds)
    names = [row(number) for number in random.sample(range(RANDOM), RANDOM)]
    for connections in LOADS:
        at_once = f"{connections} at once"
        for which, wanted in (("hot", [HOT]), ("random", names)):
            more = {"names": wanted, "connections": connections}
            count(f"GET 4 KiB, {which}, {at_once}", target.get, **more)
            count(f"HEAD, {which}, {at_once}", target.head, **more)
            if target.has_ranges:
                label = f"GET 1 KiB of 4 KiB, {which}, {at_once}"
                count(label, target.get, more=RANGE, status=206, **more)
        count(f"miss, {at_once}", target.miss, connections=connections)
    if not isinstance(target, Redis):
        more = {"names": [HOT], "connections": 16}
        count("GET 4 KiB, headers of a proxy, 16 at once", target.get, more=PROXY, **more)
    for label, name, size, loads in LARGE:
        for connections in loads:
            more = {"connections": connections, "answer_bytes": size if size > MIB else None}
            count(f"{label}, {connections} at once", target.get, names=[name], **more)
    memory = sum(map(peak_bytes, target.pids)) / MIB
    figures.add(TIMES, "memory after reading, MiB", target.name, memory)
    if target.has_puts:
        measure_puts(figures, target, seconds)
    if isinstance(target, Graphstash):
        count("lookup of 1,000 keys", looking_up, target=target)
        for waiters in WAITERS:
            measure_waiters(figures, target, waiters)


def measure_one(figures, target, label, work, /, *, seconds, answer_bytes=None, **more):
    """Measure the costs of one kind of request, and the rate of answers."""
    cpu = cpu_of(target)
    load = work(seconds=seconds, **more)
    cpu = cpu_of(target) - cpu
    # A large answer that is incomplete at the end counts with its received share.
    answers = load.received_bytes / answer_bytes if answer_bytes else load.requests
    figures.add(CPU, label, target.name, cpu / answers * 1e3)
    figures.add(RATE, label, target.name, answers / load.seconds)


def cpu_of(target):
    return sum(map(cpu_seconds, target.pids))


def measure_puts(figures, target, seconds):
    """Measure uploads of unique bodies, from one writer and from many."""
    for name, size in PUTS:
        for writers in WRITERS:
            label = f"PUT {name}, {writers} at once"
            more = {"target": target, "base": base_of(size), "writers": writers}
            measure_one(figures, target, label, putting, seconds=seconds, **more)


def putting(*, target, base, writers, seconds):
    def work(connection):
        return target.put(connection, *unique_body(base))

    return many(target.port, writers, seconds, work, kind=target.connection)


def looking_up(*, target, seconds):
    """Look up a thousand artifacts that all exist."""
    keys = [target.key(row(number)) for number in range(LOOKUP_KEYS)]
    body = json.dumps({"keys": keys}).encode()
    headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"

    def work(connection):
        status, _, size = connection.request(
            "POST", f"/v1/{NAMESPACE}/artifacts:lookup", headers, body
        )
        assert status == 200, status
        return size

    return many(target.port, 1, seconds, work)


def measure_waiters(figures, target, waiters):
    """Measure the delay of every waiter of a lease after the commit, and the costs."""
    cpu = cpu_of(target)
    delays = asyncio.run(herd(target, waiters))
    cpu = cpu_of(target) - cpu
    label = f"lease, {waiters} waiting"
    figures.add(CPU, f"{label}: wait and GET, each", target.name, cpu / waiters * 1e3)
    figures.add(
        TIMES, f"{label}: commit to artifact, median s", target.name, statistics.median(delays)
    )
    figures.add(TIMES, f"{label}: commit to artifact, last s", target.name, max(delays))


async def herd(target, waiters):
    """Store 64 KiB as one holder; return the seconds from its 201 to each waiter's download."""
    fingerprint = secrets.token_hex(32)
    lease = artifact_path(fingerprint).replace("/artifacts/", "/leases/")
    payload = secrets.token_bytes(64 * KIB)
    holder = await Caller.connect(target.port)
    granted = json.loads(await holder.call("POST", lease, body=b"{}", status=201))
    callers = [await Caller.connect(target.port) for _ in range(waiters)]
    done = []

    async def wait(caller):
        await caller.call("POST", lease, "Prefer: wait=30\r\n", b"{}", status=200)
        got = await caller.call("GET", artifact_path(fingerprint), status=200)
        done.append(time.perf_counter())
        assert got == payload

    waiting = [asyncio.create_task(wait(caller)) for caller in callers]
    await asyncio.sleep(1 + waiters / 200)  # all waiters have asked, and the server is idle again
    assert granted["token"]
    assert not done
    connection = target.connection(target.port)
    digest = hashlib.sha256(payload)
    await asyncio.to_thread(target.put_under, connection, fingerprint, (payload,), digest)
    committed = time.perf_counter()
    await asyncio.gather(*waiting)
    for caller in (holder, *callers):
        caller.close()
    connection.close()
    return [at - committed for at in done]


class Caller:
    """One connection of a waiter: a request, then its whole answer."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, port):
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def call(self, method, path, headers="", body=b"", *, status):
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._writer.write(f"{head}\r\n".encode() + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        assert int(lines[0].split()[1]) == status, lines[0]
        fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return await self._reader.readexactly(int(fields["content-length"]))

    def close(self):
        self._writer.close()


def measure_disk(figures, directory, seconds):
    """Measure the writes of a disk store without anything around them."""
    directory.mkdir(exist_ok=True)

    def write(base, _connection):
        parts, digest = unique_body(base)
        partial = directory / f"{digest.hexdigest()}.part"
        with partial.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(partial.with_suffix(""))
        folder = os.open(directory, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        return 0

    for name, size in PUTS:
        for writers in WRITERS:
            load = many(0, writers, seconds, partial(write, base_of(size)))
            figures.add(RATE, f"PUT {name}, {writers} at once", "disk alone", load.per_second)
    for path in directory.iterdir():
        path.unlink()


if __name__ == "__main__":
    main()
