"""LeanClient sends the same requests as httpx's own client, and imports less."""

from contextlib import closing

import httpx
import pytest

from graphstash._http.connections import DeadlineTransport
from graphstash._http.deadline import Deadline
from graphstash._http.lean_client import LeanClient
from support.http_server import Answer, HttpServer
from support.listener import Listener
from support.processes import python

TIMEOUT = httpx.Timeout(5.0)


class Recorder(httpx.HTTPTransport):
    """Record the requests that the transport sends."""

    def __init__(self):
        super().__init__()
        self.requests = []

    def handle_request(self, request):
        request.read()
        self.requests.append(request)
        return super().handle_request(request)


@pytest.fixture
def listener():
    with Listener() as started:
        yield started


@pytest.fixture
def recorder():
    with Recorder() as made:
        yield made


@pytest.mark.parametrize("prefix", ["", "/a/b", "/a/"])
@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("GET", "/v1/team/artifacts/jax/cpu-x/00", None),
        ("GET", "/v1/-/audit?after=a%2Fb&limit=10", None),
        ("GET", "/v1/ü/manifests/a b?c=%20#d", None),
        ("POST", "/v1/team/artifacts:lookup", b"{}"),
        ("POST", "/v1/-/tokens", None),
        ("DELETE", "/v1/a", None),
    ],
)
def test_same_target_and_headers_as_from_httpx(prefix, method, path, content, listener, recorder):
    base_url = listener.url + prefix
    headers = {"Graphstash-Protocol": "1", "User-Agent": "graphstash"}
    more = {"Accept-Encoding": "identity", "Graphstash-Copy": "1"}
    lean = LeanClient(recorder, base_url=base_url, headers=headers)
    for client, limit in (
        (httpx.Client(transport=recorder, base_url=base_url, headers=headers), {}),
        (lean, {"deadline": Deadline(60)}),
    ):
        with client.stream(method, path, headers=more, content=content, timeout=TIMEOUT, **limit):
            pass
    expected, sent = recorder.requests
    assert sent.content == expected.content
    assert sent.extensions["timeout"] == expected.extensions["timeout"]
    (target, *expected_lines), (sent_target, *lines) = map(str.splitlines, listener.heads)
    assert sent_target == target
    assert sorted(lines) == sorted({*expected_lines} - {"Connection: keep-alive"})


def test_redirects_and_cookies_are_left_alone_and_response_is_closed(listener, recorder):
    listener.status, listener.body = 302, "body"
    listener.headers = {"Location": "/x", "Set-Cookie": "a=b"}
    client = LeanClient(recorder, base_url=listener.url, headers={})
    limits = {"timeout": TIMEOUT, "deadline": Deadline(60)}
    for _ in range(2):
        with client.stream("GET", "/v1/a", **limits) as response:
            assert response.status_code == 302
            assert response.request.method == "GET"
            assert b"".join(response.iter_raw()) == b"body"
        assert response.is_closed
    with pytest.raises(ZeroDivisionError), client.stream("GET", "/v1/a", **limits) as left:
        raise ZeroDivisionError
    assert left.is_closed
    assert not any("cookie" in head.lower() for head in listener.heads)
    assert "Accept-Encoding: identity" in listener.heads[0]


class _NamesItsPort(HttpServer):
    def answer_to(self, request):
        return Answer(200, body=str(self.port).encode())


def test_kept_connection_carries_no_request_to_another_origin():
    transport = DeadlineTransport(context=None)
    with _NamesItsPort() as one, _NamesItsPort() as other, closing(transport):
        client = httpx.Client(transport=transport, timeout=TIMEOUT)
        for server in (one, other) * 2:
            limit = {"deadline": Deadline(60)}
            assert client.get(server.url, extensions=limit).text == str(server.port)


def test_client_imports_neither_command_line_nor_transport_of_httpx():
    """They would cost each process of a job a third of a second."""
    program = """
        import sys
        import graphstash._http.transport
        print({"httpx._main", "httpcore", "anyio", "click", "rich"} & {*sys.modules})
    """
    assert python(program, check=True).stdout == "set()\n"
