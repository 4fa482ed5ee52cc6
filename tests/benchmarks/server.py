"""The server beside its peers: GET, HEAD, lookup and durable PUT, the same bytes, the same minutes.

Targets take turns within every round, so that a busy neighbour hits all of them. Everything served
is in the page cache: what is compared is the servers, not the disk. PUTs do go to the disk; the
column `disk alone` is what 16 threads can write durably there without any server.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.server --rounds 5 --seconds 2
"""

import hashlib
import json
import os
import secrets
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.figures import Figures, options, progress
from benchmarks.load import get, many, wrk
from benchmarks.targets import (
    PEERS,
    Graphstash,
    Registry,
    base_of,
    cpu_seconds,
    fetch_sha256,
    unique_body,
)

KIB, MIB = 1024, 1024**2
GETS = (("4 KiB", 4 * KIB, 16), ("1 MiB", MIB, 16), ("64 MiB", 64 * MIB, 4))
WRITERS = 16
LOOKUP_KEYS = 1000
READ, CPU, WRITE = "GET and HEAD", "server's CPU time", "PUT and lookup"


def main():
    settings = options(
        "server",
        __doc__.splitlines()[0],
        rounds=5,
        extra=[("seconds", 2, "length of one measurement")],
    )
    figures = Figures("server", {"rounds": settings.rounds, "seconds": settings.seconds})
    figures.note(f"GETs were made by {'wrk, 1 thread' if wrk() else 'threads of Python'}.")
    figures.note("HEAD, lookup and PUT were made by threads of Python, 20,000 requests/s at most.")
    figures.note("MB/s of GET counts headers too; everything served was in the page cache.")
    Path("build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="build") as name, ExitStack() as stack:
        directory = Path(name)
        targets = [start(stack, Graphstash, directory)]
        targets += [start(stack, peer, directory) for peer in PEERS if peer.installed()]
        publish(targets)
        keys = lookup_body(targets[0])
        with progress() as bar:
            task = bar.add_task("server", total=settings.rounds * (len(GETS) + 3))
            for _ in range(settings.rounds):
                for label, _, connections in GETS:
                    bar.update(task, description=f"GET {label}", advance=1)
                    for target in targets:
                        measure_get(figures, target, label, connections, settings.seconds)
                bar.update(task, description="HEAD", advance=1)
                for target in targets:
                    measure_head(figures, target, settings.seconds)
                bar.update(task, description="lookup", advance=1)
                measure_lookup(figures, targets[0], keys, settings.seconds)
                bar.update(task, description="PUT", advance=1)
                for target in targets:
                    measure_put(figures, target, settings.seconds)
                measure_disk(figures, directory / "alone", settings.seconds)
                os.sync()  # or the writing back of these would slow the next round's first target
    for peer in PEERS:
        if not peer.installed():
            figures.say(READ, "GET 4 KiB, hits/s", peer.name, "not installed")
            figures.note(f"{peer.name} is not installed (Debian: apt install {peer.package}).")
    figures.write(settings.output)


def start(stack, kind, directory):
    target = kind(directory / kind.name)
    stack.callback(target.close)
    return target


def publish(targets):
    """Gives every target the same files and makes sure that it serves exactly them."""
    for label, size, _ in GETS:
        payload = secrets.token_bytes(size)
        digest = hashlib.sha256(payload).hexdigest()
        for target in targets:
            target.publish(label.replace(" ", ""), payload)
            assert fetch_sha256(target, label.replace(" ", "")) == digest, target.name


def measure_get(figures, target, label, connections, seconds):
    cpu = cpu_seconds(target.pid)
    load = get(
        target.port, target.path(label.replace(" ", "")), connections=connections, seconds=seconds
    )
    cpu = cpu_seconds(target.pid) - cpu
    figures.add(READ, f"GET {label}, hits/s", target.name, load.per_second)
    figures.add(READ, f"GET {label}, MB/s", target.name, load.megabytes_per_second)
    figures.add(READ, f"GET {label}, p99 ms", target.name, load.p99_ms)
    if label == "4 KiB":
        figures.add(CPU, f"GET {label}, ms each", target.name, cpu / load.requests * 1e3)
    else:
        gigabytes = load.received_bytes / 1e9
        figures.add(CPU, f"GET {label}, s per GB", target.name, cpu / gigabytes)


def measure_head(figures, target, seconds):
    path = target.path("4KiB")
    cpu = cpu_seconds(target.pid)
    load = many(target.port, 16, seconds, lambda c: c.request("HEAD", path))
    cpu = cpu_seconds(target.pid) - cpu
    figures.add(CPU, "HEAD, ms each", target.name, cpu / load.requests * 1e3)
    figures.add(READ, "HEAD, answers/s", target.name, load.per_second)


def lookup_body(target):
    """Publishes a thousand small artifacts and spells the question for all of them."""
    for number in range(LOOKUP_KEYS):
        target.publish(f"lookup-{number}", secrets.token_bytes(64))
    keys = [target.key(f"lookup-{number}") for number in range(LOOKUP_KEYS)]
    return json.dumps({"keys": keys}).encode()


def measure_lookup(figures, target, body, seconds):
    headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    path = "/v1/bench/artifacts:lookup"
    load = many(target.port, 1, 2 * seconds, lambda c: c.request("POST", path, headers, body))
    figures.add(WRITE, "lookup of 1,000 keys, median ms", target.name, load.p50_ms)
    figures.add(WRITE, "lookup of 1,000 keys, p99 ms", target.name, load.p99_ms)


def measure_put(figures, target, seconds):
    """Durable PUTs; nginx's own WebDAV is no peer here, it does not wait for the disk."""
    if not isinstance(target, Graphstash | Registry):
        figures.say(WRITE, "PUT 1 MiB, durable/s", target.name, "not durable")
        return
    base = base_of(MIB)
    load = many(target.port, WRITERS, seconds, lambda c: target.put(c, *unique_body(base)))
    figures.add(WRITE, "PUT 1 MiB, durable/s", target.name, load.per_second)
    figures.add(WRITE, "PUT 1 MiB, p99 ms", target.name, load.p99_ms)


def measure_disk(figures, directory, seconds):
    """The same writes as a disk store must make, with nothing around them."""
    directory.mkdir(exist_ok=True)
    base = base_of(MIB)

    def write(_connection):
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
        return 200, [], 0

    load = many(0, WRITERS, seconds, write)
    figures.add(WRITE, "PUT 1 MiB, durable/s", "disk alone", load.per_second)
    figures.add(WRITE, "PUT 1 MiB, p99 ms", "disk alone", load.p99_ms)
    for path in directory.iterdir():
        path.unlink()


if __name__ == "__main__":
    main()
