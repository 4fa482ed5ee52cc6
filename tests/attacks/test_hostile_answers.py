"""A server that answers to hurt: what a job parses, keeps and logs of its answers is bounded."""

import itertools
import json
import subprocess
import sys
import textwrap

import pytest

from graphstash import ClientConfig
from graphstash._http.client import ServerClient
from graphstash.errors import CacheError
from graphstash_schema import ManifestName
from support.hostile import Answer
from support.processes import graphstash
from support.reader_job import OWN

MEBIBYTE = 1024**2
JSON = {"content-type": "application/json", "graphstash-protocol": "1"}

_MANIFEST = "manifest(ManifestName('nightly'))"
_CALLS = {
    "manifest": _MANIFEST,
    "lookup": "lookup([key])",
    "lease": "acquire(key)",
    "statistics": "server_stats()",
    "verify": "verify(key)",
    "problem": _MANIFEST,
}

_NESTED = b'{"name":' + b"[" * 200_000
_BODIES = {
    "empty objects": b'{"name":"n","found":[%s],"missing":[],"entries":[%s],"namespaces":[%s]}'
    % ((b",".join([b"{}"] * 230_000),) * 3),
    "few objects": b'{"name":"n","found":[%s],"missing":[],"entries":[%s],"namespaces":[%s]}'
    % ((b",".join([b"{}"] * 15_000),) * 3),
    "numbers": b"[%s]" % b",".join([b"1"] * MEBIBYTE),
    "depth": _NESTED,
    "a long text": b'{"state":"%s","detail":"%s"}' % (b"x" * MEBIBYTE, b"y\\n" * MEBIBYTE),
    "too much": b" " * 64 * MEBIBYTE,
}

_JOB = textwrap.dedent(r"""
    import logging, re, sys, time
    from pathlib import Path
    from graphstash import ClientConfig
    from graphstash._http.client import ServerClient
    from graphstash.errors import CacheError
    from graphstash_schema import ArtifactKey, LookupRequest, ManifestName

    def peak():  # not ru_maxrss: that begins with the peak of the process that started this one
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

    client = ServerClient(ClientConfig.load({}, url=sys.argv[1], first_byte_seconds=30))
    key = ArtifactKey.parse("jax", "cpu-x86_64", "0" * 64)
    try:  # with an address where nobody answers, so that everything is imported
        ServerClient(ClientConfig.load({}, url="http://127.0.0.1:9")).server_stats()
    except CacheError:
        pass
    before = peak(), time.process_time()
    try:
        CALL
        print("answered")
    except CacheError as error:
        logging.getLogger("graphstash").warning("%s", error)
        print(error.reason)
    print(peak() - before[0], time.process_time() - before[1])
""")


def _cases():
    """Every body to one call, and one body to every call; the rest is extended."""
    for call in _CALLS:
        for body in _BODIES:
            is_first = call == "manifest" or body == "empty objects"
            yield pytest.param(call, body, marks=[] if is_first else pytest.mark.extended)


@pytest.mark.parametrize(("call", "body"), list(_cases()))
def test_an_answer_of_a_few_megabytes_takes_gigabytes(middlebox, call, body):
    status = 500 if call == "problem" else 200
    box = middlebox(lambda _, answer: Answer(status, dict(JSON), _BODIES[body]))
    program = _JOB.replace("CALL", f"client.{_CALLS[call]}")
    done = subprocess.run(
        [sys.executable, "-c", program, box.url],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    outcome, costs = done.stdout.splitlines()
    kibibytes, seconds = costs.split()
    assert outcome in {"protocol", "server_error"}
    assert int(kibibytes) < 50 * 1024
    assert float(seconds) < 5
    assert len(done.stderr.splitlines()) == 1
    assert len(done.stderr) < 3000


ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e\r\nWARNING graphstash: all is well"


def _told(box):
    client = ServerClient(ClientConfig.load({}, url=box.url))
    with pytest.raises(CacheError) as caught:
        client.manifest(ManifestName("nightly"))
    client.close()
    return str(caught.value)


def _assert_harmless(text):
    assert "owned" in text
    assert all(each.isprintable() or each == "\n" for each in text), text
    assert "\nWARNING" not in text


def test_a_problem_moves_the_cursor(middlebox):
    problem = {
        "type": "urn:graphstash:error:internal",
        "title": ESCAPE,
        "status": 500,
        "code": "internal",
        "detail": ESCAPE,
        "retryable": False,
        "instance": ESCAPE,
    }
    box = middlebox(lambda _, answer: Answer(500, dict(JSON), json.dumps(problem).encode()))
    _assert_harmless(_told(box))


@pytest.mark.parametrize("name", [ESCAPE, "x" * MEBIBYTE + "owned", ESCAPE * 10_000])
def test_the_name_of_a_holder_moves_the_cursor(middlebox, victim, key, fort, space, caplog, name):
    held = {"state": "held", "holder": name, "expires_in_seconds": 1}

    def hold(request, answer):
        if "/leases/" in request.path:
            return Answer(202, dict(JSON), json.dumps(held).encode())
        return answer

    box = middlebox(hold)
    job = victim(url=box.url, token=fort.token(f"write:{space}"), wait_seconds=0.0)
    assert job.build(key(1)) == OWN
    assert job.fallbacks == {"wait_budget": 1}
    told = [each.getMessage() for each in caplog.records]
    (message,) = (each for each in told if "wait_budget" in each)
    assert message.isprintable()
    assert len(message) < 30_000


def test_every_answer_names_another_holder_of_a_megabyte(middlebox, victim, key, fort, space):
    """The job keeps what it has waited for each of them."""
    numbers = itertools.count()

    def hold(request, answer):
        if "/leases/" in request.path:
            name = f"{next(numbers)}" + "x" * MEBIBYTE
            held = {"state": "held", "holder": name, "expires_in_seconds": 1}
            return Answer(202, dict(JSON), json.dumps(held).encode())
        return answer

    box = middlebox(hold)
    job = victim(url=box.url, token=fort.token(f"write:{space}"), wait_seconds=1.0)
    assert job.build(key(1)) == OWN
    assert job.fallbacks == {"wait_budget": 1}
    kept = job.cache.waits._spent_on
    assert len(kept) > 1
    assert sum(map(len, kept)) < 3000


_COUNTED = (
    *("artifacts", "size_bytes", "hits", "misses", "served_bytes", "puts", "conflicts"),
    "saved_seconds",
)


def test_the_version_of_a_server_moves_the_cursor(middlebox, tmp_path):
    stats = {
        "version": ESCAPE, "uptime_seconds": 1, "leases_held": 0, "waiters": 0, "healed": 0,
        "namespaces": [dict.fromkeys(_COUNTED, 0) | {"namespace": ESCAPE}],
    }  # fmt: skip
    box = middlebox(lambda _, answer: Answer(200, dict(JSON), json.dumps(stats).encode()))
    shown = graphstash("status", "--url", box.url, GRAPHSTASH_CACHE_DIR=str(tmp_path))
    assert shown.returncode == 0
    _assert_harmless(shown.stdout)


def test_the_name_of_a_job_moves_the_cursor(middlebox, tmp_path):
    info = {"id": ESCAPE, "description": ESCAPE, "created_by": ESCAPE, "grants": []}
    info["created_at"] = "2026-01-01T00:00:00Z"
    issued = {"token": f"gst_{'a' * 16}_{'b' * 43}", "info": info}
    box = middlebox(lambda _, answer: Answer(201, dict(JSON), json.dumps(issued).encode()))
    jwt = tmp_path / "jwt"
    jwt.write_text("a.b.c")
    options = ("--oidc", "--jwt-file", jwt, "--token-file", tmp_path / "token", "--url", box.url)
    shown = graphstash("login", *map(str, options))
    assert shown.returncode == 0, shown.stderr
    _assert_harmless(shown.stdout)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param("size_bytes", "1" + "0" * 400, id="larger than a float"),
        ("saved_seconds", "Infinity"),
        ("uptime_seconds", "1e999"),
    ],
)
def test_a_number_of_the_statistics_cannot_be_shown(middlebox, tmp_path, name, number):
    totals = ("uptime_seconds", "leases_held", "waiters", "healed", "namespaces")
    row = dict.fromkeys(_COUNTED, 0) | {"namespace": "n", name: "?"}
    stats = {"version": "1", **dict.fromkeys(totals, 0), "namespaces": [row], name: "?"}
    body = json.dumps(stats).replace('"?"', number).encode()
    box = middlebox(lambda _, answer: Answer(200, dict(JSON), body))
    shown = graphstash("status", "--url", box.url, GRAPHSTASH_CACHE_DIR=str(tmp_path))
    assert "Traceback" not in shown.stdout + shown.stderr
    assert len(shown.stdout) < 3000


@pytest.mark.parametrize("seconds", ["NaN", "-Infinity", "1e999"])
def test_a_lease_has_to_be_renewed_all_the_time(middlebox, victim, key, fort, space, seconds):
    granted = b'{"state":"granted","token":"a","fencing":1,"ttl_seconds":%s}' % seconds.encode()

    def grant(request, answer):
        return Answer(201, dict(JSON), granted) if "/leases/" in request.path else answer

    box = middlebox(grant)
    job = victim(url=box.url, token=fort.token(f"write:{space}"))
    assert job.build(key(1)) == OWN
    assert job.fallbacks == {"protocol": 1}


@pytest.mark.parametrize("token", ["ä", "a b", "a\r\nX: y", "x" * MEBIBYTE])
def test_the_token_of_a_lease_is_a_header_of_its_own(
    middlebox, victim, key, fort, space, token, caplog
):
    granted = {"state": "granted", "token": token, "fencing": 1, "ttl_seconds": 1e-9}

    def grant(request, answer):
        if "/leases/" in request.path:
            return Answer(201, dict(JSON), json.dumps(granted).encode())
        return answer

    box = middlebox(grant)
    job = victim(url=box.url, token=fort.token(f"write:{space}"))
    assert job.build(key(1)) == OWN
    assert job.fallbacks == {"protocol": 1}
    assert not any("x" in request.headers for request in box.requests)
