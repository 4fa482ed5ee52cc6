"""The server that users test with: it answers as the real server does, and fails on demand."""

import json
import os
import re
import subprocess
import sys
import threading
from typing import get_args

import httpx
import pytest

from graphstash import CacheError, Reason, Stash
from graphstash.testing import FakeServer, ServerCall
from graphstash_schema import ArtifactMetadata, Digest, LeaseState, ManifestName
from graphstash_server.app import create_app
from graphstash_server.serving.server import KEEP_ALIVE_SECONDS
from graphstash_server.settings import Settings
from support.host import key
from support.processes import python
from support.refusals import refusal
from support.waiting import until_waiting

METADATA = ArtifactMetadata(compile_seconds=3.0, raw_size_bytes=5)
DEVICE = key().device_type
NAMES = {
    "namespace": "team",
    "kind": "triton",
    "device_type": DEVICE,
    "fingerprint": 64 * "a",
    "name": "job",
    "run": "one",
    "process": "p0",
    "manifest": "job",
}


@pytest.fixture
def fake():
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def stash(fake, tmp_path):
    with Stash(fake.config(cache_dir=tmp_path / "one")) as stash:
        yield stash


@pytest.fixture
def other(fake, tmp_path):
    """The same on another host."""
    with Stash(fake.config(cache_dir=tmp_path / "other")) as stash:
        yield stash


def conversation(url, namespace):
    """What a server answers, step by step: status, the headers that clients use, and the body."""
    heard = []
    with httpx.Client(base_url=f"{url}/v1/{namespace}", timeout=30, trust_env=False) as http:

        def ask(method, path, *, content=b"", **headers):
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            answer = http.request(method, path, content=content, headers=sent)
            told = answer.headers
            kept = ("content-type", "etag", "repr-digest", "graphstash-metadata", "location")
            body = answer.content
            if body and "json" in told.get("content-type", ""):
                body = answer.json()
                free = ("instance", "detail", "limit", "token", "used_at", "created_at")
                for each in (*free, "newest_withdrawal"):
                    body.pop(each, None)
                for entry in body.get("entries", ()):
                    entry.pop("used_at")
            heard.append(
                (method, path, answer.status_code, {name: told.get(name) for name in kept}, body)
            )
            assert told["graphstash-protocol"] == "1"
            return answer

        def put(path, blob, digest=None, **headers):
            announced = Digest.of(digest if digest is not None else blob).repr_digest
            return ask("PUT", path, content=blob, repr_digest=announced, **headers)

        here, there = f"/artifacts/{key(1)}", f"/artifacts/{key(2)}"
        body = key(1).model_dump_json().encode()
        ask("GET", here)
        ask("HEAD", here)
        ask("POST", "/artifacts:verify", content=body)
        put(here, b"graph", digest=b"other")
        ask("PUT", here, content=b"graph", repr_digest="sha-256=:nonsense:")
        ask("PUT", here, content=b"graph")
        put(here, b"graph", graphstash_metadata="nonsense")
        put(here, b"graph", graphstash_metadata=METADATA.to_header())
        put(here, b"graph")
        put(here, b"graph", if_none_match="*")
        put(here, b"other")
        put(there, b"")
        ask("GET", here)
        ask("HEAD", here)
        ask("GET", there)
        ask("POST", "/artifacts:verify", content=body)
        ask("GET", f"/artifacts/strange/{DEVICE}/{1:064x}")
        ask("GET", f"/artifacts/jax/{DEVICE}/short")
        ask("GET", here, graphstash_protocol="2")
        ask("PATCH", here)
        ask("GET", "/nowhere")
        ask("POST", "/artifacts:lookup", content=b'{"keys": []}')
        ask("POST", "/artifacts:lookup", content=b"[")
        keys = ", ".join(key(number).model_dump_json() for number in (3, 1, 2, 1))
        ask("POST", "/artifacts:lookup", content=f'{{"keys": [{keys}]}}'.encode())
        many = ", ".join(key(number).model_dump_json() for number in range(1001))
        ask("POST", "/artifacts:lookup", content=f'{{"keys": [{many}]}}'.encode())

        lease = f"/leases/{key(3)}"
        ask("PUT", lease)
        ask("PUT", lease, graphstash_lease="nonsense")
        ask("POST", f"/leases/{key(1)}")
        ask("POST", lease, content=b'{"ttl_seconds": 0}')
        http.post(lease, content=b'{"holder": "first"}')
        token = http.delete(f"{lease}?outcome=failed", headers={"graphstash-lease": "another"})
        heard.append(token.status_code)
        first = http.post(f"/leases/{key(4)}", content=b'{"holder": "first"}')
        token = first.json()["token"]
        heard.append((first.status_code, sorted(first.json())))
        held = http.post(f"/leases/{key(4)}", headers={"prefer": "wait=0"})
        heard.append((held.status_code, held.json()["holder"], held.headers["retry-after"]))
        heard.append(held.headers["preference-applied"])
        renewed = http.put(f"/leases/{key(4)}", headers={"graphstash-lease": token})
        heard.append((renewed.status_code, sorted(renewed.json())))
        ask("DELETE", f"/leases/{key(4)}?outcome=nonsense", graphstash_lease=token)
        ask("DELETE", f"/leases/{key(4)}?outcome=failed", graphstash_lease=token)
        ask("DELETE", f"/leases/{key(4)}?outcome=failed", graphstash_lease=token)
        ask("PUT", f"/leases/{key(4)}", graphstash_lease=token)

        ask("GET", "/manifests/job")
        ask("PUT", "/manifests/job", content=f'{{"keys": [{keys}]}}'.encode())
        ask("PUT", "/manifests/job", content=f'{{"keys": [{body.decode()}]}}'.encode())
        ask("GET", "/manifests/job")
        ask("PUT", "/manifests/job", content=b'{"keys": []}')
        ask("GET", "/manifests/-no-name")

        def run(started_at, seconds, **fields):
            missed = {"key": key(1).model_dump(), "seconds": seconds, "label": "jit(step)"}
            counts = {"kind": "jax", "device_type": DEVICE, "misses": 1, "compile_seconds": seconds}
            told = {"started_at": started_at, "seconds": seconds, "counts": [counts]}
            return json.dumps({**told, "misses": [missed], **fields}).encode()

        noon, later = "2026-01-01T12:00:00Z", "2026-01-01T12:00:01Z"
        ask("GET", "/runs")
        ask("GET", "/runs/one")
        ask("PUT", "/runs/one/p1", content=run(later, 2.0, program="later.py", job="other"))
        ask("PUT", "/runs/one/p0", content=run(noon, 3.0, program="train.py", job="nightly"))
        ask("PUT", "/runs/two/p0", content=run(noon, 1.0))
        ask("PUT", "/runs/one/p1", content=run(later, 4.0, program="later.py"))
        ask("PUT", "/runs/one/p1", content=run(noon, -1.0))
        ask("PUT", "/runs/one/p1", content=run(noon, 1.0, program="long" * 20_000))
        ask("PUT", "/runs/one/-no-name", content=run(noon, 1.0))
        ask("GET", "/runs/one")
        ask("GET", "/runs")
        ask("GET", "/runs?job=nightly")
        ask("GET", "/runs?job=-no-name")
        ask("GET", "/runs?limit=1")
        ask("GET", "/runs?limit=0")

        def report(reason, digest):
            text = f'{{"key": {body.decode()}, "reason": "{reason}", "digest": "{digest}"}}'
            ask("POST", "/artifacts:report", content=text.encode())

        report("corrupt", Digest.of(b"other"))
        report("unsigned", Digest.of(b"graph"))
        report("nonsense", Digest.of(b"graph"))
        ask("GET", here)
        report("corrupt", Digest.of(b"graph"))
        ask("GET", here)
        put(here, b"graph")
        ask("POST", "/artifacts:lookup", content=f'{{"keys": [{keys}]}}'.encode())
        ask("DELETE", here)
        ask("DELETE", here)
        http.base_url = url
        empty = http.put(f"/v1/{namespace}-empty/runs/one/p0", content=run(noon, 1.0))
        heard.append((empty.status_code, empty.json()["code"]))
        heard += [(path, http.get(path).json()["status"]) for path in ("/healthz", "/readyz")]
    return heard


def test_double_answers_every_call_as_the_server_does(server, fake, namespace):
    real = conversation(server.url, namespace)
    ours = conversation(fake.url, namespace)

    assert len(real) > 50
    differences = [pair for pair in zip(real, ours, strict=True) if pair[0] != pair[1]]
    assert differences == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"status": 500}, Reason.SERVER_ERROR),
        ({"status": 503}, Reason.BUSY),
        ({"status": 403}, Reason.FORBIDDEN),
        ({"fault": "reset"}, Reason.RESET),
        ({"fault": "hang"}, Reason.TIMEOUT),
        ({"fault": "truncate"}, Reason.TRUNCATED),
        ({"fault": "flip"}, Reason.DIGEST_MISMATCH),
        ({"fault": "wrong_artifact"}, Reason.WRONG_KEY),
        ({"fault": "stranger"}, Reason.PROTOCOL),
    ],
    ids=str,
)
def test_requested_failure_of_download_ends(fake, tmp_path, fault, reason):
    with Stash(fake.config(cache_dir=tmp_path / "one")) as stash:
        stash.put(key(1), b"graph", METADATA)
        stash.put(key(2), b"other", METADATA)
    seconds = 0.5 if reason is Reason.TIMEOUT else 30
    settings = {"cache_dir": tmp_path / "two", "first_byte_seconds": seconds}
    with Stash(fake.config(**settings)) as stash, fake.fail_on("get", **fault) as failure:
        assert refusal(stash.get, key(1)).reason is reason
    assert failure.count >= 1
    assert [call.failure for call in fake.calls if call.operation == "get"][-1] is failure
    if reason is not Reason.WRONG_KEY:  # which the client reports, so that nobody gets it any more
        with Stash(fake.config(cache_dir=tmp_path / "three")) as stash:
            assert stash.get(key(1)) == b"graph"


def test_failures_are_limited_by_number_kind_key_and_namespace(fake, stash, other):
    for number in (1, 2):
        stash.put(key(number), b"graph", METADATA)
    stash.put(key(1, "jax"), b"graph", METADATA)
    twice = fake.fail_on("get", times=2, key=key(2))
    for failure in (
        fake.fail_on("get", kind="triton"),
        fake.fail_on("get", key=key(9)),
        fake.fail_on("get", namespace="elsewhere"),
        fake.fail_on("put"),
    ):
        assert other.get(key(1)) == b"graph"
        other.forget(key(1))
        assert failure.count == 0
    for _ in range(2):
        with pytest.raises(CacheError):
            other.get(key(2))
    assert other.get(key(2)) == b"graph"
    assert twice.count == 2
    assert fake.count("get", key=key(2)) == 3
    with fake.fail_on("get", kind="jax"), pytest.raises(CacheError):
        other.get(key(1, "jax"))
    fake.recover()
    assert other.get(key(1, "jax")) == b"graph"


@pytest.mark.parametrize(
    ("operation", "settings"),
    [
        ("download", {}),
        *(("get", each) for each in ({"fault": "explode"}, {"status": 200}, {"times": 0})),
    ],
)
def test_failure_of_unknown_call_is_refused(fake, operation, settings):
    with pytest.raises(ValueError, match=r"explode|download|status|times"):
        fake.fail_on(operation, **settings)


def test_hanging_call_is_answered_when_its_failure_ends(fake, stash, tmp_path):
    stash.put(key(1), b"graph", METADATA)
    settings = {"first_byte_seconds": 60, "fetch_seconds": 60}
    got = []
    with Stash(fake.config(cache_dir=tmp_path / "two", **settings)) as patient:
        failure = fake.fail_on("get", fault="hang")
        thread = threading.Thread(target=lambda: got.append(patient.get(key(1))))
        thread.start()
        failure.wait()
        assert got == []
        failure.remove()
        thread.join(60)
    assert got == [b"graph"]
    with pytest.raises(TimeoutError, match="1 of 2 calls"):
        failure.wait(count=2, timeout_seconds=0)


def test_double_shows_received_requests(fake, stash):
    stash.put(key(1), b"graph", METADATA)
    stash.server.update_manifest(ManifestName("job"), [key(1)])
    (artifact,) = fake.artifacts
    assert (artifact.namespace, artifact.key, artifact.is_withheld) == ("default", key(1), False)
    assert artifact.metadata.compile_seconds == 3.0
    assert [call.operation for call in fake.calls] == ["put", "put_manifest"]
    assert fake.calls[0].headers["graphstash-protocol"] == "1"
    assert (fake.count(), fake.count(namespace="elsewhere")) == (2, 0)
    fake.clear()
    assert (fake.artifacts, fake.calls) == ((), ())
    stash.forget(key(1))
    assert stash.get(key(1)) is None


def test_every_call_of_the_server_can_fail(fake):
    """`fail_on()` also reaches calls that have no name of their own."""
    asked = [
        (method, re.sub(r"\{(\w+)\}", lambda found: NAMES.get(found[1], "x"), path))
        for path, methods in create_app(Settings()).openapi()["paths"].items()
        for method in methods
    ]
    body = b'{"key": %s, "reason": "corrupt", "digest": "%s"}'
    bodies = {
        "verify": key().model_dump_json().encode(),
        "report": body % (key().model_dump_json().encode(), str(Digest.of(b"x")).encode()),
    }
    with fake.fail_on(status=502), httpx.Client(base_url=fake.url, trust_env=False) as http:
        for method, path in asked:
            content = bodies.get(path.rpartition(":")[2])
            assert http.request(method, path, content=content).status_code == 502, (method, path)
    assert len(asked) > 20
    assert {call.operation for call in fake.calls} == set(get_args(ServerCall))


def test_double_requires_its_token(tmp_path):
    with FakeServer(token="secret") as fake:
        with Stash(fake.config(cache_dir=tmp_path)) as stash:
            assert stash.get(key(1)) is None
        with Stash(fake.config(cache_dir=tmp_path, token="wrong")) as stash:
            assert refusal(stash.get, key(1)).reason is Reason.UNAUTHENTICATED
        assert httpx.get(f"{fake.url}/healthz").status_code == 200


def test_memory_of_double_is_bounded(tmp_path):
    with (
        FakeServer(max_bytes=10_000) as fake,
        Stash(fake.config(cache_dir=tmp_path)) as stash,
    ):
        stash.put(key(1), os.urandom(4000), METADATA)
        with pytest.raises(CacheError, match="max_bytes"):
            stash.put(key(2), os.urandom(6000), METADATA)
        with pytest.raises(CacheError, match="limit of this server is 10000"):
            stash.put(key(3), os.urandom(20_000), METADATA)
        assert [artifact.key for artifact in fake.artifacts] == [key(1)]


def test_closed_double_does_not_start_again():
    fake = FakeServer().start()
    fake.close()
    with pytest.raises(RuntimeError, match="make a new one"):
        fake.start()


def test_double_keeps_idle_connections_as_long_as_the_server():
    with FakeServer() as fake:
        config = fake._real._server.config
        assert config.timeout_keep_alive == KEEP_ALIVE_SECONDS


def test_closing_double_ends_its_threads_and_socket(tmp_path):
    before = set(threading.enumerate())
    fake = FakeServer().start()
    with Stash(fake.config(cache_dir=tmp_path)) as stash:
        stash.put(key(1), b"graph", METADATA)
        stash.server.acquire(key(2))
        answers = []

        def wait():
            answers.append(stash.server.acquire(key(2), wait_seconds=50).state)

        waiter = threading.Thread(target=wait)
        with fake.fail_on("acquire", fault="hang") as failure:
            waiter.start()
            failure.wait()
        fake.close()
        fake.close()
        waiter.join(60)
        assert answers == [LeaseState.HELD]
        with pytest.raises(CacheError):
            stash.get(key(3))
    assert set(threading.enumerate()) <= before
    assert len(fake.artifacts) == 1


def test_job_in_another_process_uses_double(fake, tmp_path):
    job = (
        "import graphstash; from graphstash_schema import ArtifactKey\n"
        "graphstash.install(hooks=('triton',))\n"
        f"key = ArtifactKey.parse('triton', {DEVICE!r}, 64 * 'a')\n"
        "print(graphstash.get_or_compile(key, lambda: b'compiled').decode())\n"
    )

    def run(host):
        return python(job, check=True, **fake.environment(cache_dir=tmp_path / host)).stdout

    with fake.fail_on():
        assert run("one") == "compiled\n"
    assert fake.artifacts == ()
    fake.clear()
    assert run("two") == run("three") == "compiled\n"
    assert (fake.count("put"), len(fake.artifacts)) == (1, 1)
    assert fake.count("put_run") == 2
    cold, warm = (report.counts[0] for report in fake.reports)
    assert (cold.misses, cold.hits_server) == (1, 0)
    assert (warm.misses, warm.hits_server + warm.hits_prefetched) == (0, 1)


def test_importing_double_needs_only_the_light_install():
    program = (
        "import sys, graphstash.testing\n"
        "print([n for n in ('httpx', 'pytest', 'torch', 'fastapi') if n in sys.modules])"
    )
    command = [sys.executable, "-I", "-c", program]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"


def test_without_the_packages_of_a_server_it_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "graphstash.testing.real", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ModuleNotFoundError, match=r"uvicorn is missing: .*graphstash\[server\]"):
        FakeServer()


def test_settings_of_a_server_in_the_environment_do_not_reach_it(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHSTASH_DATABASE_URL", f"sqlite:///{tmp_path}/production.sqlite3")
    monkeypatch.setenv("GRAPHSTASH_AUTH", "tokens")
    with FakeServer() as fake, Stash(fake.config(cache_dir=tmp_path / "one")) as stash:
        stash.put(key(1), b"graph", METADATA)
        assert len(fake.artifacts) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_clearing_answers_calls_that_wait_and_keeps_the_port(fake, stash):
    stash.server.acquire(key(1))
    answers = []

    def wait():
        answers.append(stash.server.acquire(key(1), wait_seconds=50).state)

    waiter = threading.Thread(target=wait)
    waiter.start()
    until_waiting(fake.url)
    fake.clear()
    waiter.join(60)
    assert answers == [LeaseState.HELD]
    assert stash.server.acquire(key(1)).state is LeaseState.GRANTED
