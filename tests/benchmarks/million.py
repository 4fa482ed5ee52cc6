"""Compare a database of a million artifacts with one of a thousand, on SQLite and PostgreSQL.

Both get every request in turn. The artifacts of GET and lookup are drawn at random, so a server has
rarely read them before; their blobs are shared and in the page cache. Start-up is the time from the
command to the first answer, interpreter included. The eviction is `graphstash gc`, with limits that
evict a twentieth of the store.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.million --rounds 3 --large 1000000
"""

import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import time
from functools import partial

from benchmarks.figures import part
from graphstash_schema import Digest
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
from benchmarks.costs import peak_bytes
from graphstash.__main__ import main
atexit.register(lambda: print(peak_bytes()))
main()
"""


def main():
    extra = [("large", 1_000_000, "artifacts of the large database")]
    with (
        part("million", __doc__, rounds=3, extra=extra, has_server=False) as bench,
        Postgres(shared_buffers="256MB") as postgres,
    ):
        bench.figures.note(
            "The goal: ready within 10 s; GET and lookup as fast as with a thousand; pages and "
            "explanations within 200 ms."
        )
        sizes = (SMALL, bench.settings.large)
        stores = [
            Store(bench.directory / f"{database}-{count}", database, count, postgres)
            for database in ("SQLite", "PostgreSQL")
            for count in sizes
        ]
        for _ in bench.rounds():
            for store in stores:
                bench.now(f"{store.title}, {store.count:,}")
                store.measure(bench.figures)


class Store:
    """A filled database with its blobs."""

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
        """Run `graphstash ...`; return its seconds, its peak memory and its output."""
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
            for what, count, call in (
                ("GET of 4 KiB", GETS, self.get),
                ("miss", GETS, self.miss),
                ("lookup of 1,000 keys", LOOKUPS, self.look),
                *self.pages(),
                ("PUT of 4 KiB", PUTS, self.put),
            ):
                times = [call(connection) for _ in range(count)]
                add(f"{what}, median ms", statistics.median(times) * 1e3)
            add("server's memory, MiB", server.resident_bytes / 1024**2)
            _, _, stats = ask(connection, "GET", "/v1/stats")
            self.stored_bytes = json.loads(stats)["namespaces"][0]["size_bytes"]
            connection.close()
        finally:
            server.stop()
        self.evict(add)

    def evict(self, add):
        """Evict a twentieth: eviction begins at the soft limit and ends at 95 % of it."""
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
        numbers = [self.random.randrange(self.count) for _ in range(1000)]
        keys = [key_of(fingerprint(number)) for number in numbers]
        return checked(connection, "POST", "/v1/bench/artifacts:lookup", {"keys": keys})

    def pages(self):
        """Measure the pages for people, and the explanation of a miss."""
        for what, where in (
            ("the overview", "/"),
            ("the overview of a namespace", "/?namespace=bench"),
            ("the list of withheld artifacts", "/v1/-/quarantine?namespace=bench"),
            ("search for one word", "/search?q=torch"),
            ("search for a word that nothing has", "/search?q=nowhere"),
        ):
            yield what, PAGES, partial(checked, method="GET", where=where)
        label = {"label": "train.py:1", "environment": environment_of(is_usual=False)}
        near = label | {"program": program_of(self.count - 1)}
        new = {"label": "new", "program": {"program": "new"}, "environment": {}}
        for what, asked in (("a miss with relatives", near), ("a new program", new)):
            body = {"key": key_of("f" * 64), **asked}
            yield (
                f"explanation of {what}",
                PAGES,
                partial(checked, method="POST", where=EXPLAIN, body=body),
            )

    def put(self, connection):
        body = self.random.randbytes(BLOB_BYTES)
        header = {"Repr-Digest": Digest.of(body).repr_digest}
        number = f"{self.random.getrandbits(256):064x}"
        seconds, status, _ = ask(connection, "PUT", path(number), body, header)
        assert status == 201
        return seconds


def path(number):
    return f"/v1/bench/artifacts/{KEY}/{number}"


def key_of(number):
    kind, device_type = KEY.split("/")
    return {"kind": kind, "device_type": device_type, "fingerprint": number}


def checked(connection, method, where, body=None):
    """Return the seconds of a call that is answered 200."""
    sent = None if body is None else json.dumps(body)
    seconds, status, _ = ask(connection, method, where, sent)
    assert status == 200, status
    return seconds


def ask(connection, method, where, body=None, headers=None):
    began = time.perf_counter()
    connection.request(method, where, body, headers or {})
    answer = connection.getresponse()
    read = answer.read()
    return time.perf_counter() - began, answer.status, read


if __name__ == "__main__":
    main()
