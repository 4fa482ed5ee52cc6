"""Uploads, leases, refusals and other calls get the same answers through nginx. nginx also has its
own answers.

Most tests send equal requests to a server, and to nginx with the configuration of docker/.
"""

import json
import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from graphstash_schema import Digest
from graphstash_schema.protocol import MAX_WAIT_SECONDS
from support.http_server import Answer, HttpServer
from support.nginx import Nginx, in_front_of, seen
from support.ports import reserved_port
from support.waiting import until, until_waiting
from support.wire import Wire, put_head

BLOB = os.urandom(300_000)


def test_refusals_of_writes_and_a_deletion_pass_through_nginx(api, through, problem):
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
    with Wire(nginx.url) as wire:
        answer = wire.ask(put_head(api.path(), Digest("0" * 64, size)) + body)

    assert (answer.status, answer.problem["code"]) == refusal


def test_refusal_reaches_client_that_still_sends_its_body(nginx, api, problem):
    """The body exceeds the limit by 1 MiB. A client that keeps sending still gets the answer."""
    block = bytes(1024**2)
    headers = {"Content-Length": str(401 * 1024**2), "Repr-Digest": Digest.of(b"").repr_digest}

    with httpx.Client(timeout=60, trust_env=False) as client:
        body = (block for _ in range(401))
        answer = client.put(nginx.url + api.path(), content=body, headers=headers)

    problem(answer, 413, "too_large")


def test_incomplete_upload_reaches_the_server_and_ends_with_its_client(nginx, api, files, problem):
    """nginx stores nothing: the growing temporary file is the server's."""
    blob = os.urandom(4 * 1024**2)
    announced = put_head(api.path(), Digest.of(blob), "Expect: 100-continue")
    known = set(files())
    with Wire(nginx.url) as wire:
        wire.send(announced)
        assert wire.begin() == 100
        wire.send(blob[: len(blob) // 2])
        until(lambda: set(files()) - known)
    until(lambda: not set(files()) - known)
    problem(api.get(), 404, "not_found")

    with Wire(nginx.url) as wire:
        wire.send(announced)
        assert wire.begin() == 100
        assert wire.ask(blob).status == 201
    assert api.get().content == blob


def test_connection_can_be_reused_after_an_early_answer(api, through):
    large = os.urandom(20 * 1024**2)
    api.put(large)
    for _ in range(5):
        assert through.put(large).status_code == 200
        assert through.get(1).status_code == 404


def test_wait_for_lease_lasts_as_requested_or_until_release(nginx, api, through):
    token = through.acquire(ttl_seconds=60).json()["token"]
    held = through.acquire(wait=1)
    assert held.status_code == 202
    assert held.headers["preference-applied"] == "wait=1"
    assert held.headers["retry-after"] == "1"

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(through.acquire, wait=30)
        until_waiting(api.url)
        api.put(BLOB)
        assert through.release(token, "published").status_code == 204
        assert waiting.result().status_code == 200
    (seconds,) = re.findall(r"proxy_read_timeout +([0-9]+)s;", nginx.configuration.read_text())
    assert int(seconds) >= 2 * MAX_WAIT_SECONDS


def test_waiter_that_hangs_up_is_removed(nginx, api):
    def are_waiting(count):
        return lambda: api.http.get("/v1/stats").json()["waiters"] == count

    api.acquire(ttl_seconds=60)
    head = f"POST {api.lease_path()} HTTP/1.1\r\nHost: x\r\nPrefer: wait=60\r\n"
    with Wire(nginx.url) as wire:
        wire.send(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
        until(are_waiting(1))
    until(are_waiting(0))


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


def test_other_calls_get_same_answers_through_nginx(api, through):
    for case, (method, path, options) in CALLS.items():
        url = path.replace("{ns}", str(api.namespace))
        direct, behind = (each.http.request(method, url, **options) for each in (api, through))
        assert seen(behind) == seen(direct), case


def test_form_behind_nginx_is_accepted_from_its_own_origin_only(through, nginx):
    own, default = {"Host": f"127.0.0.1:{nginx.port}"}, "http://cache.example"
    for headers, status in (
        (own | {"Origin": nginx.url}, 303),
        (own | {"Origin": nginx.url.replace("http:", "https:")}, 403),
        (own | {"Origin": f"http://127.0.0.1:{nginx.port + 1}"}, 403),
        (own | {"Origin": "http://127.0.0.1"}, 403),
        (own | {"Origin": f"http://elsewhere.example:{nginx.port}"}, 403),
        ({"Host": "cache.example:80", "Origin": default}, 303),
        ({"Host": "CACHE.example", "Origin": default}, 303),
        ({"Host": "cache.example", "Origin": f"{default}:8080"}, 403),
    ):
        assert through.http.post("/sign-out", headers=headers).status_code == status, headers


def test_request_without_host_passes_nginx(nginx):
    with Wire(nginx.url) as wire:
        assert wire.ask(b"GET /healthz HTTP/1.0\r\n\r\n").status == 200


def test_metrics_are_not_reachable_through_nginx(through, api):
    """nginx would return the metrics of either server."""
    assert "graphstash_hits_total" in api.http.get("/metrics").text  # from the server itself

    with_body = ("Content-Length: 2", "", "{}"), ("Content-Length: 20000", "", "x" * 20000)
    ways = ("/metrics", "/metrics?x=1", "//metrics", "/./metrics", "/%6Detrics", "/x/../metrics")
    for path, more in (*((way, ("", "")) for way in ways), *(("/metrics", b) for b in with_body)):
        head = "\r\n".join([f"GET {path} HTTP/1.1", "Host: a", "Connection: close", *more])
        with Wire(through.url) as wire:
            answer = wire.ask(head.encode())
        assert (answer.status, answer.problem["code"]) == (404, "unknown_path"), path
        assert b"graphstash_" not in answer.body


def test_missing_servers_give_temporary_problem_document(tmp_path, problem, connect):
    """Neither log contains the caller's query or headers."""
    nobody = f"127.0.0.1:{reserved_port()}"
    variables = {"GRAPHSTASH_SERVER_1": nobody, "GRAPHSTASH_SERVER_2": nobody}
    variables["GRAPHSTASH_BLOB_DIR"] = str(tmp_path)
    with Nginx(tmp_path / "nginx", variables=variables) as lonely:
        api = connect(lonely.url)
        for answer in (api.get(), api.put(b"blob" * 100_000), api.acquire()):
            assert problem(answer, 503, "unavailable")["retryable"] is True
            assert answer.headers["retry-after"] == "1"
        assert api.http.get("/nginx/healthz").status_code == 200
        with Wire(lonely.url) as wire:
            wire.send(b"GET /v1/stats?t=s3cret\xc2\x9b HTTP/1.1\r\nHost: s3cret\r\n\r\n")
            assert wire.answer().problem["code"] == "unavailable"
        lonely.close()

        entries = [json.loads(line) for line in lonely.log.splitlines() if line.startswith("{")]
        assert "/v1/stats" in {entry["path"] for entry in entries}
        assert "s3cret" not in lonely.log


def test_call_of_dying_server_is_passed_to_another(live_server, tmp_path, connect):
    """The server has received the whole request when it dies, like a killed one."""
    dying = socket.create_server(("127.0.0.1", 0))
    asked = []

    def die():
        while True:
            try:
                connection, _ = dying.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                said = b""
                while b"ttl_seconds" not in said and (part := connection.recv(65536)):
                    said += part
                asked.append(said)

    server = threading.Thread(target=die)
    server.start()
    try:
        with in_front_of(
            live_server,
            tmp_path / "nginx",
            GRAPHSTASH_SERVER_1=f"127.0.0.1:{dying.getsockname()[1]}",
        ) as nginx:
            api = connect(nginx.url, "dying")
            assert {api.acquire(ttl_seconds=1).status_code for _ in range(6)} <= {200, 201, 202}
    finally:
        dying.shutdown(socket.SHUT_RDWR)
        dying.close()
        server.join(30)
    assert asked


class _Answers204(HttpServer):
    def answer_to(self, request):
        return Answer(204)


def test_server_that_has_just_returned_replaces_one_that_leaves(tmp_path, connect):
    """nginx may still avoid the first server, for example during a rolling restart."""
    first, second = reserved_port(), reserved_port()
    variables = {
        "GRAPHSTASH_SERVER_1": f"127.0.0.1:{first}",
        "GRAPHSTASH_SERVER_2": f"127.0.0.1:{second}",
        "GRAPHSTASH_BLOB_DIR": str(tmp_path),
    }
    with Nginx(tmp_path / "nginx", variables=variables) as nginx:
        http = connect(nginx.url).http

        def statuses():
            return [http.get("/").status_code, http.put("/", content=b"a" * 20_000).status_code]

        with _Answers204(port=second):
            assert [statuses() for _ in range(4)] == [[204, 204]] * 4  # nginx now avoids the first
        with _Answers204(port=first):
            assert statuses() == [204, 204]


def test_access_log_is_json_without_secrets(nginx, through, api):
    token = through.acquire(ttl_seconds=60).json()["token"]
    through.http.delete(
        api.lease_path() + "?outcome=failed&token=hidden", headers={"Graphstash-Lease": token}
    )
    answer = through.http.get(api.path(), headers={"Authorization": "Bearer hidden-too"})
    assert not nginx.has_sent(answer.headers["x-request-id"])

    entries = [json.loads(line) for line in nginx.log.splitlines() if line.startswith("{")]
    assert entries[-1].keys() >= {"time", "client", "method", "path", "status", "seconds", "server"}
    for secret in (token, "hidden"):
        assert secret not in nginx.log
