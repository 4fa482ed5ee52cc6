"""Requests without a token fill neither the disk nor the memory of nginx."""

import socket
from concurrent.futures import ThreadPoolExecutor
from select import select

import pytest

from support.guarded_server import artifact_path
from support.nginx import in_front_of
from support.wire import Wire, head

_MIB = 1024**2
_PART = bytes(_MIB)
_PATHS = {
    "artifact": artifact_path("team"),
    "lookup": "/v1/team/artifacts:lookup",
    "manifest": "/v1/team/manifests/train",
    "lease": artifact_path("team").replace("artifacts", "leases"),
    "token": "/v1/-/tokens",
    "nothing": "/nowhere",
    "health": "/healthz",
}


@pytest.fixture(scope="module")
def nginx(fort, tmp_path_factory):
    with in_front_of(fort, tmp_path_factory.mktemp("nginx")) as nginx:
        yield nginx


def kept(nginx):
    """Return the body files that nginx wrote."""
    return [path for path in (nginx.configuration.parent / "body").rglob("*") if path.is_file()]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH"])
def test_body_without_a_token_is_refused_and_not_stored(nginx, method):
    """The server replies before the body arrives, so nginx does not wait for the body."""
    for name, path in _PATHS.items():
        with Wire(nginx.url) as wire:
            wire.send(head(method, path, f"Content-Length: {8 * _MIB}") + _PART)
            answer = wire.answer()
            assert answer is not None
            assert kept(nginx) == []
        expected = {401, 404, 405} if name in {"nothing", "health"} else {401, 405}
        if (name, method) == ("health", "GET"):
            expected.add(200)
        assert answer.status in expected, name


def test_endless_head_is_refused(nginx):
    """nginx refuses a head that is twice as long as the server allows, and stores no more of it."""
    with Wire(nginx.url) as wire:
        lines = [f"X-{number}: {'a' * 70_000}" for number in range(3)]
        answer = wire.ask(head("GET", "/", *lines)[:-4])
        assert (answer.status, answer.problem["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["artifact", "lookup"])
def test_endless_body_is_refused_and_not_stored(nginx, method, path):
    """Covers chunked bodies, and a length of 100 GB, which the server accepts only for uploads."""
    with Wire(nginx.url) as wire:
        wire.send(head(method, _PATHS[path], "Transfer-Encoding: chunked"))
        wire.send(b"%x\r\n" % _MIB + _PART + b"\r\n")
        answer = wire.answer()
        assert (answer.status, answer.problem["code"]) == (411, "length_required")
        assert kept(nginx) == []
    if method != "PUT":
        with Wire(nginx.url) as wire:
            wire.send(head(method, _PATHS[path], f"Content-Length: {100 * 1024**3}"))
            answer = wire.answer()
            assert (answer.status, answer.problem["code"]) == (413, "too_large")


def test_bodies_of_one_address_leave_connections_to_other_addresses(fort, tmp_path):
    """Each address has a share of the connections, and nginx names the setting."""
    with in_front_of(fort, tmp_path / "nginx", GRAPHSTASH_CONNECTIONS_PER_ADDRESS="2") as nginx:
        lookup = head("POST", _PATHS["lookup"], "Content-Length: 1000", token=fort.admin)
        wires = [Wire(nginx.url) for _ in range(3)]
        try:
            for wire in wires:
                wire.send(lookup + b"{")
            # nginx may count the three in another order than they were sent.
            (refused,), _, _ = select(wires, [], [], 20)
            refusal = refused.answer().problem
            assert refusal["code"] == "too_many_connections"
            assert "GRAPHSTASH_CONNECTIONS_PER_ADDRESS" in refusal["detail"]
            with socket.create_connection(
                ("127.0.0.1", nginx.port), timeout=20, source_address=("127.0.0.2", 0)
            ) as other:
                other.sendall(head("GET", "/healthz", "Connection: close"))
                assert other.recv(100).startswith(b"HTTP/1.1 200 ")
        finally:
            for wire in wires:
                wire.__exit__()


@pytest.mark.extended
def test_nginx_closes_a_connection_whose_head_arrives_byte_by_byte(nginx):
    def drip(requests_before):
        with Wire(nginx.url) as wire:
            for _ in range(requests_before):
                assert wire.ask(head("GET", "/healthz")).status == 200
            wire.send(head("GET", "/healthz")[:-2])
            return wire.drip(b"X", every=0.5)

    with ThreadPoolExecutor(2) as pool:
        for answer in pool.map(drip, (0, 1)):
            assert answer is None or answer.status == 408
