"""Uploads, leases, refusals and the rest through nginx: as without it.

Every test asks a real server directly and through a real nginx with the configuration of docker/,
and compares.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from graphstash_schema import Digest
from graphstash_schema.protocol import MAX_WAIT_SECONDS
from support.nginx import seen
from support.waiting import until, until_waiting
from support.wire import Wire

BLOB = os.urandom(300_000)


def began_put(nginx, path, size, *, digest, body=b"", **headers):
    """A connection on which a PUT of so many bytes has begun, and these are sent."""
    headers |= {"Host": "x", "Content-Length": size, "Repr-Digest": digest.repr_digest}
    lines = [f"PUT {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    wire = Wire(nginx.url)
    wire.send("\r\n".join([*lines, "", ""]).encode() + body)
    return wire


WRITES = {
    "new": {},
    "no digest": {"Repr-Digest": None},
    "wrong digest": {"Repr-Digest": Digest.of(b"other").repr_digest},
    "bad metadata": {"Graphstash-Metadata": "!"},
    "bad protocol": {"Graphstash-Protocol": "99"},
}


@pytest.mark.parametrize("case", WRITES)
def test_put_through_nginx_stores_artifact(api, through, case):
    headers = {"Repr-Digest": Digest.of(BLOB).repr_digest} | WRITES[case]
    headers = {name: value for name, value in headers.items() if value is not None}

    for _ in range(2):
        direct = api.http.put(api.path(1), content=BLOB, headers=headers)
        behind = through.http.put(api.path(2), content=BLOB, headers=headers)
        for answer in (direct, behind):
            answer.headers.pop("location", None)
        assert seen(behind) == seen(direct)


def test_refusals_of_writes_and_a_deletion_pass_nginx(api, through, problem):
    through.put(BLOB)

    assert seen(through.put(b"other")) == seen(api.put(b"other"))
    problem(through.put(BLOB, If_None_Match="*"), 412, "precondition_failed")
    digest = {"Repr-Digest": Digest.of(BLOB).repr_digest}
    answer = through.http.put(api.path(), content=iter([BLOB]), headers=digest)
    problem(answer, 411, "length_required")

    assert through.http.delete(api.path()).status_code == 204
    problem(api.get(), 404, "not_found")
    problem(through.get(), 404, "not_found")


@pytest.mark.parametrize(
    ("size", "body", "refusal"),
    [
        (10 * 1024**3, b"", (413, "too_large")),  # by nginx
        (500 * 1024**2, b"", (413, "too_large")),
        (100, b"abc", (408, "upload_timeout")),
    ],
)
def test_upload_is_refused_before_its_body_arrives(nginx, api, size, body, refusal):
    with began_put(nginx, api.path(), size, digest=Digest.of(b""), body=body) as wire:
        answer = wire.answer()

    assert (answer.status, answer.problem["code"]) == refusal


def test_refusal_reaches_client_that_still_sends_its_body(nginx, api, problem):
    """401 MiB against a limit of 400: whoever sends on regardless gets the answer, too."""
    block = bytes(1024**2)
    headers = {"Content-Length": str(401 * 1024**2), "Repr-Digest": Digest.of(b"").repr_digest}

    with httpx.Client(timeout=60, trust_env=False) as client:
        body = (block for _ in range(401))
        answer = client.put(nginx.url + api.path(), content=body, headers=headers)

    problem(answer, 413, "too_large")


def test_an_upload_reaches_the_server_before_it_is_complete(nginx, api, files):
    """nginx stores nothing: the temporary file is the server's, and grows."""
    blob = os.urandom(4 * 1024**2)
    half = len(blob) // 2
    known = set(files())
    digest = Digest.of(blob)
    with began_put(nginx, api.path(), len(blob), digest=digest, body=blob[:half]) as wire:
        until(lambda: set(files()) - known)
        assert wire.ask(blob[half:]).status == 201


def test_expect_100_continue_is_answered_and_the_upload_stored(nginx, api, through):
    expect = {"expect": "100-continue"}
    with began_put(nginx, api.path(), len(BLOB), digest=Digest.of(BLOB), **expect) as wire:
        assert wire.begin() == 100
        assert wire.ask(BLOB).status == 201
    assert through.get().content == BLOB


def test_a_connection_can_be_reused_after_an_early_answer(api, through):
    large = os.urandom(20 * 1024**2)
    api.put(large)
    for _ in range(5):
        assert through.put(large).status_code == 200
        assert through.get(1).status_code == 404


def test_upload_of_vanished_client_leaves_nothing(nginx, api, files, eventually, problem):
    known = set(files())
    begun = bytes(2 * 1024**2)  # there is a file from the first full chunk on
    with began_put(nginx, api.path(), 3000000, digest=Digest.of(b""), body=begun):
        eventually(lambda: bool(set(files()) - known))

    eventually(lambda: not set(files()) - known)
    problem(api.get(), 404, "not_found")


def test_wait_for_lease_lasts_as_requested_or_until_release(api, through):
    granted = through.acquire(ttl_seconds=60).json()

    held = through.acquire(wait=1)
    assert held.status_code == 202
    assert held.headers["preference-applied"] == "wait=1"
    assert held.headers["retry-after"] == "1"

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(through.acquire, wait=30)
        until_waiting(api.url)
        api.put(BLOB)
        ended = through.http.delete(
            api.lease_path() + "?outcome=published", headers={"Graphstash-Lease": granted["token"]}
        )
        assert waiting.result().status_code == 200
    assert ended.status_code == 204


def test_waiter_that_hangs_up_is_removed(nginx, api, eventually):
    def waiters():
        return api.http.get("/v1/stats").json()["waiters"]

    api.acquire(ttl_seconds=60)
    head = f"POST {api.lease_path()} HTTP/1.1\r\nHost: x\r\nPrefer: wait=60\r\n"
    with Wire(nginx.url) as wire:
        wire.send(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
        eventually(lambda: waiters() == 1)

    eventually(lambda: waiters() == 0)


def test_nginx_waits_longer_than_the_longest_wait(nginx):
    (seconds,) = re.findall(r"proxy_read_timeout +([0-9]+)s;", nginx.configuration.read_text())
    assert int(seconds) >= 2 * MAX_WAIT_SECONDS


CALLS = {
    "lease without token": ("PUT", "/v1/{ns}/leases/jax/cpu/" + "a" * 64, {"json": {}}),
    "bad kind": ("GET", "/v1/{ns}/artifacts/No/cpu/" + "a" * 64, {}),
    "bad namespace": ("GET", "/v1/..%2f/artifacts/jax/cpu/" + "a" * 64, {}),
    "dots": ("GET", "/v1/../v1/{ns}/artifacts/jax/cpu/" + "a" * 64, {}),
    "unknown path": ("GET", "/nowhere", {}),
    "wrong method": ("PATCH", "/v1/stats", {}),
    "bad json": ("POST", "/v1/{ns}/artifacts:lookup", {"content": b"{"}),
    "no keys": ("POST", "/v1/{ns}/artifacts:lookup", {"json": {"keys": []}}),
    "no manifest": ("GET", "/v1/{ns}/manifests/none", {}),
    "large json": ("POST", "/v1/{ns}/artifacts:lookup", {"content": b" " * 3_000_000}),
    "delete nothing": ("DELETE", "/v1/{ns}/artifacts/jax/cpu/" + "a" * 64, {}),
    "a page": ("GET", "/docs", {}),
    "health": ("GET", "/healthz", {}),
    "readiness": ("GET", "/readyz", {}),
    "interface": ("GET", "/openapi.json", {}),
    "headers of 70 KB": ("GET", "/", {"headers": {f"X-{n}": "x" * 10_000 for n in range(7)}}),
    "one header of 66 KB": ("GET", "/", {"headers": {"X-Long": "x" * 66_000}}),
}


@pytest.mark.parametrize("case", CALLS)
def test_other_calls_get_same_answers_through_nginx(api, through, case):
    method, path, options = CALLS[case]
    path = path.replace("{ns}", str(api.namespace))

    direct = api.http.request(method, path, **options)
    behind = through.http.request(method, path, **options)

    assert seen(behind) == seen(direct)


def test_form_of_page_behind_nginx_is_accepted(through):
    """nginx leaves the port out of Host, and browsers name it in Origin."""
    own, other = str(through.http.base_url).rstrip("/"), "http://elsewhere.example"

    assert through.http.post("/sign-out", headers={"Origin": own}).status_code == 303
    assert through.http.post("/sign-out", headers={"Origin": other}).status_code == 403
