"""What nginx answers by itself, in the form of all other refusals, and what it writes down."""

import json
import socket
import threading

import httpx
import pytest

from support.nginx import Nginx, in_front_of
from support.ports import reserved_port


def test_refusals_of_nginx_are_problem_documents(through, api, problem):
    problem(
        through.http.post(f"/v1/{api.namespace}/artifacts:lookup", content=b" " * 9_000_000),
        413,
        "too_large",
    )
    problem(through.http.get("/", headers={"X-Long": "x" * 100_000}), 431, "headers_too_large")


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/metrics", []),
        ("/metrics?x=1", []),
        ("//metrics", []),
        ("/./metrics", []),
        ("/%6Detrics", []),
        ("/x/../metrics", []),
        ("/metrics", ["Content-Length: 2", "", "{}"]),
        ("/metrics", ["Content-Length: 20000", "", "x" * 20000]),
    ],
)
def test_metrics_are_given_to_nobody(through, api, path, headers):
    """It would answer with those of either server."""
    assert "graphstash_hits_total" in api.http.get("/metrics").text  # the server itself gives them

    where = httpx.URL(through.url)
    head = [f"GET {path} HTTP/1.1", "Host: a", "Connection: close", *(headers or ["", ""])]
    with socket.create_connection((where.host, where.port), timeout=20) as client:
        client.sendall("\r\n".join(head).encode())
        received = b""
        while more := client.recv(1 << 20):
            received += more
    assert received.startswith(b"HTTP/1.1 404 "), received[:500]
    assert b"graphstash_" not in received
    assert b'"code":"unknown_path"' in received


def test_no_server_at_all_is_a_problem_that_passes(tmp_path, problem, connect):
    with Nginx(
        tmp_path / "nginx",
        variables={
            "GRAPHSTASH_SERVER_1": f"127.0.0.1:{reserved_port()}",
            "GRAPHSTASH_SERVER_2": f"127.0.0.1:{reserved_port()}",
            "GRAPHSTASH_BLOB_DIR": str(tmp_path),
        },
    ) as lonely:
        api = connect(lonely.url)
        for answer in (api.get(), api.put(b"blob" * 100_000), api.acquire()):
            assert problem(answer, 503, "unavailable")["retryable"] is True
            assert answer.headers["retry-after"] == "1"
        assert api.http.get("/nginx/healthz").status_code == 200


def test_a_server_that_dies_in_the_middle_of_a_call_is_not_missed(live_server, tmp_path, connect):
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


def test_too_many_connections_are_a_problem_that_passes(live_server, tmp_path, problem, connect):
    with in_front_of(
        live_server, tmp_path / "nginx", GRAPHSTASH_CONNECTIONS_PER_ADDRESS="1"
    ) as narrow:
        api = connect(narrow.url, "narrow")
        api.acquire(ttl_seconds=60)

        def wait():
            while api.acquire(wait=5).status_code == 503:
                pass

        waiter = threading.Thread(target=wait)
        waiter.start()
        while (answer := api.get()).status_code != 503:
            assert waiter.is_alive()
        waiter.join(30)
        problem(answer, 503, "unavailable", "GRAPHSTASH_CONNECTIONS_PER_ADDRESS")


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
