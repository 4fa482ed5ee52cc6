"""What nginx answers by itself, in the form of all other refusals, and what it writes down."""

import json
import socket
import threading

from support.nginx import Nginx, in_front_of
from support.ports import reserved_port
from support.wire import Wire


def test_refusals_of_nginx_are_problem_documents(through, api, problem):
    problem(
        through.http.post(f"/v1/{api.namespace}/artifacts:lookup", content=b" " * 9_000_000),
        413,
        "too_large",
    )
    problem(through.http.get("/", headers={"X-Long": "x" * 100_000}), 431, "headers_too_large")


def test_metrics_are_not_reachable_through_nginx(through, api):
    """It would answer with those of either server."""
    assert "graphstash_hits_total" in api.http.get("/metrics").text  # the server itself gives them

    with_body = ("Content-Length: 2", "", "{}"), ("Content-Length: 20000", "", "x" * 20000)
    ways = ("/metrics", "/metrics?x=1", "//metrics", "/./metrics", "/%6Detrics", "/x/../metrics")
    for path, more in (*((way, ("", "")) for way in ways), *(("/metrics", b) for b in with_body)):
        head = "\r\n".join([f"GET {path} HTTP/1.1", "Host: a", "Connection: close", *more])
        with Wire(through.url) as wire:
            answer = wire.ask(head.encode())
        assert (answer.status, answer.problem["code"]) == (404, "unknown_path"), path
        assert b"graphstash_" not in answer.body


def test_missing_servers_give_temporary_problem_document(tmp_path, problem, connect):
    """What a caller wrote into the query and the headers is in neither log."""
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
    """It has the whole request when it goes, as one that is killed does."""
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


def test_the_access_log_is_json_without_secrets(nginx, through, api):
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
