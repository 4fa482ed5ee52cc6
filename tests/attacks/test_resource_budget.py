"""A refused request costs little, for every call, caller and bad body.

The budget of one refused request: 50 ms of the event loop, 50 MiB of memory, no row, no byte on
disk and no connection that stays open.
"""

import base64
import json
import time

import pytest

from graphstash_schema import Digest
from support.guarded_server import keys
from support.meter import Meter
from support.wire import Wire, head

_LOOP_MS = 50
_PROBE_MS = 5
"""CPU time of `_slowness`'s loop on a quiet core. Other work on the same core can double it."""
_MEMORY_MIB = 50
_BODY_BYTES = 2 * 1024**2

(_KEY,) = keys([0])


def _filled(text, *, begin='{"keys":[', end="]}", size=_BODY_BYTES):
    """Return a body of a given size, filled with copies of a text."""
    count = (size - len(begin) - len(end) + 1) // (len(text) + 1)
    return (begin + ",".join([text] * count) + end).encode()


def _keys(count, last):
    return json.dumps({"keys": [*keys(range(count)), last]}).encode()


_BODIES = {
    "690,000 empty objects": _filled("{}"),
    "a million numbers": _filled("1"),
    "empty arrays": _filled("[]"),
    "arrays in arrays": _filled("[" * 90 + "]" * 90),
    "null": _filled("null"),
    "one long text": _filled("a" * (_BODY_BYTES - 20), begin='{"keys":["', end='"]}'),
    "escaped text": _filled("\\u00e9" * 300_000, begin='{"keys":["', end='"]}'),
    "one long number": b"1" * _BODY_BYTES,
    "spaces": b" " * _BODY_BYTES,
    "no UTF-8": b'{"keys":["' + b"\xff" * (_BODY_BYTES - 20) + b'"]}',
    "unknown fields": _filled('"a":1', begin="{", end="}"),
    "unknown fields, fewer": ("{" + ",".join(f'"{n}":1' for n in range(3_900)) + "}").encode(),
    "unknown fields, few": ("{" + ",".join(f'"{n}":1' for n in range(2_500)) + "}").encode(),
    "fields of one key": (
        '{"keys":[{' + ",".join(f'"{n}":1' for n in range(3_900)) + "}]}"
    ).encode(),
    "999 keys and a wrong one": _keys(999, {"kind": "jax"}),
    "4,095 keys and a wrong one": _keys(4095, {"kind": "jax"}),
    "8,000 keys": _keys(8000, _KEY),
    "grants": _filled('{"scope":"read"}', begin='{"description":"a","grants":[', size=32_000),
}


def _metadata(raw):
    return "Graphstash-Metadata: " + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


_HEADERS = {
    "a long token": f"Authorization: Bearer gst_{'a' * 60_000}",
    "a long JWT": f"Authorization: Bearer eyJhbGciOiJSUzI1NiJ9.{'e30' * 20_000}.AAAA",
    "dots": f"Authorization: Bearer {'.' * 60_000}",
    "many ranges": "Range: bytes=" + ",".join(f"{n}-{n}" for n in range(5_000)),
    "many tags": "If-None-Match: " + ",".join(f'"{n:064x}"' for n in range(800)),
    "many preferences": "Prefer: " + "wait=1," * 8_000,
    "parts without number": _metadata(b'{"parts":{' + b'"":1,' * 2_400 + b'"":1}}'),
    "unknown metadata": _metadata(b"{" + b'"":1,' * 2_400 + b'"":1}'),
    "metadata in arrays": _metadata(b"[" * 12_000),
    "a long lease": f"Graphstash-Lease: {'a' * 60_000}",
    "a long id": f"X-Request-Id: {'a' * 60_000}",
    "many headers": "\r\n".join(f"X-{number}: a" for number in range(5_000)),
}


@pytest.fixture(scope="module")
def calls(fort):
    """Every call in the server's own description, and whether it reads a body. A test fills in the
    words of its path.
    """
    described = fort.http().get("/openapi.json").json()
    return {
        (method.upper(), path): "requestBody" in call
        for path, methods in described["paths"].items()
        for method, call in methods.items()
        if path not in {"/healthz", "/readyz", "/openapi.json"} and method != "head"
    }


def _request(method, path, space, token, body, *headers):
    words = _KEY | {"namespace": space, "name": "job", "id": "a" * 16, "run": "r", "process": "p"}
    about = f"Content-Length: {len(body)}", f"Repr-Digest: {Digest.of(b'x').repr_digest}"
    return head(method, path.format(**words), *about, *headers, token=token) + body


def _slowness():
    """Return how many times as much CPU time as on a quiet core a loop takes now, at least 1."""
    began, total = time.thread_time(), 0
    for number in range(100_000):
        total += number * number
    return max((time.thread_time() - began) * 1e3 / _PROBE_MS, 1)


def _cost_of(meter, fort, request):
    """Return the status and the costs of at most three attempts: other work may distort one. The
    CPU time is what a quiet core would take.
    """
    costs = []
    for _ in range(3):
        before = _slowness()
        with Wire(fort.url) as wire, meter.measured() as cost:
            answer = wire.ask(request)
        cost.loop_ms /= max(before, _slowness())
        costs.append(cost)
        if cost.loop_ms <= _LOOP_MS and cost.memory_mib <= _MEMORY_MIB:
            break
    return answer.status, costs


def _dear(fort, requests):
    """Send every request. Return the requests that exceed the budget, with status and costs."""
    meter = Meter(fort)
    found = []
    with fort.withstands(), meter.leaves_no_connection():
        for name, request in requests.items():
            status, costs = _cost_of(meter, fort, request)
            assert status < 500, name
            if costs[-1].loop_ms > _LOOP_MS or costs[-1].memory_mib > _MEMORY_MIB:
                found.append((name, status, costs))
    return found


@pytest.mark.parametrize("body", _BODIES)
def test_body_of_an_administrator_stays_within_the_budget(fort, space, calls, body):
    """Calls that read no body get only one of the bodies."""
    chosen = [call for call in calls if calls[call] or body == "unknown fields"]
    requests = {call: _request(*call, space, fort.admin, _BODIES[body]) for call in chosen}
    assert _dear(fort, requests) == []


@pytest.mark.extended
@pytest.mark.parametrize("caller", ["nobody", "read:{0}", "write:{0}", "admin:{0}-other"])
def test_body_of_a_caller_with_fewer_rights_stays_within_the_budget(fort, space, calls, caller):
    token = None if caller == "nobody" else fort.token(caller.format(space))
    for body in ("690,000 empty objects", "4,095 keys and a wrong one"):
        requests = {call: _request(*call, space, token, _BODIES[body]) for call in calls}
        assert _dear(fort, requests) == [], body


@pytest.mark.untraced
@pytest.mark.parametrize("header", _HEADERS)
def test_header_stays_within_the_budget(fort, space, calls, header):
    """Each header goes to the calls that read headers of their own, and to one other call. The body
    does not match its digest, so the server never stores it.
    """
    token = None if "Authorization" in _HEADERS[header] else fort.token(f"write:{space}")
    chosen = [call for call in calls if "{fingerprint}" in call[1] or "/manifests/" in call[1]]
    chosen.append(("GET", "/v1/stats"))
    requests = {call: _request(*call, space, token, b"not x", _HEADERS[header]) for call in chosen}
    assert _dear(fort, requests) == []
