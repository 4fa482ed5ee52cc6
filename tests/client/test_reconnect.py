"""A server closes a kept connection just as the next request is sent on it."""

import socket
import struct
import sys
import threading
from contextlib import ExitStack, closing, suppress
from enum import StrEnum
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

import httpx
import pytest

from graphstash import ClientConfig, Stash
from graphstash._http.deadline import Deadline
from graphstash._http.transport import Transport
from graphstash.errors import Reason, TransportError
from graphstash_schema import ArtifactMetadata
from support.host import key
from support.refusals import refusal
from support.waiting import PATIENT

ANSWER = b"HTTP/1.1 200 OK\r\nGraphstash-Protocol: 1\r\nContent-Length: 2\r\n\r\nok"


class End(StrEnum):
    """How a connection ends instead of an answer."""

    CLOSE = "close"
    RESET = "reset"
    HALF = "half"
    """The connection ends within the head of the answer."""
    SILENT = "silent"
    DOWN = "down"
    """The server accepts no further connection."""
    BUSY = "busy"
    """The server answers 429 to every later request."""


class Forgetful(ThreadingTCPServer):
    """A server that answers the first `kept` requests of a connection, and ends it on the next.

    Attributes:
        heard: head and body of every request that was read, in order.
        sockets: socket of every connection, in order.
    """

    daemon_threads = True

    def __init__(self, end: End, *, kept: int = 1) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.end, self.kept, self.answer = end, kept, ANSWER
        self.heard: list[bytes] = []
        self.sockets: list[socket.socket] = []
        self.connections = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,)).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Connection(StreamRequestHandler):
    def handle(self):
        self.server.connections += 1
        self.server.sockets.append(self.request)
        kept = self.server.kept
        with suppress(OSError):
            while request := self._read():
                self.server.heard.append(request)
                if kept == 0:
                    self._leave()
                    return
                kept -= 1
                self.request.sendall(self.server.answer)

    def _read(self):
        head, size = b"", 0
        while not head.endswith(b"\r\n\r\n") and (line := self.rfile.readline()):
            head += line
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        return head + self.rfile.read(size)

    def _leave(self):
        match self.server.end:
            case End.RESET:
                self.request.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
            case End.HALF:
                self.request.sendall(ANSWER[:20])
            case End.SILENT:
                self.request.recv(1)
            case End.DOWN:
                self.server.socket.shutdown(socket.SHUT_RDWR)
            case End.BUSY:
                self.server.answer = ANSWER.replace(b"200 OK", b"429 Busy")


@pytest.fixture
def transport_to():
    made = []

    def make(server, **settings):
        config = ClientConfig.load({}, url=server.url, **PATIENT | settings)
        made.append(Transport(config))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.mark.parametrize("end", [End.CLOSE, End.RESET])
def test_request_on_closed_connection_is_retried(transport_to, end):
    for method, body in (("GET", None), ("POST", b'{"a": 1}'), ("PUT", b"2"), ("DELETE", None)):
        with Forgetful(end) as server:
            transport = transport_to(server)
            for _ in range(6):  # twice the failures that open the circuit
                assert transport.call(method, "/x", json=body).body == b"ok"
            with transport.download("/x", deadline=Deadline(10)) as (_, chunks):
                assert b"".join(chunks) == b"ok"
        assert server.connections > 1
        requests = [request for request in server.heard if request.startswith(method.encode())]
        assert len(requests) >= 6
        assert body is None or all(request.endswith(body) for request in requests)


def test_connection_with_an_unrequested_answer_is_not_used_again(transport_to):
    """Otherwise each later request would get the answer to another one."""
    with Forgetful(End.CLOSE, kept=9) as server:
        server.answer = ANSWER + ANSWER.replace(b"ok", b"no")
        transport = transport_to(server)
        for number in range(1, 4):
            assert transport.call("GET", "/x").body == b"ok"
            assert server.connections == number


def test_wait_for_one_of_16_connections_is_bounded(transport_to):
    with Forgetful(End.CLOSE, kept=9) as server, ExitStack() as running:
        transport = transport_to(server, first_byte_seconds=0.2)
        for _ in range(16):
            running.enter_context(transport.download("/x", deadline=Deadline(60)))
        assert refusal(transport.call, "GET", "/x").reason is Reason.TIMEOUT
        running.close()
        assert transport.call("GET", "/x").body == b"ok"
        assert server.connections == 16 + 1  # the bodies of the first 16 were not read


def test_dropped_responses_do_not_count_as_running_requests(transport_to):
    with Forgetful(End.CLOSE, kept=9) as server:
        transport = transport_to(server, first_byte_seconds=0.2)
        client, _ = transport._client.connect()
        for _ in range(17):
            client.stream("GET", "/x", timeout=httpx.Timeout(30.0), deadline=Deadline(60))
        assert transport.call("GET", "/x").body == b"ok"


def closed_by_server(server):
    """Return how many connections the server has closed and the client has not."""
    port = f":{server.server_address[1]:04X}"
    rows = map(str.split, Path("/proc/self/net/tcp").read_text().splitlines())
    close_wait = "08"  # https://docs.kernel.org/networking/proc_net_tcp.html
    return sum(row[2].endswith(port) and row[3] == close_wait for row in rows)


def test_each_idle_connection_that_the_server_closed_is_closed(transport_to):
    with Forgetful(End.CLOSE, kept=9) as server:
        transport = transport_to(server)
        with ExitStack() as running:
            for _ in range(3):
                _, chunks = running.enter_context(transport.download("/x", deadline=Deadline(60)))
                assert b"".join(chunks) == b"ok"
        for each in server.sockets:
            if each is not server.sockets[0]:  # which became idle last
                each.shutdown(socket.SHUT_RDWR)
        assert closed_by_server(server) == 2
        assert transport.call("GET", "/x").body == b"ok"
        assert server.connections == 3
        assert closed_by_server(server) == 0


def test_signal_handler_may_take_the_last_idle_connection_during_close(transport_to):
    with Forgetful(End.CLOSE, kept=9) as server, ExitStack() as running:
        transport = transport_to(server)
        transport.call("GET", "/x")
        _, pool = transport._client.connect()

        def handle(_frame, event, function):
            if event == "c_call" and function.__name__ == "pop":
                running.enter_context(transport.download("/x", deadline=Deadline(60)))

        sys.setprofile(handle)
        try:
            pool.close()
        finally:
            sys.setprofile(None)
        assert len(server.heard) == 2
        assert server.connections == 1


def upload(transport, text):
    body = [text[:1], text[1:]]
    answer = transport.upload("/y", headers={}, chunks=lambda: iter(body), size_bytes=len(text))
    assert answer.status == 200


def test_upload_uses_a_kept_connection(transport_to):
    with Forgetful(End.CLOSE, kept=5) as server:
        transport = transport_to(server)
        transport.call("GET", "/x")
        for number in range(4):
            upload(transport, b"%dabc" % number)
    assert server.connections == 1
    assert [request[-4:] for request in server.heard[1:]] == [b"0abc", b"1abc", b"2abc", b"3abc"]


@pytest.mark.parametrize(("end", "size"), [(End.CLOSE, 8 * 1024**2), (End.RESET, 4)])
def test_whole_upload_is_repeated_if_its_connection_is_closed(transport_to, end, size):
    text = bytes(size - 1) + b"1"
    with Forgetful(end) as server:
        transport = transport_to(server)
        for _ in range(3):
            transport.call("GET", "/x")
            upload(transport, text)

    uploads = [request for request in server.heard if request.startswith(b"PUT")]
    assert len(uploads) == 2 * 3  # each on a kept connection first
    assert all(request.partition(b"\r\n\r\n")[2] == text for request in uploads)


@pytest.mark.parametrize("end", [End.CLOSE, End.RESET])
def test_request_is_retried_at_most_once_and_not_after_a_new_connection(transport_to, end):
    """The server answered a moment ago, so further retries would only double its load."""
    with Forgetful(end, kept=0) as server:
        assert refusal(transport_to(server).call, "GET", "/x").reason is Reason.RESET
        assert len(server.heard) == 1
    with Forgetful(end) as server:
        transport = transport_to(server)
        transport.call("GET", "/x")
        server.kept = 0
        assert isinstance(refusal(transport.call, "GET", "/x"), TransportError)
        assert len(server.heard) == 3


@pytest.mark.parametrize("end", [End.DOWN, End.BUSY])
def test_copy_stays_offered_if_only_the_retry_certainly_failed(tmp_path, end):
    """The server may have stored the first upload and may delete this artifact later."""
    answers = []

    def when_busy(_):
        answers.append(server.answer)
        return len(answers) < 2

    with Forgetful(end) as server:
        config = ClientConfig.load({}, url=server.url, cache_dir=str(tmp_path), **PATIENT)
        with Stash(config) as stash:
            stash.server._transport.call("GET", "/x")
            metadata = ArtifactMetadata(compile_seconds=1, raw_size_bytes=5)
            error = refusal(stash.put, key(1), b"graph", metadata, when_busy=when_busy)
            assert error.reason is (Reason.BUSY if end is End.BUSY else Reason.RESET)
            assert len(answers) == (2 if end is End.BUSY else 0)
            origins = ("own", stash.standing.offered)
            assert [stash.local.has(config.namespace, key(1), origin=each) for each in origins] == [
                False,
                True,
            ]


@pytest.mark.parametrize("end", [End.HALF, End.SILENT])
def test_request_with_partial_or_late_answer_is_not_retried(transport_to, end):
    with Forgetful(end) as server:
        transport = transport_to(server, first_byte_seconds=1 if end is End.SILENT else 30)
        transport.call("POST", "/x", json=b"{}")
        error = refusal(transport.call, "POST", "/x", json=b"{}")
        assert (error.reason is Reason.TIMEOUT) == (end is End.SILENT)
    assert len(server.heard) == 2


def test_call_to_an_invalid_host_raises_a_cache_error():
    with closing(Transport(ClientConfig.load({}, url="http://10.0.0.256:8080"))) as transport:
        error = refusal(transport.call, "GET", "/x")
    assert error.reason is Reason.PROTOCOL
    assert "10.0.0.256" in str(error)


def test_a_name_with_two_addresses_is_reached_by_either(monkeypatch):
    """The name also has an IPv6 address, on which the server does not listen."""
    places = [(socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0))]
    resolve = socket.getaddrinfo

    def resolved(host, *arguments, **named):
        if host != "cache.example":
            return resolve(host, *arguments, **named)
        return [(family, socket.SOCK_STREAM, 6, "", place) for family, place in places]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with Forgetful(End.CLOSE) as server:
        url = server.url.replace("127.0.0.1", "cache.example")
        with closing(Transport(ClientConfig.load({}, url=url))) as transport:
            assert transport.call("GET", "/v1/stats").body == b"ok"
