"""Measure the client's costs of one large artifact, and the minimum that its bytes need.

An artifact of 64 MiB comes from a server on loopback, in a new process for each figure: noise,
which does not compress, and machine code, which compresses to about a quarter. The yardstick reads
the same answer with `http.client` into memory, computes one SHA-256 and decompresses it at once. It
neither writes nor checks anything else. `body` is the answer's body alone, through `http.client`
and through httpx as the client uses it.

CPU is user and system time of the process. Memory is the growth of its peak resident size, after a
small artifact has loaded all modules.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.client --rounds 9
"""

import hashlib
import http.client
import json
import secrets
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from benchmarks.costs import Watch
from benchmarks.figures import part, rotated
from benchmarks.verify import publish
from graphstash import ClientConfig, Stash
from graphstash_schema import ArtifactKey

MIB = 1024**2
SIZE = 64 * MIB
YARDSTICK, GET, FETCH = "http.client, SHA-256, decompression", "get", "fetch"
LOCAL = "get, from this host's disk"
BODY, OUR_BODY = "http.client, body", "httpx, body"
ARMS = (YARDSTICK, GET, FETCH, LOCAL, BODY, OUR_BODY)
GOALS = ((GET, YARDSTICK), (FETCH, YARDSTICK), (OUR_BODY, BODY))
SMALL, NOISE, CODE = (ArtifactKey.parse("jax", "cpu-x86_64", f"{n:064x}") for n in range(3))
TITLES = {"noise": NOISE, "machine code": CODE}


def main():
    with part("client", __doc__, rounds=9) as bench:
        payloads = {SMALL: b"small", NOISE: secrets.token_bytes(SIZE), CODE: machine_code()}
        publish(bench.server, bench.directory, payloads)
        for number in bench.rounds():
            for title in TITLES:
                results = {}
                for arm in rotated(ARMS, number):
                    bench.now(f"{title}: {arm}")
                    results[arm] = in_a_process(bench.server, bench.directory, title, arm)
                report(bench.figures, title, results)


def machine_code():
    """Return the middle part of the largest library of this Python's packages."""
    packages = Path(sysconfig.get_paths()["platlib"])
    largest = max(packages.glob("torch/lib/*.so*"), key=lambda path: path.stat().st_size)
    with largest.open("rb") as file:
        file.seek(largest.stat().st_size // 2)
        return file.read(SIZE)


def in_a_process(server, directory, title, arm):
    with tempfile.TemporaryDirectory(dir=directory) as place:
        words = ("--one", server.url, title, arm, place)
        command = [sys.executable, "-m", "benchmarks.client", *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def report(figures, title, results):
    for arm, (cpu, grown) in results.items():
        figures.add(title, arm, "CPU, ms", 1e3 * cpu)
        figures.add(title, arm, "memory, MiB", grown / MIB)
    for first, second in GOALS:
        ratio = results[first][0] / results[second][0]
        figures.add("CPU ratios within a round", f"{title}: {first} / {second}", "ratio", ratio)


# --- in a process of its own


def one(url, title, arm, directory):
    act = by_hand if arm in (YARDSTICK, BODY) else by_client
    watch = act(url, TITLES[title], arm, Path(directory))
    print(json.dumps([watch.cpu_seconds, watch.grown]))


def by_hand(url, key, arm, _directory):
    import zstandard

    connection = http.client.HTTPConnection(url.removeprefix("http://"))

    def read(wanted):
        connection.request("GET", wanted.artifact_path("default"))
        body = connection.getresponse().read()
        if arm == YARDSTICK:
            hashlib.sha256(body).digest()
            start = 12 + int.from_bytes(body[8:12])
            zstandard.ZstdDecompressor().decompress(memoryview(body)[start:])

    read(SMALL)
    with Watch() as watch:
        read(key)
    return watch


def by_client(url, key, arm, directory):
    from graphstash._http.deadline import Deadline

    target = directory / "payload"
    with Stash(ClientConfig.load({}, url=url, cache_dir=directory / "tier")) as stash:
        stash.get(SMALL)
        stash.fetch(SMALL, target)
        if arm == LOCAL:
            stash.ensure_local(key)
        with Watch() as watch:
            if arm == FETCH:
                stash.fetch(key, target)
            elif arm == OUR_BODY:
                transport = stash.server._transport
                path = key.artifact_path(stash.config.namespace)
                with transport.download(path, deadline=Deadline(60)) as (_, chunks):
                    for _chunk in chunks:
                        pass
            else:
                stash.get(key)
    return watch


if __name__ == "__main__":
    one(*sys.argv[2:]) if sys.argv[1:2] == ["--one"] else main()
