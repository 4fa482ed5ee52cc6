"""Several workers on one port, as real processes: killed, restarted one by one, stopped."""

import json
import os
import re
import resource
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from graphstash import CacheError, ClientConfig, Stash
from graphstash_schema import ArtifactKey, ArtifactMetadata, Digest
from graphstash_server.testing import LiveServer
from support.moto import CREDENTIALS, s3_settings
from support.ports import reserved_port
from support.processes import captured, is_running
from support.s3_proxy import S3Fault, S3Proxy
from support.waiting import PATIENT, until
from support.wire import Wire, put_head

LARGE = bytes(range(256)) * 200_000  # 50 MB, more than the sockets of both sides hold
UPLOAD = LARGE[:3_000_000]

FAILING = """
import graphstash_server.app as app

open_one = app.open_context

def open_context(settings, **others):
    if (settings.data_dir / "broken").exists():
        raise OSError("the database is broken")
    return open_one(settings, **others)

app.open_context = open_context
from graphstash_server.__main__ import main
main()
"""

STALLING = """
import sys, time
from pathlib import Path
from graphstash_server.serving.server import GraphstashServer

shut_down, release = GraphstashServer.shutdown, Path(sys.argv.pop(1))

async def shut_down_late(self, sockets=None):
    print("the event loop stalls", flush=True)
    while not release.exists():
        time.sleep(0.01)
    await shut_down(self, sockets)

GraphstashServer.shutdown = shut_down_late
from graphstash_server.__main__ import main
main()
"""


def patient(seconds: int) -> dict[str, str]:
    """Return the variables of a server that waits so long for requests before it ends."""
    return {"GRAPHSTASH_SHUTDOWN_SECONDS": str(seconds)}


def is_listening(server) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=5):
        return True
    return False


def is_handshaking(port: int) -> bool:
    """Return whether a client has sent a SYN to a port without getting an answer."""
    address, syn_sent = f"0100007F:{port:04X}", "02"
    rows = map(str.split, Path("/proc/net/tcp").read_text().splitlines())
    return any(row[2:4] == [address, syn_sent] for row in rows)


def asked(server, path: str = "/healthz") -> str:
    """Return the answer of an arbitrary worker on a new connection."""
    answer = httpx.get(f"{server.url}{path}", timeout=60, trust_env=False)
    assert answer.status_code == 200
    return answer.text


def serving(server) -> int:
    """Return how many workers have reported that they serve, including ended ones."""
    return server.log.count(" serves\n")


def replaced(server, old: set[int]):
    """Return a condition: all of `old` have ended, and as many new workers serve."""
    return lambda: len(server.workers - old) == len(old) == len(server.workers)


class Load:
    """Threads that put, get and look up with the client library until the context ends.

    Attributes:
        errors: errors that the library raised, one per failed operation.
        rounds: number of completed rounds of each thread.
    """

    def __init__(self, url: str, directory: Path, threads: int = 4) -> None:
        self.errors: list[CacheError] = []
        self.rounds = [0] * threads
        self._stopped = threading.Event()
        self._url, self._directory = url, directory

    def __enter__(self):
        self._pool = ThreadPoolExecutor(len(self.rounds))
        self._work = [self._pool.submit(self._run, each) for each in range(len(self.rounds))]
        return self

    def __exit__(self, *_):
        self._stopped.set()
        self._pool.shutdown()
        for work in self._work:
            work.result()

    def has_gone_on(self):
        """Return a condition: every thread has completed two further rounds."""
        before = list(self.rounds)
        return lambda: all(now >= then + 2 for now, then in zip(self.rounds, before, strict=True))

    def _run(self, number: int) -> None:
        settings = {"url": self._url, "local_limit": "0", **PATIENT}
        cache_dir = self._directory / f"client-{number}"
        with closing(Stash(ClientConfig.load({}, cache_dir=cache_dir, **settings))) as stash:
            while not self._stopped.is_set():
                name = f"{number << 32 | self.rounds[number]:064x}"
                key = ArtifactKey.parse("jax", "cpu-x86_64-0123456789abcdef", name)
                payload = name.encode() * 500
                metadata = ArtifactMetadata(compile_seconds=1, raw_size_bytes=len(payload))
                try:
                    stash.put(key, payload, metadata)
                    stash.forget(key)
                    assert stash.get(key) == payload
                    assert len(stash.server.lookup([key]).found) == 1
                except CacheError as error:
                    self.errors.append(error)
                self.rounds[number] += 1


def test_workers_share_one_port_and_the_rate_of_a_namespace(start, connect, tmp_path):
    with LiveServer(tmp_path / "data", log_level="error") as alone:
        rule = {"requests_per_second": 0.001}
        assert connect(alone.url).http.put("/v1/-/namespaces/team", json=rule).is_success
    server = start("--workers", "3", environment=patient(0))
    assert serving(server) == 3  # before the server announced the port

    def statuses() -> list[int]:
        """Return each worker's answer while all other workers are stopped."""
        workers, seen = server.workers, []
        for worker in workers:
            others = workers - {worker}
            for other in others:
                os.kill(other, signal.SIGSTOP)
            seen.append(httpx.get(f"{server.url}/v1/team/artifacts", trust_env=False).status_code)
            for other in others:
                os.kill(other, signal.SIGCONT)
        return seen

    before = server.workers
    assert statuses() == [200, 429, 429]
    os.kill(min(before), signal.SIGKILL)
    until(lambda: serving(server) == 4)
    assert statuses() == [429] * 3

    workers = server.workers
    stuck = min(workers)
    os.kill(stuck, signal.SIGSTOP)
    assert server.stop() == 0
    assert f"worker {stuck} was killed by SIGKILL" in server.log
    assert not any(map(is_running, workers))
    assert "Traceback" not in server.log


@pytest.mark.extended
def test_server_that_has_no_free_descriptor_restarts_killed_workers_later(start):
    server = start("--workers", "2")
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (0, limits[1]))
    one, other = server.workers
    failed_start = "cannot start a worker (Too many open files); will retry"
    failed_refusal = "cannot close new connections (Too many open files); will retry"

    server.kill_worker(one)
    until(lambda: failed_start in server.log)
    assert "ok" in asked(server)

    server.kill_worker(other)
    with socket.create_connection(("127.0.0.1", server.port)):
        until(lambda: failed_refusal in server.log)
        earlier = server.log.count(failed_start)
        until(lambda: server.log.count(failed_start) > earlier)
        # The connection stays ready. Without pauses, there would be thousands of attempts.
        assert server.log.count(failed_refusal) < 500
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
    until(lambda: serving(server) == 4)


def test_rolling_restart_fails_no_request_and_killed_worker_only_its_own(start, tmp_path):
    server = start("--workers", "2", "--port", str(reserved_port()))
    with Load(server.url, tmp_path) as load:
        first = server.workers
        until(load.has_gone_on())
        server.process.send_signal(signal.SIGHUP)
        until(replaced(server, first))
        until(load.has_gone_on())
        assert load.errors == []

        old = server.workers
        for worker in old:
            count = serving(server)
            server.kill_worker(worker)
            until(lambda count=count: serving(server) > count)
        until(load.has_gone_on())
    # Two kills, and one call of each thread under way.
    assert len(load.errors) <= 2 * len(load.rounds), load.errors
    assert len(server.workers - old) == 2
    assert all(f"worker {worker} was killed by SIGKILL" in server.log for worker in old)

    workers = server.workers
    server.kill()  # the parent
    until(lambda: not any(map(is_running, workers)))
    assert server.log.count("its parent process is gone") == 2
    socket.create_server(("127.0.0.1", server.port)).close()  # the port is free


def test_long_download_completes_before_its_worker_ends(start, connect):
    server = start("--workers", "2")
    old, api = server.workers, connect(server.url)
    api.put(LARGE)
    with api.http.stream("GET", api.path()) as answer:
        chunks = answer.iter_raw(65536)
        received = next(chunks)
        for worker in old:
            os.kill(worker, signal.SIGTERM)
        # One worker must finish the transfer, and the other one ends.
        until(lambda: len(server.workers - old) == 1 and serving(server) == 3)
        received += b"".join(chunks)

    assert received == LARGE
    assert server.stop() == 0


def test_shutdown_answers_lease_waiters_and_second_interrupt_ends_it_at_once(start, connect):
    server = start("--workers", "2", environment=patient(3600))  # an hour, for requests under way
    token = connect(server.url).acquire(holder="a", ttl_seconds=300).json()["token"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connect(server.url).acquire, holder="b", ttl_seconds=300, wait=60)
        until(lambda: json.loads(asked(server, "/v1/stats"))["waiters"] == 1)
        assert server.stop() == 0
        assert waiting.result().status_code == 202

    server = start("--workers", "2", environment=patient(3600))
    workers, api = server.workers, connect(server.url)
    assert api.renew(token, holder="a", ttl_seconds=300).status_code == 200
    api.put(LARGE)
    with api.http.stream("GET", api.path()) as answer:
        chunks = answer.iter_raw(65536)  # as long as it exists, the connection stays
        next(chunks)
        server.process.send_signal(signal.SIGINT)
        until(lambda: not is_listening(server))
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
    assert not any(map(is_running, workers))
    assert "was killed by SIGKILL" in server.log  # for a client that reads nothing


def test_transfers_and_accepted_connections_are_served_before_shutdown(start, connect):
    server = start()
    api, writer = connect(server.url), connect(server.url)
    api.put(LARGE)
    with Wire(server.url) as wire, api.http.stream("GET", api.path()) as download:
        chunks = download.iter_raw(65536)
        received = next(chunks)

        def halves():
            yield UPLOAD[: len(UPLOAD) // 2]
            until(lambda: any((server.data_dir / "blobs" / "tmp").iterdir()))
            # The server accepts connections in order, so a later one's answer proves that this one
            # is accepted.
            assert "ok" in asked(server)
            server.process.terminate()
            until(lambda: not is_listening(server))
            yield UPLOAD[len(UPLOAD) // 2 :]

        length, digest = str(len(UPLOAD)), Digest.of(UPLOAD).repr_digest
        headers = {"Content-Length": length, "Repr-Digest": digest}
        stored = writer.http.put(api.path(1), content=halves(), headers=headers)
        answer = wire.ask(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        received += b"".join(chunks)

    assert stored.status_code == 201
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert received == LARGE
    assert server.process.wait(30) == 0


@pytest.fixture
def stalling(start, tmp_path):
    """Return a function that starts a server and returns it with a path. The server's event loops
    stall at the shutdown until this file exists.
    """

    def make(*options: str):
        release = tmp_path / "release"
        return start(*options, command=(sys.executable, "-c", STALLING, str(release))), release

    return make


def test_connections_that_are_not_accepted_yet_are_served_before_shutdown(stalling, connect):
    server, release = stalling()
    server.process.terminate()
    until(lambda: server.log.count("the event loop stalls\n") == 1)
    api = connect(server.url)
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.url)) for _ in range(8)]
        for number, wire in enumerate(wires):
            payload = b"%d" % number * 1000
            wire.send(put_head(api.path(number), Digest.of(payload)) + payload)
        release.touch()
        answers = [wire.answer() for wire in wires]

    assert [(each.status, each.headers["connection"]) for each in answers] == [(201, "close")] * 8
    assert server.process.wait(30) == 0


def test_no_connection_is_established_after_the_workers_got_their_signal(stalling):
    server, release = stalling("--workers", "2")
    server.process.terminate()
    until(lambda: server.log.count("the event loop stalls\n") == 2)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(socket.create_connection, ("127.0.0.1", server.port), 60)
        until(lambda: is_handshaking(server.port))
        release.touch()
        with pytest.raises(ConnectionRefusedError):
            connecting.result()
    assert server.process.wait(30) == 0


def test_upload_that_outlasts_the_shutdown_is_refused_without_traceback(start, connect):
    server = start(environment=patient(0))
    with Wire(server.url) as wire:
        half = UPLOAD[: len(UPLOAD) // 2]
        wire.send(put_head(connect(server.url).path(), Digest.of(UPLOAD)) + half)
        until(lambda: any((server.data_dir / "blobs" / "tmp").iterdir()))
        server.process.terminate()
        refused = wire.answer()

    assert (refused.status, refused.problem["retryable"]) == (503, True)
    assert server.process.wait(30) == 0
    assert list((server.data_dir / "blobs" / "tmp").iterdir()) == []
    assert "Traceback" not in server.log


def test_upload_whose_bucket_outlasts_the_shutdown_is_refused_without_traceback(
    start, connect, moto
):
    """The bucket has stored the blob, and does not answer when the server looks for it."""
    with S3Proxy(urlsplit(moto.url).port) as proxy:
        settings = s3_settings(proxy.url, moto.new_bucket())
        environment = {f"GRAPHSTASH_{name.upper()}": str(value) for name, value in settings.items()}
        server = start(environment=environment | CREDENTIALS | patient(0))
        proxy.strikes = lambda seen: seen.method == "HEAD"
        proxy.fault = S3Fault.HANG
        api = connect(server.url)
        with ThreadPoolExecutor(1) as pool:
            uploading = pool.submit(api.put, UPLOAD)
            until(lambda: proxy.struck[S3Fault.HANG])
            server.process.terminate()
            refused = uploading.result()
        proxy.fault = S3Fault.NONE
        proxy.resume.set()

        assert (refused.status_code, refused.json()["retryable"]) == (503, True)
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log


@pytest.mark.extended
def test_workers_that_fail_to_start_stop_a_rolling_restart_and_are_retried(start):
    server = start("--workers", "2", command=(sys.executable, "-c", FAILING))
    old = server.workers
    (server.data_dir / "broken").touch()

    server.process.send_signal(signal.SIGHUP)

    until(lambda: "before it was ready; the rolling restart stops" in server.log)
    assert server.workers == old
    assert "ok" in asked(server)
    server.kill_worker(min(old))
    until(lambda: "restarting it in 1 s" in server.log)
    pauses = re.findall(r"restarting it in (\S+) s", server.log)
    third = pauses.index("1")  # the killed worker counts only if it was killed soon
    assert pauses[third - 2 : third + 1] == ["0", "0.5", "1"]
    assert "ok" in asked(server)
    server.kill_worker(max(old))
    until(lambda: server.log.count("was killed by SIGKILL") == 2)
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):  # closed: no worker serves
        asked(server)

    (server.data_dir / "broken").unlink()
    until(lambda: serving(server) == 4)
    assert "ok" in asked(server)
    assert server.log.count("the rolling restart stops") == 1  # the other worker was not tried
    old = server.workers
    server.process.send_signal(signal.SIGHUP)
    until(replaced(server, old))


@pytest.mark.extended
def test_server_whose_workers_cannot_start_exits_with_the_reason(tmp_path, process_environment):
    (tmp_path / "graphstash.sqlite3").write_bytes(b"this is not a database" * 500)

    said = captured(
        [sys.executable, "-m", "graphstash_server", "--port", "0", "--workers", "2"],
        env={**os.environ, **process_environment, "GRAPHSTASH_DATA_DIR": str(tmp_path)},
        timeout=240,
    )

    assert said.returncode == 1
    assert "file is not a database" in said.stderr
    assert re.search(r"worker \d+ ended with exit code 1: the server cannot start", said.stderr)
    assert said.stderr.endswith(
        "graphstash: error: the server did not start; the reason is above\n"
    )
    assert said.stdout == ""
