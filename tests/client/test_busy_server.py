"""If all connections of a server are taken, jobs share them and wait. The server is not down."""

import json
import math
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from functools import partial
from threading import Thread

import httpx
import pytest

from graphstash._artifacts import stash
from graphstash._artifacts.envelope import seal
from graphstash.testing import FakeServer
from graphstash_schema import ArtifactMetadata
from graphstash_server.api import connection
from graphstash_server.testing import LiveServer
from support.cases.fleet import graph
from support.host import Host, key
from support.hostile import Middlebox
from support.http_server import Answer
from support.run_case import RUN_CASE, case_arguments
from support.waiting import PATIENT, until
from support.wire import Wire, head

CONNECTIONS = 3
GRAPHS = 6
ANSWER = b"HTTP/1.1 200 OK\r\nGraphstash-Protocol: 1\r\nContent-Length: 2\r\n\r\nok"
HALF_A_REQUEST = b"GET /healthz HTTP/1.1\r\nHo"
REST_OF_IT = b"st: a\r\n\r\n"


@pytest.fixture
def server(tmp_path):
    limits = {"max_connections": CONNECTIONS, "header_seconds": 600}  # half a request stays open
    with LiveServer(tmp_path / "small", **limits) as server:
        yield server


@pytest.fixture
def brief(monkeypatch):
    """Let the server answer that it is busy at once, instead of after a second."""
    monkeypatch.setattr(connection, "_WAITING_SECONDS", 0.1)


@pytest.fixture
def host(start):
    return partial(start, Host)


@pytest.fixture
def stored(host):
    publisher = host("publisher")
    for number in range(GRAPHS):
        publisher.build(key(number))
    assert publisher.stats.published == GRAPHS


def test_more_jobs_than_connections_compile_nothing_that_is_stored(host, stored):
    jobs = [host(f"job{number}") for number in range(4 * CONNECTIONS)]

    def read_all(job):
        for number in range(GRAPHS):
            assert job.build(key(number)) == b"graph"

    with ThreadPoolExecutor(len(jobs)) as threads:
        list(threads.map(read_all, jobs))
    assert [job.compiles for job in jobs] == [0] * len(jobs)
    assert [job.fallbacks for job in jobs] == [{}] * len(jobs)
    assert sum(job.stats.hits_server for job in jobs) == GRAPHS * len(jobs)


@pytest.mark.parametrize("path", ["healthz", "artifact"])
def test_the_idlest_connection_yields_to_any_address(server, namespace, path):
    where = "/healthz" if path == "healthz" else key(1).artifact_path(namespace)
    request = f"GET {where} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
    with ExitStack() as stack:

        def connect(number):
            return stack.enter_context(Wire(server.url, source=f"127.0.0.{number}"))

        first, second, third = map(connect, range(1, 4))
        for each in (first, second, third, first):
            assert each.ask(request).status in {200, 404}
            time.sleep(0.002)  # the server's clock counts milliseconds
        assert connect(4).ask(request).status in {200, 404}
        assert second.is_closed
        assert [each.ask(request).status in {200, 404} for each in (first, third)] == [True, True]


@pytest.mark.usefixtures("brief")
def test_a_job_waits_for_a_connection_as_long_as_it_may(host, stored, server, monkeypatch):
    waiting, hasty = host("waiting"), host("hasty", wait_seconds=0)
    with ExitStack() as others:
        for _ in range(CONNECTIONS):
            others.enter_context(Wire(server.url)).send(HALF_A_REQUEST)
        assert hasty.build(key(0)) == b"graph"
        assert (hasty.compiles, hasty.fallbacks) == (1, {"busy": 2})  # the look-up and the upload
        # The job pauses its calls, because each call would wait.
        assert hasty.stash.server._transport._breaker.asked_seconds > 20

        slept = []

        def sleep(seconds):
            slept.append(seconds)
            if len(slept) == 3:
                others.close()

        monkeypatch.setattr("graphstash._compile.cache.sleep", sleep)
        assert waiting.build(key(0)) == b"graph"
    assert (waiting.compiles, waiting.fallbacks) == (0, {})
    assert len(slept) >= 3
    assert all(0 < seconds <= 1 for seconds in slept)


@pytest.mark.parametrize(
    ("seconds", "reason"), [(math.inf, "a loaded server"), (30.0, "a server that cannot answer")]
)
def test_wait_of_another_process_of_the_host_counts_against_budget_of_job(
    host, monkeypatch, seconds, reason
):
    job = host("job")
    with ExitStack() as others:
        signal = others.enter_context(job.stash.local.exclusive(key(0), timeout_seconds=0))
        signal(busy_seconds=seconds)
        (said,) = job.stash.config.cache_dir.rglob("*.on")
        os.utime(said, (time.time() + 3600,) * 2)  # a signal from the future
        monkeypatch.setattr("graphstash._compile.cache.sleep", lambda _: others.close())
        job.build(key(0))
    assert job.cache.waits.left < job.cache.config.wait_seconds
    assert [each for each, spent in job.cache.waits.server_waits.items() if spent] == [reason]


@pytest.mark.usefixtures("brief")
def test_an_upload_waits_for_a_connection(host, server, monkeypatch):
    job, reader, sealed, compiles_at_waits = host("job"), host("reader"), [], []
    monkeypatch.setattr(stash, "seal", lambda *each: sealed.append(seal(*each)) or sealed[-1])
    with ExitStack() as others:

        def compile_while_others_connect():
            for _ in range(CONNECTIONS):
                others.enter_context(Wire(server.url)).send(HALF_A_REQUEST)
            with Wire(server.url) as one_more:
                assert one_more.ask(HALF_A_REQUEST + REST_OF_IT).status == 503
            return job.compile()

        def sleep(_seconds):
            compiles_at_waits.append(job.compiles)
            others.close()

        monkeypatch.setattr("graphstash._compile.cache.sleep", sleep)
        job.cache.get_or_compile(key(0), compile_while_others_connect)
        assert (job.stats.published, len(sealed)) == (1, 1)
    assert set(compiles_at_waits) == {1}  # the upload waited; the look-up did not
    assert job.fallbacks == {}
    assert (reader.build(key(0)), reader.compiles) == (b"graph", 0)


def test_processes_share_connections_and_each_host_downloads_a_graph_once(
    server, namespace, hosts, tmp_path
):
    publisher, large = hosts("publisher"), 20_000
    for number in range(GRAPHS):
        metadata = ArtifactMetadata(raw_size_bytes=large, compile_seconds=60)
        publisher.put(graph(number), os.urandom(large), metadata)
    processes, host_count, report = 4 * CONNECTIONS, 2 * CONNECTIONS, tmp_path / "report.json"
    case = case_arguments(
        "fleet:read_at_once",
        settings={"url": server.url, "namespace": namespace, **PATIENT},
        directory=tmp_path,
        processes=processes,
        hosts=host_count,
        graphs=GRAPHS,
    )
    subprocess.run([sys.executable, RUN_CASE, report, *case], check=True, timeout=300)

    reports = json.loads(report.read_text())
    assert [(each["compiles"], each["fallbacks"]) for each in reports] == [(0, {})] * processes
    fetched_bytes = sum(each["fetched_bytes"] for each in reports)

    def counted():
        (row,) = httpx.get(f"{server.url}/v1/stats", timeout=30).json()["namespaces"]
        return row

    until(lambda: counted()["served_bytes"] >= fetched_bytes)
    assert counted()["served_bytes"] <= 1.02 * host_count * counted()["size_bytes"]


def test_connections_wait_for_their_turn_and_the_oldest_comes_first(server, namespace, monkeypatch):
    monkeypatch.setattr(connection, "_WAITING_SECONDS", 600)
    path = f"/v1/{namespace}/artifacts:lookup"
    body = json.dumps({"keys": [asdict(key(1))]}).encode()
    asked = head("POST", path, f"Content-Length: {len(body)}", "Content-Type: application/json")
    with ExitStack() as stack:
        held = [stack.enter_context(Wire(server.url)) for _ in range(CONNECTIONS)]
        for wire in held:
            wire.send(HALF_A_REQUEST)
        waiting = [stack.enter_context(Wire(server.url)) for _ in range(CONNECTIONS)]
        for wire in waiting:
            wire.send(asked)
            wire.send(body)
        assert held[0].ask(REST_OF_IT).status == 200
        for wire in waiting:
            answer = wire.answer()
            assert (answer.status, len(json.loads(answer.body)["missing"])) == (200, 1)
        # Each connection yielded to the next one.
        assert all(wire.is_closed for wire in (held[0], *waiting[:-1]))
        assert waiting[-1].ask(asked + body).status == 200


def test_a_refused_connection_gives_its_place_to_one_that_waits(server, monkeypatch):
    for name in ("_WAITING_SECONDS", "_LINGER_SECONDS"):
        monkeypatch.setattr(connection, name, 600)
    turned_up, made = [], connection.Connection.connection_made

    def turn_up(self, transport):
        made(self, transport)
        turned_up.append(self)

    monkeypatch.setattr(connection.Connection, "connection_made", turn_up)
    with ExitStack() as stack:
        held = [stack.enter_context(Wire(server.url)) for _ in range(CONNECTIONS)]
        for wire in held:
            wire.send(HALF_A_REQUEST)
        waiting = stack.enter_context(Wire(server.url))
        waiting.send(HALF_A_REQUEST + REST_OF_IT)
        until(lambda: len(turned_up) > CONNECTIONS)
        held[0].send(b"\r\n: malformed\r\n\r\n")
        assert waiting.answer().status == 200


def test_refused_connections_linger_up_to_a_number(server, monkeypatch):
    monkeypatch.setattr(connection, "_LINGER_SECONDS", 600)
    monkeypatch.setattr(connection, "_MAX_LINGERING", 3)
    with ExitStack() as stack:
        answers = [
            stack.enter_context(Wire(server.url)).ask(b": malformed\r\n\r\n") for _ in range(5)
        ]
        assert [answer and answer.status for answer in answers] == [400, 400, 400, None, None]


@pytest.mark.usefixtures("brief")
def test_every_connection_that_waited_too_long_gets_the_busy_answer(server, monkeypatch):
    monkeypatch.setattr(connection, "_LINGER_SECONDS", 600)
    monkeypatch.setattr(connection, "_MAX_LINGERING", 1)
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.url)) for _ in range(2 * CONNECTIONS)]
        for wire in wires[:CONNECTIONS]:
            wire.send(HALF_A_REQUEST)
        assert [wire.answer().status for wire in wires[CONNECTIONS:]] == [503] * CONNECTIONS


def test_connection_beyond_those_that_wait_gets_the_busy_answer(server, monkeypatch):
    monkeypatch.setattr(connection, "_WAITING_SECONDS", 600)
    monkeypatch.setattr(connection, "_MAX_LINGERING", 0)
    with ExitStack() as stack:
        for _ in range(2 * CONNECTIONS):  # half of them wait
            stack.enter_context(Wire(server.url)).send(HALF_A_REQUEST)
        answer = stack.enter_context(Wire(server.url)).ask(HALF_A_REQUEST + REST_OF_IT)
        assert answer.problem["code"] == "too_many_connections"
        assert answer.headers["retry-after"] == "1"


def test_a_job_waits_when_the_server_asks_it_to(tmp_path):
    with FakeServer() as fake:
        with Host(fake.config(cache_dir=tmp_path / "publisher", **PATIENT)) as publisher:
            publisher.build(key(0))
        settings = {"cache_dir": tmp_path / "job", **PATIENT}
        with (
            Host(fake.config(**settings)) as job,
            fake.fail_on("get", status=429, times=2) as failure,
        ):
            assert job.build(key(0)) == b"graph"
            assert (job.compiles, job.fallbacks, failure.count) == (0, {}, 2)


def test_a_job_compiles_when_that_is_quicker_than_the_wait(tmp_path):
    with FakeServer() as fake:
        for number, seconds in ((0, 0.5), (1, 500.0)):
            with Host(fake.config(cache_dir=tmp_path / "publisher", **PATIENT)) as publisher:
                metadata = ArtifactMetadata(raw_size_bytes=5, compile_seconds=seconds)
                publisher.stash.put(key(number), b"graph", metadata)
        settings = {"cache_dir": tmp_path / "job", **PATIENT}
        with Host(fake.config(**settings)) as job, fake.fail_on("get", status=429, times=2):
            with closing(job.stash.server.with_own_connections()) as prefetching:
                prefetching.lookup([key(0), key(1)])
            job.build(key(0))  # the server asks for a pause of a second
            assert (job.compiles, job.fallbacks) == (1, {"busy": 1})
            job.build(key(1))
            assert (job.compiles, job.fallbacks) == (1, {"busy": 1})


def test_job_does_not_wait_for_a_pause_beyond_its_budget(tmp_path, monkeypatch):
    slept, refusal = [], Answer(429, {"Graphstash-Protocol": "1", "Retry-After": "3600"}, b"")
    monkeypatch.setattr("graphstash._compile.cache.sleep", slept.append)
    with FakeServer() as fake, Middlebox(fake.url, lambda *_: refusal) as box:
        settings = fake.config(cache_dir=tmp_path / "job", url=box.url, **PATIENT)
        with Host(settings) as job:
            for number in range(3):
                job.build(key(number))
            assert (job.compiles, job.stats.wait_seconds, slept) == (3, 0, [])
    assert len(box.requests) == 1


class Backlog:
    """A listener that accepts no connection until `open`."""

    def __init__(self, directory, family):
        self._listener = socket.socket(family)
        directory.mkdir(mode=0o700)
        is_unix = family == socket.AF_UNIX
        self._listener.bind(str(directory / "socket") if is_unix else ("127.0.0.1", 0))
        self._listener.listen(0)
        address = self._listener.getsockname()
        self.url = f"unix:{address}" if is_unix else f"http://127.0.0.1:{address[1]}"
        self._pending = [socket.socket(family) for _ in range(4)]
        for each in self._pending:
            each.setblocking(False)
            each.connect_ex(address)

    def open(self):
        """Accept the earlier connections, and answer the later ones."""
        self._listener.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                self._listener.accept()[0].close()
        self._listener.setblocking(True)
        Thread(target=self._answer, daemon=True).start()

    def _answer(self):
        with suppress(OSError):
            while True:
                accepted = self._listener.accept()[0]
                with accepted, suppress(OSError):
                    accepted.recv(65536)
                    accepted.sendall(ANSWER)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for each in (self._listener, *self._pending):
            each.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_job_waits_for_full_backlog_until_the_circuit_opens(host, tmp_path, family, monkeypatch):
    """If the server accepts no connection, the kernel drops or refuses connections."""
    for name, is_opened in (("late", True), ("never", False)):
        with Backlog(tmp_path / name, family) as backlog:
            slept = []

            def sleep(seconds, backlog=backlog, slept=slept, is_opened=is_opened):
                slept.append(seconds)
                if is_opened:
                    backlog.open()

            monkeypatch.setattr("graphstash._compile.cache.sleep", sleep)
            job = host(name, url=backlog.url, connect_seconds=0.3)
            ask = partial(job.stash.server._transport.call, "GET", "/v1/stats")
            if is_opened:
                assert job.cache._retry_while_busy(ask).body == b"ok"
                assert len(slept) == 1
            else:
                job.build(key(0))
                job.build(key(1))
                assert job.compiles == 2
                assert job.fallbacks.keys() == {"connect", "circuit_open"}
                assert len(slept) == 2
