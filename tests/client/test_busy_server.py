"""A server whose connections are all taken is busy and not down: jobs share them, and wait."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest

from graphstash_server.testing import LiveServer
from support.host import Host, key
from support.wire import Wire

CONNECTIONS = 3
GRAPHS = 6
HALF_A_REQUEST = b"GET /healthz HTTP/1.1\r\nHo"


@pytest.fixture
def server(tmp_path):
    with LiveServer(tmp_path / "small", max_connections=CONNECTIONS) as server:
        yield server


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


def test_a_job_waits_for_a_connection_as_long_as_it_may(host, stored, server, monkeypatch):
    waiting, hasty = host("waiting"), host("hasty", wait_seconds=0)
    with ExitStack() as others:
        for _ in range(CONNECTIONS):
            others.enter_context(Wire(server.url)).send(HALF_A_REQUEST)
        assert hasty.build(key(0)) == b"graph"
        assert (hasty.compiles, hasty.fallbacks) == (1, {"busy": 2})  # the upload, too

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


def test_an_upload_waits_for_a_connection(host, server, monkeypatch):
    job = host("job")
    with ExitStack() as others:
        for _ in range(CONNECTIONS):
            others.enter_context(Wire(server.url)).send(HALF_A_REQUEST)
        monkeypatch.setattr("graphstash._compile.cache.sleep", lambda _: others.close())
        job.build(key(0))
    assert job.stats.published == 1
    assert job.fallbacks == {}
