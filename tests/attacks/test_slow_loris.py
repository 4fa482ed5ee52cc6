"""Callers who take their time, so that nobody else gets any."""

import time
from contextlib import ExitStack

import pytest

from graphstash_schema import Digest
from support.fort import Fort, artifact_path
from support.wire import Wire

_SECONDS = 0.5
_CONNECTIONS = 24
_LARGE_BYTES = 8 * 1024**2


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    """A server that has little patience and little room."""
    with Fort(
        tmp_path_factory.mktemp("hasty"),
        header_seconds=_SECONDS,
        upload_idle_seconds=_SECONDS,
        max_connections=_CONNECTIONS,
        store_limit_bytes=3 * _LARGE_BYTES // 2,
        max_artifact_bytes=_LARGE_BYTES,
    ) as fort:
        yield fort


def _head(fort, method, path, *headers):
    lines = [f"{method} {path} HTTP/1.1", "Host: a", f"Authorization: Bearer {fort.admin}"]
    return ("\r\n".join([*lines, *headers]) + "\r\n").encode()


def _upload(fort, space, size_bytes=_LARGE_BYTES):
    digest = Digest.of(bytes(size_bytes)).repr_digest
    headers = (f"Content-Length: {size_bytes}", f"Repr-Digest: {digest}")
    return _head(fort, "PUT", artifact_path(space), *headers) + b"\r\n"


def test_a_head_comes_byte_by_byte(hasty):
    with hasty.withstands() as refused, Wire(hasty.url) as wire:
        wire.send(_head(hasty, "GET", "/v1/stats"))
        answer = wire.drip(b"X", every=_SECONDS / 10)
        assert (answer.status, answer.problem["code"]) == (408, "upload_timeout")
        assert wire.is_closed
    assert refused == {"upload_timeout": 1}


@pytest.mark.parametrize("call", ["upload", "lookup", "token"])
def test_a_body_comes_byte_by_byte(hasty, space, call):
    heads = {
        "upload": _upload(hasty, space),
        "lookup": _head(hasty, "POST", f"/v1/{space}/artifacts:lookup", "Content-Length: 99999")
        + b"\r\n",
        "token": _head(hasty, "POST", "/v1/-/tokens", "Content-Length: 99999") + b"\r\n",
    }

    with hasty.withstands() as refused, Wire(hasty.url) as wire:
        wire.send(heads[call])
        answer = wire.drip(b" ", every=_SECONDS / 10)
        assert (answer.status, answer.problem["code"]) == (408, "upload_timeout")
        assert wire.is_closed
    assert refused == {"upload_timeout": 1}


def test_an_upload_stops_in_the_middle_and_its_room_is_given_back(hasty, space):
    """Both would not fit: the room of the one that never ended is there for the next one."""
    with hasty.withstands() as refused, Wire(hasty.url) as wire:
        wire.send(_upload(hasty, space) + bytes(_LARGE_BYTES // 2))
        assert wire.answer().status == 408
    assert refused == {"upload_timeout": 1}

    path = artifact_path(space)
    assert hasty.put(path, bytes(_LARGE_BYTES)).status_code == 201
    assert hasty.http(hasty.admin).delete(path).status_code == 204


def test_an_upload_hangs_up_in_the_middle(hasty, space):
    before = hasty.stats()["refused"].get("length_mismatch", 0)
    with hasty.withstands() as refused:
        with Wire(hasty.url) as wire:
            wire.send(_upload(hasty, space) + bytes(_LARGE_BYTES // 2))
        # The same connection limit, the same disk: whoever comes next is served.
        assert hasty.http(hasty.admin).get(artifact_path(space)).status_code == 404
        _until_refused(hasty, "length_mismatch", more_than=before)
    assert refused == {"not_found": 1, "length_mismatch": 1}
    assert hasty.put(artifact_path(space), bytes(_LARGE_BYTES)).status_code == 201
    assert hasty.http(hasty.admin).delete(artifact_path(space)).status_code == 204


def _until_refused(fort, code, *, more_than):
    deadline = time.monotonic() + 20
    while fort.stats()["refused"].get(code, 0) <= more_than:
        assert time.monotonic() < deadline, f"no {code} was counted"


def test_many_half_open_connections_leave_the_others_served(hasty, space):
    """One connection is left, and whoever has it is served; one more is told to come back."""
    hasty.fill(space)
    good = hasty.http(hasty.admin)
    assert good.get(artifact_path(space)).status_code == 200  # its connection stays

    with hasty.withstands() as refused, ExitStack() as stack:
        free = _CONNECTIONS - 1
        half_open = [stack.enter_context(Wire(hasty.url)) for _ in range(free)]
        for wire in half_open:
            wire.send(b"GET /healthz HTTP/1.1\r\nHo")
        assert good.get(artifact_path(space)).content == f"{space} 0".encode()
        beyond = stack.enter_context(Wire(hasty.url)).answer()
        assert (beyond.status, beyond.headers["retry-after"]) == (503, "2")
        assert good.get(artifact_path(space)).content == f"{space} 0".encode()
        assert {wire.answer().status for wire in half_open} == {408}
    assert refused == {"unavailable": 1, "upload_timeout": free}
    assert hasty.http(hasty.admin).delete(artifact_path(space)).status_code == 204


def test_a_lease_is_held_by_who_uploads_without_end(hasty, space):
    """It ends by itself, and the next one compiles."""
    lease = artifact_path(space).replace("artifacts", "leases")
    slow, next_one = hasty.token(f"write:{space}"), hasty.http(hasty.token(f"write:{space}"))
    held = hasty.http(slow).post(lease, json={"ttl_seconds": 1})
    assert held.status_code == 201

    with Wire(hasty.url) as wire:
        wire.send(_upload(hasty, space))
        waited = next_one.post(lease, json={"ttl_seconds": 1}, headers={"Prefer": "wait=20"})
        assert (waited.status_code, waited.json()["state"]) == (201, "granted")
        assert waited.json()["fencing"] > held.json()["fencing"]
        assert wire.answer().status == 408
    lost = hasty.http(slow).put(lease, json={}, headers={"Graphstash-Lease": held.json()["token"]})
    assert lost.status_code == 410


def test_an_answer_is_read_byte_by_byte(hasty, space):
    """It costs a connection and nothing else."""
    hasty.put(artifact_path(space), bytes(_LARGE_BYTES))
    with hasty.withstands() as refused, ExitStack() as stack:
        for _ in range(8):
            wire = stack.enter_context(Wire(hasty.url))
            wire.send(_head(hasty, "GET", artifact_path(space)) + b"\r\n")
        answer = hasty.http(hasty.admin).get(artifact_path(space))
        assert len(answer.content) == _LARGE_BYTES
    assert refused == {}
    assert hasty.http(hasty.admin).delete(artifact_path(space)).status_code == 204
