"""The server double for users' tests answers as the real server does, and fails on demand."""

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import get_args

import httpx
import pytest

from graphstash import CacheError, Reason, Stash
from graphstash.testing import FakeServer, ServerCall
from graphstash_schema import Digest, LeaseState, ManifestName
from graphstash_server.app import create_app
from graphstash_server.serving.server import KEEP_ALIVE_SECONDS
from graphstash_server.settings import Settings
from support.host import METADATA, key
from support.processes import python
from support.refusals import refusal
from support.waiting import PATIENT, PATIENT_VARIABLES, until_waiting

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
    with Stash(fake.config(cache_dir=tmp_path / "one", **PATIENT)) as stash:
        yield stash


@pytest.fixture
def other(fake, tmp_path):
    """The same stash on another host."""
    with Stash(fake.config(cache_dir=tmp_path / "other", **PATIENT)) as stash:
        yield stash


def conversation(url, namespace):
    """Return the answers to the calls whose bodies the double also reads."""
    artifact, run = f"/artifacts/{key(1)}", "/runs/one/p0"
    reported = {"started_at": "2026-01-01T12:00:00Z", "seconds": 3.0}
    wrong, sound = (
        {"key": asdict(key(1)), "reason": "corrupt", "digest": str(Digest.of(blob))}
        for blob in (b"other", b"graph")
    )
    steps = (
        *(("PUT", artifact, b"graph"), ("PUT", artifact, b"other"), ("GET", artifact, b"")),
        *(("POST", "/artifacts:verify", body) for body in (asdict(key(1)), {"kind": "no"})),
        *(("PUT", run, reported), ("PUT", run, reported | {"seconds": -1})),
        *(("PUT", run, reported | {"program": "long" * 20_000}), ("GET", "/runs/one", b"")),
        *(("POST", "/artifacts:report", body) for body in (wrong, sound, b"[")),
        ("GET", artifact, b""),
    )
    heard = []
    with httpx.Client(base_url=f"{url}/v1/{namespace}", timeout=30, trust_env=False) as http:
        for method, path, body in steps:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"repr-digest": Digest.of(content).repr_digest}
            answer = http.request(method, path, content=content, headers=headers)
            ran = re.sub(r'"(instance|detail)":"[^"]*"', "", answer.text)
            heard.append((method, path, answer.status_code, ran))
    return heard


def test_double_answers_calls_whose_bodies_it_reads_as_the_server_does(server, fake, namespace):
    real, ours = (conversation(each.url, namespace) for each in (server, fake))

    assert {status for _, _, status, _ in real} == {200, 201, 204, 400, 404, 409, 413}
    assert real == ours


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"status": 500}, Reason.SERVER_ERROR),
        ({"status": 503}, Reason.BUSY),
        ({"status": 507}, Reason.STORE_FULL),
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
    with Stash(fake.config(cache_dir=tmp_path / "one", **PATIENT)) as stash:
        stash.put(key(1), b"graph", METADATA)
        stash.put(key(2), b"other", METADATA)
    seconds = 0.5 if reason is Reason.TIMEOUT else 30
    settings = PATIENT | {"cache_dir": tmp_path / "two", "first_byte_seconds": seconds}
    with Stash(fake.config(**settings)) as stash, fake.fail_on("get", **fault) as failure:
        assert refusal(stash.get, key(1)).reason is reason
    assert failure.count >= 1
    assert [call.failure for call in fake.calls if call.operation == "get"][-1] is failure
    # The client reports this one, and the server then withholds it.
    if reason is not Reason.WRONG_KEY:
        with Stash(fake.config(cache_dir=tmp_path / "three", **PATIENT)) as stash:
            assert stash.get(key(1)) == b"graph"


@pytest.mark.parametrize(("status", "pause"), [(429, "1"), (503, "1"), (500, None), (404, None)])
def test_requested_status_asks_for_a_pause_only_if_the_server_is_busy(fake, status, pause):
    """A client pauses as long without this header, so only the header reveals the difference."""
    with fake.fail_on(status=status):
        answer = httpx.get(f"{fake.url}/v1/stats", trust_env=False)
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, pause)


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
    settings = PATIENT | {"first_byte_seconds": 60, "fetch_seconds": 60}
    with (
        Stash(fake.config(cache_dir=tmp_path / "two", **settings)) as patient,
        ThreadPoolExecutor(1) as pool,
    ):
        failure = fake.fail_on("get", fault="hang")
        got = pool.submit(patient.get, key(1))
        failure.wait()
        assert not got.done()
        failure.remove()
        assert got.result(60) == b"graph"
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
    """`fail_on()` also affects calls without a name of their own."""
    asked = [
        (method, re.sub(r"\{(\w+)\}", lambda found: NAMES.get(found[1], "x"), path))
        for path, methods in create_app(Settings()).openapi()["paths"].items()
        for method in methods
    ]
    body = b'{"key": %s, "reason": "corrupt", "digest": "%s"}'
    bodies = {
        "verify": json.dumps(asdict(key())).encode(),
        "report": body % (json.dumps(asdict(key())).encode(), str(Digest.of(b"x")).encode()),
    }
    with fake.fail_on(status=502), httpx.Client(base_url=fake.url, trust_env=False) as http:
        for method, path in asked:
            content = bodies.get(path.rpartition(":")[2])
            assert http.request(method, path, content=content).status_code == 502, (method, path)
    assert len(asked) > 20
    assert {call.operation for call in fake.calls} == set(get_args(ServerCall))


def test_double_requires_its_token(tmp_path):
    with FakeServer(token="secret") as fake:
        with Stash(fake.config(cache_dir=tmp_path, **PATIENT)) as stash:
            assert stash.get(key(1)) is None
        with Stash(fake.config(cache_dir=tmp_path, token="wrong", **PATIENT)) as stash:
            assert refusal(stash.get, key(1)).reason is Reason.UNAUTHENTICATED
        assert httpx.get(f"{fake.url}/healthz").status_code == 200


def test_double_that_starts_too_slowly_is_reported(monkeypatch):
    server = FakeServer()
    with monkeypatch.context() as hurried:
        hurried.setattr("graphstash.testing.server._SECONDS", 0.0)
        with pytest.raises(RuntimeError, match="did not start within 0 s"):
            server.start()
    assert server._ready.wait(60)
    server.close()


def test_memory_of_double_is_bounded(tmp_path):
    with (
        FakeServer(max_bytes=10_000) as fake,
        Stash(fake.config(cache_dir=tmp_path, **PATIENT)) as stash,
    ):
        stash.put(key(1), os.urandom(4000), METADATA)
        with pytest.raises(CacheError, match="max_bytes"):
            stash.put(key(2), os.urandom(6000), METADATA)
        with pytest.raises(CacheError, match="limit of this server is 10000"):
            stash.put(key(3), os.urandom(20_000), METADATA)
        assert [artifact.key for artifact in fake.artifacts] == [key(1)]


def test_clearing_answers_calls_that_wait_and_closing_ends_threads_and_socket(tmp_path):
    before = set(threading.enumerate())
    fake = FakeServer().start()
    assert fake._server.config.timeout_keep_alive == KEEP_ALIVE_SECONDS  # as the server
    with Stash(fake.config(cache_dir=tmp_path, **PATIENT)) as stash:
        stash.put(key(1), b"graph", METADATA)
        stash.server.acquire(key(2))

        def waiting(pool):
            return pool.submit(stash.server.acquire, key(2), wait_seconds=50)

        with ThreadPoolExecutor(2) as pool:
            cleared = waiting(pool)
            until_waiting(fake.url)
            fake.clear()
            assert cleared.result(60).state is LeaseState.HELD
            assert stash.server.acquire(key(2)).state is LeaseState.GRANTED
            stash.put(key(1), b"graph", METADATA)
            with fake.fail_on("acquire", fault="hang") as failure:
                closed = waiting(pool)
                failure.wait()
            fake.close()
            fake.close()
            assert closed.result(60).state is LeaseState.HELD
        with pytest.raises(CacheError):
            stash.get(key(3))
    assert set(threading.enumerate()) <= before
    assert len(fake.artifacts) == 1
    with pytest.raises(RuntimeError, match="make a new one"):
        fake.start()


def test_job_in_another_process_uses_double(fake, tmp_path):
    job = (
        "import graphstash; from graphstash_schema import ArtifactKey\n"
        "graphstash.install(hooks=('triton',))\n"
        f"key = ArtifactKey.parse('triton', {DEVICE!r}, 64 * 'a')\n"
        "print(graphstash.get_or_compile(key, lambda: b'compiled').decode())\n"
    )

    def run(host):
        variables = fake.environment(cache_dir=tmp_path / host) | PATIENT_VARIABLES
        return python(job, check=True, **variables).stdout

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


def test_double_is_imported_with_the_light_install_and_names_the_extra_for_its_start():
    program = """
        import sys
        import graphstash.testing
        print([n for n in ("httpx", "pytest", "torch", "fastapi") if n in sys.modules])
        sys.modules["uvicorn"] = None
        graphstash.testing.FakeServer()
    """
    ran = python(program)
    assert ran.stdout == "[]\n"
    assert "uvicorn is missing: " in ran.stderr
    assert "graphstash[server]" in ran.stderr


def test_settings_of_a_server_in_the_environment_do_not_reach_it(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHSTASH_DATABASE_URL", f"sqlite:///{tmp_path}/production.sqlite3")
    monkeypatch.setenv("GRAPHSTASH_AUTH", "tokens")
    with FakeServer() as fake, Stash(fake.config(cache_dir=tmp_path / "one", **PATIENT)) as stash:
        stash.put(key(1), b"graph", METADATA)
        assert len(fake.artifacts) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
