"""Slow callers do not keep other callers from the server."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest

from graphstash_schema import Digest
from graphstash_server.api import connection
from graphstash_server.testing import LiveServer
from support.guarded_server import GuardedServer, artifact_path
from support.waiting import until
from support.wire import Wire, head, put_head

_SECONDS = 2.0
"""Longer than garbage collection may pause this process, so that honest callers meet the limit."""
_CONNECTIONS = 24
_LARGE_BYTES = 8 * 1024**2
_HEALTH = head("GET", "/healthz")


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    """A server with short timeouts and little room for artifacts."""
    with GuardedServer(
        tmp_path_factory.mktemp("hasty"),
        header_seconds=_SECONDS,
        upload_idle_seconds=_SECONDS,
        store_limit_bytes=3 * _LARGE_BYTES // 2,
        max_artifact_bytes=_LARGE_BYTES,
    ) as fort:
        yield fort


def _upload(fort, space):
    return put_head(artifact_path(space), Digest.of(bytes(_LARGE_BYTES)), token=fort.admin)


def test_connections_kept_busy_byte_by_byte_are_closed(hasty, space):
    """Empty lines before a request are valid, but do not extend the deadline."""
    slow_head = head("GET", "/v1/stats", token=hasty.admin)[:-2]
    lookup = head(
        *("POST", f"/v1/{space}/artifacts:lookup", "Content-Length: 9999"), token=hasty.admin
    )
    late = "upload_timeout"
    unread = head("GET", "/healthz", "Content-Length: 9999")
    # For each way: complete requests, the start of the next one, the bytes that drip, the error.
    ways = {
        "a head": ([], slow_head, b"X", late),
        "a head after requests": ([_HEALTH] * 3, slow_head, b"X", late),
        "empty lines": ([], b"", b"\r\n", None),
        "empty lines after a request": ([_HEALTH], b"", b"\r\n", None),
        "an unread body": ([unread], b"", b"x", None),
        "an upload": ([], _upload(hasty, space), b" ", late),
        "a look-up": ([], lookup, b" ", late),
    }

    def end_of(way):
        requests, sent, dripped, _ = ways[way]
        with Wire(hasty.url) as wire:
            assert [wire.ask(request).status for request in requests] == [200] * len(requests)
            wire.send(sent)
            answer = wire.drip(dripped, every=_SECONDS / 10)
            assert wire.is_closed
        if answer is None:
            return None
        assert answer.status == 408
        assert answer.problem["retryable"] is True
        assert ("bytes/s" in answer.problem["detail"]) is (dripped == b" ")
        return answer.problem["code"]

    with hasty.withstands() as refused, ThreadPoolExecutor(len(ways)) as pool:
        ends = dict(zip(ways, pool.map(end_of, ways), strict=True))
    assert ends == {way: error for way, (*_, error) in ways.items()}
    assert refused == {late: 4}


def test_upload_that_stalls_or_breaks_off_returns_its_room(hasty, space):
    """The store has room for only one such upload."""
    path, admin = artifact_path(space), hasty.http(hasty.admin)
    begun = _upload(hasty, space) + bytes(_LARGE_BYTES // 2)
    for error in ("upload_timeout", "length_mismatch"):
        before = hasty.stats()["refused"].get(error, 0)
        with hasty.withstands() as refused:
            with Wire(hasty.url) as wire:
                wire.send(begun)
                if error == "upload_timeout":
                    assert wire.answer().status == 408
            until(lambda: hasty.stats()["refused"].get(error, 0) > before)  # noqa: B023 - called now
        assert refused == {error: 1}
        assert hasty.put(path, bytes(_LARGE_BYTES)).status_code == 201
        assert admin.delete(path).status_code == 204


_REFUSED = head("PUT", "/v1/x/manifests/m", "Content-Length: 99999")
_LOOKUP = head("POST", "/v1/open/artifacts:lookup", "Content-Length: 99999", "Expect: 100-continue")
_DOWNLOAD = head("GET", artifact_path("open"))
_WAYS = {  # ways to hold a connection: answered requests, and the bytes sent after them
    "silent": ([], b""),
    "a slow head": ([], _HEALTH[:-4]),
    "a slow head after a request": ([_HEALTH], _HEALTH[:-4]),
    "idle": ([_HEALTH], b""),
    "the slow body of a refused request": ([_REFUSED], b"{"),
}


_QUICK = """
from graphstash_server.api import connection
connection._MOVING_SECONDS = 0
from graphstash_server.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """A server with few connections and long timeouts, except for stalled transfers."""
    with GuardedServer(
        tmp_path_factory.mktemp("patient"),
        command=(sys.executable, "-c", _QUICK),
        header_seconds=600,
        max_connections=_CONNECTIONS,
    ) as fort:
        fort.set_policy("open", anonymous_read=True)
        assert fort.put(artifact_path("open"), bytes(_LARGE_BYTES)).status_code == 201
        fort.hang_up()
        yield fort


def test_many_half_open_connections_leave_the_others_served(patient, space):
    """Idle callers share the last connection. While it is busy, the server refuses others."""
    patient.fill(space)
    good = patient.http(patient.admin)
    assert good.get(artifact_path(space)).status_code == 200  # its connection stays open

    with patient.withstands() as refused, ExitStack() as stack:
        half_open = [stack.enter_context(Wire(patient.url)) for _ in range(_CONNECTIONS - 1)]
        for wire in half_open:
            wire.send(_HEALTH[:-10])
        assert good.get(artifact_path(space)).content == f"{space} 0".encode()
        for _ in range(2):
            assert stack.enter_context(Wire(patient.url)).ask(_HEALTH).status == 200
            assert good.get(artifact_path(space)).content == f"{space} 0".encode()
        # Another connection takes the place of the idle one.
        stack.enter_context(Wire(patient.url)).send(_HEALTH[:-10])
        beyond = stack.enter_context(Wire(patient.url)).answer()
        assert beyond.problem["code"] == "too_many_connections"
        assert (beyond.status, beyond.headers["retry-after"]) == (503, "1")
    assert refused == {"too_many_connections": 1}
    patient.hang_up()


@pytest.mark.parametrize("way", _WAYS)
def test_connections_of_one_address_do_not_keep_other_addresses_out(patient, way):
    """The server still serves callers from other addresses, one after another."""
    asked, held = _WAYS[way]
    with ExitStack() as stack:
        for _ in range(_CONNECTIONS):
            wire = stack.enter_context(Wire(patient.url))
            for request in asked:
                assert wire.ask(request).status in {200, 401}
            wire.send(held)
        _assert_others_are_served(patient, stack, is_full=way != "idle")


@pytest.mark.parametrize(
    ("sent", "begun", "then"),
    [(_LOOKUP, 100, b""), (_DOWNLOAD, 200, b""), (_DOWNLOAD, 200, b"no request\r\n\r\n")],
    ids=["body", "answer", "last answer"],
)
def test_connections_of_an_anonymous_reader_do_not_keep_others_out(patient, sent, begun, then):
    """The reader sends no body or does not read its response. The response is the connection's last
    one if the following bytes are no request.
    """
    with ExitStack() as stack:
        for _ in range(_CONNECTIONS):
            wire = stack.enter_context(Wire(patient.url))
            wire.send(sent)
            assert wire.begin() == begun
            wire.send(then)
        _assert_others_are_served(patient, stack, is_full=True)


def _assert_others_are_served(patient, stack, *, is_full):
    others = []

    def is_served(number):
        other = Wire(patient.url, source=f"127.0.0.{number}")
        if (answer := other.ask(_HEALTH)) is not None and answer.status == 200:
            others.append(stack.enter_context(other))
            return True
        other.close()
        time.sleep(0.1)  # refused connections linger for a second, and there may be 64
        return False

    for number in (2, 3, 2, 3):
        until(partial(is_served, number))
    beyond = stack.enter_context(Wire(patient.url))
    if is_full:
        assert beyond.answer().problem["code"] == "too_many_connections"
    else:  # an idle connection of the same address makes room
        assert beyond.ask(_HEALTH).status == 200
    assert [other.ask(_HEALTH).status for other in others] == [200] * 4


def test_addresses_of_one_ipv6_network_share_a_limit():
    """A host has a whole IPv6 network of addresses, so they share one part of the connections."""
    for one, other, are_together in (
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ):
        assert (connection._group_of(one) == connection._group_of(other)) is are_together


def test_connections_that_wait_for_an_answer_are_not_closed(patient, space):
    """The server does not close a connection that waits for an answer: its job would compile."""
    lease = artifact_path(space).replace("artifacts", "leases")
    assert patient.http(patient.admin).post(lease, json={}).status_code == 201
    patient.hang_up()
    terms = "Content-Length: 2", "Prefer: wait=20"
    wait = head("POST", lease, *terms, token=patient.admin) + b"{}"
    with ExitStack() as stack:
        waiters = [stack.enter_context(Wire(patient.url)) for _ in range(_CONNECTIONS - 3)]
        for wire in waiters:
            wire.send(wait)
        with Wire(patient.url) as watcher:
            seen = head("GET", "/v1/stats", token=patient.admin)
            until(lambda: json.loads(watcher.ask(seen).body)["waiters"] == len(waiters))
        for number in (5, 6):  # waiters leave three connections to others
            stack.enter_context(Wire(patient.url, source=f"127.0.0.{number}")).send(_HEALTH[:-4])
        for number in (2, 3):  # an idle connection makes room
            taken = stack.enter_context(Wire(patient.url, source=f"127.0.0.{number}"))
            assert taken.ask(_HEALTH).status == 200
        taken.send(_HEALTH[:-4])
        beyond = stack.enter_context(Wire(patient.url, source="127.0.0.4")).answer()
        assert beyond.problem["code"] == "too_many_connections"


def test_newcomer_does_not_replace_a_transfer_with_recent_progress(tmp_path, monkeypatch):
    """`patient` counts no transfer as recent; here, every transfer is."""
    monkeypatch.setattr(connection, "_MOVING_SECONDS", 3600)
    with LiveServer(tmp_path / "small", max_connections=3) as server, ExitStack() as stack:
        for _ in range(3):
            wire = stack.enter_context(Wire(server.url))
            wire.send(_LOOKUP)
            assert wire.begin() == 100
        newcomer = stack.enter_context(Wire(server.url, source="127.0.0.2"))
        assert newcomer.ask(_HEALTH).status == 503
