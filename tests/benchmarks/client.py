"""What the client spends on one large artifact, beside the least that its bytes need.

An artifact of 64 MiB comes from a server on loopback, in a fresh process for each figure: noise,
which does not shrink, and machine code, which shrinks to about a quarter. The yardstick reads the
same answer with `http.client` into memory, takes one SHA-256 of it and decompresses it at once; it
writes nothing and checks nothing else. `body` is the answer's body alone, through `http.client` and
through httpx as the client uses it.

CPU is user and system time of the process; memory is the growth of its largest resident size, after
a small artifact has loaded everything.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.client --rounds 9
"""

import hashlib
import http.client
import json
import secrets
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from benchmarks.figures import Figures, options, progress, workspace
from benchmarks.memory import peak_bytes

MIB = 1024**2
SIZE = 64 * MIB
YARDSTICK, GET, FETCH = "http.client, SHA-256, decompression", "get", "fetch"
LOCAL = "get, from this host's disk"
BODY, OUR_BODY = "http.client, body", "httpx, body"
ARMS = (YARDSTICK, GET, FETCH, LOCAL, BODY, OUR_BODY)
GOALS = ((GET, YARDSTICK), (FETCH, YARDSTICK), (OUR_BODY, BODY))


def main():
    settings = options("client", __doc__.splitlines()[0], rounds=9)
    figures = Figures("client", {"rounds": settings.rounds})
    from support.server import Server

    with (
        workspace() as directory,
        Server(directory / "server") as server,
        progress() as bar,
    ):
        publish(server, directory)
        task = bar.add_task("client", total=settings.rounds * len(PAYLOADS) * len(ARMS))
        for number in range(settings.rounds):
            for title in PAYLOADS:
                turn = number % len(ARMS)  # nobody is always first
                results = {}
                for arm in (*ARMS[turn:], *ARMS[:turn]):
                    bar.update(task, description=f"{title}: {arm}")
                    results[arm] = in_a_process(server, title, arm)
                    bar.advance(task)
                report(figures, title, results)
    figures.write(settings.output)


def machine_code():
    """The largest library of this Python's packages, from its middle."""
    packages = Path(sysconfig.get_paths()["platlib"])
    largest = max(packages.glob("torch/lib/*.so*"), key=lambda path: path.stat().st_size)
    with largest.open("rb") as file:
        file.seek(largest.stat().st_size // 2)
        return file.read(SIZE)


PAYLOADS = {"noise": lambda: secrets.token_bytes(SIZE), "machine code": machine_code}


def key_of(title):
    from graphstash_schema import ArtifactKey

    return ArtifactKey.parse("jax", "cpu-x86_64", hashlib.sha256(title.encode()).hexdigest())


def publish(server, directory):
    from graphstash import ClientConfig, Stash
    from graphstash_schema import ArtifactMetadata

    config = ClientConfig.load({}, url=server.url, cache_dir=directory / "publisher")
    with Stash(config) as stash:
        for title, make in (("small", lambda: b"small"), *PAYLOADS.items()):
            payload = make()
            metadata = ArtifactMetadata(compile_seconds=60.0, raw_size_bytes=len(payload))
            stash.put(key_of(title), payload, metadata)


def in_a_process(server, title, arm):
    command = [sys.executable, "-m", "benchmarks.client", "--one", server.url, title, arm]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def report(figures, title, results):
    for arm, result in results.items():
        figures.add(title, arm, "CPU, ms", 1e3 * result["cpu"])
        figures.add(title, arm, "memory, MiB", result["grown"] / MIB)
    for first, second in GOALS:
        ratio = results[first]["cpu"] / results[second]["cpu"]
        figures.add("CPU ratios within a round", f"{title}: {first} / {second}", "ratio", ratio)


# --- in a process of its own


def one(url, title, arm):
    with workspace() as directory:
        act = by_hand if arm in (YARDSTICK, BODY) else by_client
        print(json.dumps(act(url, title, arm, directory)))


class Cost:
    """CPU seconds and memory of a block, in `cpu` and `grown`."""

    def __enter__(self):
        self._began = time.process_time(), peak_bytes()
        self.spent = {}
        return self

    def __exit__(self, *_):
        cpu, peak = self._began
        self.spent = {"cpu": time.process_time() - cpu, "grown": peak_bytes() - peak}


def by_hand(url, title, arm, _directory):
    import zstandard

    connection = http.client.HTTPConnection(url.removeprefix("http://"))

    def read(wanted):
        connection.request("GET", key_of(wanted).artifact_path("default"))
        body = connection.getresponse().read()
        if arm == YARDSTICK:
            hashlib.sha256(body).digest()
            start = 12 + int.from_bytes(body[8:12])
            zstandard.ZstdDecompressor().decompress(memoryview(body)[start:])

    read("small")
    with Cost() as cost:
        read(title)
    return cost.spent


def by_client(url, title, arm, directory):
    from graphstash import ClientConfig, Stash
    from graphstash._http.deadline import Deadline

    key = key_of(title)
    target = directory / "payload"
    with Stash(ClientConfig.load({}, url=url, cache_dir=directory / "tier")) as stash:
        stash.get(key_of("small"))
        stash.fetch(key_of("small"), target)
        if arm == LOCAL:
            stash.ensure_local(key)
        with Cost() as cost:
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
    return cost.spent


if __name__ == "__main__":
    one(*sys.argv[2:]) if sys.argv[1:2] == ["--one"] else main()
