"""A database of a million artifacts beside one of a thousand, on SQLite and PostgreSQL.

Everything is asked of both by turns. The artifacts of GET and lookup are drawn at random, so a
server has hardly ever seen them; their blobs are shared and in the page cache. Start-up is the time
from the command to the first answer, interpreter included. The eviction is `graphstash gc`, told to
make a twentieth of the store go.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.million --rounds 3 --large 1000000
"""

import base64
import hashlib
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import time

from benchmarks.figures import Figures, options, progress, workspace
from graphstash_server.testing import ServerProcess
from support.filling import (
    BLOB_BYTES,
    blob,
    describe,
    environment_of,
    fill,
    fingerprint,
    program_of,
)
from support.postgres import Postgres

SMALL = 1000
GETS = 500
LOOKUPS = 20
PAGES = 20
PUTS = 50
KEY = "torch_xla/cpu-bench"
EXPLAIN = "/v1/bench/artifacts:explain"

GRAPHSTASH = """\
import atexit
from benchmarks.memory import peak_bytes
from graphstash.__main__ import main
atexit.register(lambda: print(peak_bytes()))
main()
"""


def main():
    settings = options(
        "million",
        __doc__.splitlines()[0],
        rounds=3,
        extra=[("large", 1_000_000, "artifacts of the large database")],
    )
    figures = Figures("million", {"rounds": settings.rounds, "artifacts": settings.large})
    figures.note(
        "The goal: ready within 10 s; GET and lookup as fast as with a thousand; pages and"
    )
    figures.note("explanations within 200 ms.")
    with (
        workspace() as directory,
        Postgres(shared_buffers="256MB") as postgres,
        progress() as bar,
    ):
        task = bar.add_task("million", total=2 * (2 + settings.rounds))
        for database in ("SQLite", "PostgreSQL"):
            stores = []
            for count in (SMALL, settings.large):
                bar.update(task, description=f"{database}: filling {count:,}", advance=1)
                place = directory / f"{database}-{count}"
                stores.append(Store(place, database, count, postgres))
            for _ in range(settings.rounds):
                bar.update(task, description=f"{database}: asking", advance=1)
                for store in stores:
                    store.measure(figures)
    figures.write(settings.output)


class Store:
    """One database with its blobs, filled."""

    def __init__(self, directory, database, count, postgres):
        self.title = database
        self.count = count
        self.directory = directory
        self.random = random.Random(count)
        self.url = f"sqlite:///{directory / 'graphstash.sqlite3'}"
        directory.mkdir()
        if database == "PostgreSQL":
            self.url = postgres.new_database()
        self.environment = {
            "GRAPHSTASH_DATABASE_URL": self.url,
            "GRAPHSTASH_DATA_DIR": str(directory),
        }
        self.command("migrate")
        fill(self.url, directory, count)
        describe(self.url, count)

    def command(self, *arguments, **environment):
        """Runs `graphstash ...`; how long it took and the most memory it had."""
        began = time.monotonic()
        said = subprocess.run(
            [sys.executable, "-c", GRAPHSTASH, *arguments],
            env={**os.environ, **self.environment, **environment},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        seconds = time.monotonic() - began
        said, _, peak = said.rstrip().rpartition("\n")
        return seconds, int(peak) / 1024**2, said

    def measure(self, figures):
        def add(what, sample):
            figures.add(self.title, what, f"{self.count:,} artifacts", sample)

        began = time.monotonic()
        server = ServerProcess(
            self.directory,
            *("--min-free-bytes", "0", "--log-level", "error"),
            environment=self.environment,
        )
        add("command to ready, s", time.monotonic() - began)
        try:
            connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
            for what, times in (
                ("GET of 4 KiB, median ms", [self.get(connection) for _ in range(GETS)]),
                ("miss, median ms", [self.miss(connection) for _ in range(GETS)]),
                (
                    "lookup of 1,000 keys, median ms",
                    [self.look(connection) for _ in range(LOOKUPS)],
                ),
                *self.pages(connection),
                ("PUT of 4 KiB, median ms", [self.put(connection) for _ in range(PUTS)]),
            ):
                add(what, statistics.median(times) * 1e3)
            add("server's memory, MiB", server.resident_bytes / 1024**2)
            _, _, stats = ask(connection, "GET", "/v1/stats")
            self.stored_bytes = json.loads(stats)["namespaces"][0]["size_bytes"]
            connection.close()
        finally:
            server.stop()
        self.evict(add)

    def evict(self, add):
        """Makes a twentieth go: eviction begins at the soft limit and ends at 95 % of it."""
        limit = str(self.stored_bytes - 1)
        seconds, peak, said = self.command("gc", GRAPHSTASH_SOFT_LIMIT_BYTES=limit)
        evicted = int(said.split(" artifacts evicted")[0].split()[-1])
        add("artifacts evicted by `gc`", evicted)
        add("`gc`, s", seconds)
        add("`gc`, memory at most, MiB", peak)

    def get(self, connection):
        number = self.random.randrange(self.count)
        seconds, status, body = ask(connection, "GET", path(fingerprint(number)))
        assert status == 404 or body == blob(number)
        return seconds

    def miss(self, connection):
        seconds, status, _ = ask(connection, "GET", path(f"{self.random.getrandbits(256):064x}"))
        assert status == 404
        return seconds

    def look(self, connection):
        kind, device_type = KEY.split("/")
        keys = [
            {
                "kind": kind,
                "device_type": device_type,
                "fingerprint": fingerprint(self.random.randrange(self.count)),
            }
            for _ in range(1000)
        ]
        body = json.dumps({"keys": keys})
        seconds, status, _ = ask(connection, "POST", "/v1/bench/artifacts:lookup", body)
        assert status == 200
        return seconds

    def pages(self, connection):
        """What people look at, and what explains a miss."""
        label = {"label": "train.py:1", "environment": environment_of(is_usual=False)}
        near = label | {"program": program_of(self.count - 1)}
        new = {"label": "new", "program": {"program": "new"}, "environment": {}}
        for what, method, where, body in (
            ("the overview", "GET", "/", None),
            ("search for one word", "GET", "/search?q=torch", None),
            ("search for a word that nothing has", "GET", "/search?q=nowhere", None),
            ("explanation of a miss with relatives", "POST", EXPLAIN, near),
            ("explanation of a new program", "POST", EXPLAIN, new),
        ):
            kind, device_type = KEY.split("/")
            key = {"kind": kind, "device_type": device_type, "fingerprint": "f" * 64}
            sent = None if body is None else json.dumps({"key": key, **body})
            answers = [ask(connection, method, where, sent) for _ in range(PAGES)]
            assert {status for _, status, _ in answers} == {200}
            yield f"{what}, median ms", [seconds for seconds, _, _ in answers]

    def put(self, connection):
        body = self.random.randbytes(BLOB_BYTES)
        digest = hashlib.sha256(body).digest()
        header = {"Repr-Digest": f"sha-256=:{base64_of(digest)}:"}
        number = f"{self.random.getrandbits(256):064x}"
        seconds, status, _ = ask(connection, "PUT", path(number), body, header)
        assert status == 201
        return seconds


def path(number):
    return f"/v1/bench/artifacts/{KEY}/{number}"


def base64_of(raw):
    return base64.b64encode(raw).decode()


def ask(connection, method, where, body=None, headers=None):
    began = time.perf_counter()
    connection.request(method, where, body, headers or {})
    answer = connection.getresponse()
    read = answer.read()
    return time.perf_counter() - began, answer.status, read


if __name__ == "__main__":
    main()
