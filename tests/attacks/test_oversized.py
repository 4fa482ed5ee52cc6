"""Oversized requests are refused before they cost anything."""

import json
import zlib

from graphstash_schema import Digest
from support.guarded_server import DEVICE, artifact_path, keys
from support.wire import Wire, head

(_KEY,) = keys([0])
_HEADS = {
    "one header": ("GET", "/v1/stats", [f"X-A: {'a' * 70_000}"], 431),
    "many headers": ("GET", "/v1/stats", [f"X-{n}: {'a' * 90}" for n in range(800)], 431),
    "many tiny headers": ("GET", "/v1/stats", [f"a{n}:" for n in range(20_000)], 431),
    "10,000 ranges": ("GET", "PATH", ["Range: bytes=" + ",1-1" * 20_000], 431),
    "a long path": ("GET", "/v1/" + "a" * 9000, [], 431),
    "a long query": ("GET", "/v1/-/audit?limit=" + "1" * 9000, [], 431),
    "a deep path": ("GET", "/v1" + "/a" * 4000, [], 404),
    "an audit page of all": ("GET", "/v1/-/audit?limit=99999999", [], 400),
    "a list of all": ("GET", "/v1/a/artifacts?limit=501", [], 400),
    "a label": ("GET", f"/v1/a/artifacts?label={'a' * 129}", [], 400),
    "an audit page before time": ("GET", f"/v1/-/audit?before={2**63}", [], 400),
    "a length of 2**63": ("PUT", "PATH", ["Content-Length: 9223372036854775808"], 413),
    "a length of 2**64": ("PUT", "PATH", [f"Content-Length: {2**64}"], 400),
    "a length beyond the limit": ("PUT", "PATH", ["Content-Length: 4294967297"], 413),
}


def test_oversized_head_is_refused(fort, space):
    with fort.withstands() as refused:
        for name, (method, path, headers, status) in _HEADS.items():
            target = artifact_path(space) if path == "PATH" else path
            digest = f"Repr-Digest: {Digest.of(b'x').repr_digest}"
            with Wire(fort.url) as wire:
                # The answer arrives although the client sent no byte of a body.
                answer = wire.ask(head(method, target, *headers, digest, token=fort.admin))
            assert answer.status == answer.problem["status"] == status, name
    assert refused.total() == len(_HEADS)


_MANY = [_KEY | {"fingerprint": f"{n:064x}"} for n in range(4097)]
_GRANT = {"scope": "read", "namespaces": "a"}
_TOKEN = {"description": "x", "grants": [_GRANT]}
_SPACES = b" " * (2 * 1024**2 + 1)
_REPORT = {"key": _KEY, "digest": f"sha256:{'0' * 64}", "reason": "a" * 100_000}
_RUN = {"started_at": "2026-01-01T12:00:00Z", "seconds": 1.0}
_COUNTS = [{"kind": "jax", "device_type": "cpu"}]
_MISSES = [{"key": _KEY, "seconds": 1.0}]
_BODIES = {
    "keys of a lookup": ("POST", "SPACE/artifacts:lookup", {"keys": _MANY[:1001]}, 413),
    "entries of a manifest": ("PUT", "SPACE/manifests/m", {"keys": _MANY}, 413),
    "a body": ("POST", "SPACE/artifacts:lookup", _SPACES, 413),
    "nesting": ("POST", "SPACE/artifacts:lookup", b'{"keys":' + b"[" * 100_000, 413),
    "nesting of objects": ("PUT", "SPACE/manifests/m", b'{"keys":{"a":' * 80_000, 413),
    "few digits": ("PUT", "-/namespaces/SPACE", b'{"limit_bytes":1' + b"0" * 9999 + b"}", 400),
    "digits": ("PUT", "-/namespaces/SPACE", b'{"limit_bytes":1' + b"0" * 1_000_000 + b"}", 413),
    "an exponent": ("PUT", "-/namespaces/SPACE", b'{"requests_per_second":1e999}', 400),
    "a limit beyond the column": ("PUT", "-/namespaces/SPACE", {"limit_bytes": 2**63}, 400),
    "grants": ("POST", "-/tokens", _TOKEN | {"grants": [_GRANT] * 65}, 400),
    "a description": ("POST", "-/tokens", _TOKEN | {"description": "a" * 201}, 400),
    "counts of a run": ("PUT", "SPACE/runs/r/0", _RUN | {"counts": _COUNTS * 33}, 400),
    "misses of a run": ("PUT", "SPACE/runs/r/0", _RUN | {"misses": _MISSES * 65}, 400),
    "a program of a run": ("PUT", "SPACE/runs/r/0", _RUN | {"program": "a" * 129}, 400),
    "an expiry": ("POST", "-/tokens", _TOKEN | {"expires_at": "99999-01-01T00:00:00Z"}, 400),
    "a holder": ("POST", "SPACE/leases/LEASE", {"holder": "a" * 129}, 400),
    "a lease": ("POST", "SPACE/leases/LEASE", {"ttl_seconds": 1e308}, 400),
    "a reason": ("POST", "SPACE/artifacts:report", _REPORT, 413),
    "a packed body": ("POST", "SPACE/artifacts:lookup", zlib.compress(_SPACES * 10), 400),
}


def test_oversized_body_is_refused(fort, space):
    admin = fort.http(fort.admin)
    with fort.withstands() as refused:
        for name, (method, path, body, status) in _BODIES.items():
            target = path.replace("SPACE", space).replace("LEASE", f"jax/{DEVICE}/{'0' * 64}")
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = admin.request(method, f"/v1/{target}", content=content)
            assert answer.status_code == status, name
            assert len(answer.content) < 2000
    assert refused.total() == len(_BODIES)


def test_thousands_of_ranges_or_tags_are_ignored(fort, space):
    """The server ignores headers that it cannot parse and sends all bytes (RFC 9110)."""
    fort.fill(space)
    admin = fort.http(fort.admin)
    ranges = "bytes=" + ",".join(f"{n}-{n}" for n in range(5000))
    tags = ",".join(f'"{n:064x}"' for n in range(850))

    with fort.withstands() as refused:
        for headers in (
            {"Range": ranges},
            {"Range": "bytes=0-" + "9" * 60_000},
            {"If-None-Match": tags},
            {"If-None-Match": '"' * 60_000},
            {"If-None-Match": "W/" * 30_000},
            {"If-Range": '"' * 60_000, "Range": "bytes=0-1"},
        ):
            answer = admin.get(artifact_path(space), headers=headers)
            assert (answer.status_code, answer.content) == (200, f"{space} 0".encode()), headers
    assert refused == {}
