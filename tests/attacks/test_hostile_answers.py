"""A hostile server cannot make a job parse, keep or log more than a bounded amount."""

import io
import itertools
import json
import os

import pytest

from graphstash import ClientConfig
from graphstash._http.client import ServerClient
from graphstash.errors import CacheError, Reason, VerificationError
from graphstash_schema import Digest, ManifestName
from support.cases.answers import CALLS
from support.http_server import Answer
from support.processes import graphstash_here
from support.reader_job import OWN
from support.run_case import RUN_CASE, case_arguments
from support.waiting import PATIENT, PATIENT_VARIABLES

MEBIBYTE = 1024**2
JSON = {"content-type": "application/json", "graphstash-protocol": "1"}

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


def _pairs(*, is_quick):
    """Return all pairs of call and body, or only those with one call or with one body."""
    return [
        (call, body)
        for call in CALLS
        for body in _BODIES
        if not is_quick or call == "manifest" or body == "empty objects"
    ]


def test_answer_of_megabytes_costs_bounded_memory_and_time(middlebox, jobs, tmp_path, is_extended):
    """All calls run in one process. The first one imports every module and is not measured."""
    pairs = [("statistics", "few objects"), *_pairs(is_quick=not is_extended)]
    remaining = iter(pairs)

    def change(_request, _answer):
        call, body = next(remaining)
        return Answer(500 if call == "problem" else 200, dict(JSON), _BODIES[body])

    arguments = case_arguments(
        "answers:costs_of", url=middlebox(change).url, calls=[call for call, _ in pairs]
    )
    done = jobs.start(tmp_path, *arguments, script=RUN_CASE, under="python").finish()

    logged = done.errors.splitlines()
    assert len(done.report) == len(logged) == len(pairs)
    assert max(map(len, logged)) < 3000
    for pair, (outcome, kib, seconds) in list(zip(pairs, done.report, strict=True))[1:]:
        assert outcome in {"protocol", "server_error"}, pair
        assert kib < 50 * 1024, pair
        assert seconds < 5, pair


_LIES = (
    ({"content-length": "99999"}, "truncated"),
    ({"content-length": "7"}, "digest_mismatch"),
    ({"repr-digest": Digest.of(b"other").repr_digest}, "digest_mismatch"),
    ({"repr-digest": "sha-256=:AAAA:"}, "protocol"),
    ({"repr-digest": "md5=:AAAA:"}, "protocol"),
    ({"graphstash-metadata": "%%%"}, "protocol"),
    ({"graphstash-protocol": "2"}, "protocol"),
    ({"content-encoding": "gzip"}, None),
    ({"content-range": "bytes 0-1/99999"}, None),
)


def test_false_header_is_detected_or_ignored(fort, space, key, publish, middlebox, victim):
    """The client checks the bytes against the headers about them, and ignores other headers."""
    payload = os.urandom(20_000)
    publish(key(), payload)
    box = middlebox()
    reader = {"url": box.url, "token": fort.token(f"read:{space}"), "read_only": True}
    with fort.withstands() as refused:
        for headers, reason in _LIES:

            def lying(request, answer, headers=headers):
                if request.method == "GET" and answer.status == 200:
                    answer.headers |= headers
                return answer

            box.change = lying
            job = victim(**reader)
            assert job.build(key()) == (payload if reason is None else OWN), headers
            assert job.fallbacks == ({} if reason is None else {reason: 1}), headers
    assert refused == {}


ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e\r\nWARNING graphstash: all is well"


def _told(box):
    client = ServerClient(ClientConfig.load({}, url=box.url, **PATIENT))
    with pytest.raises(CacheError) as caught:
        client.manifest(ManifestName("nightly"))
    client.close()
    return str(caught.value)


def _assert_harmless(text):
    assert "owned" in text
    assert all(each.isprintable() or each == "\n" for each in text), text
    assert "\nWARNING" not in text


def test_escape_sequences_in_a_problem_are_not_printed(middlebox):
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


@pytest.fixture
def leased(middlebox, victim, key, fort, space):
    """Start a job that compiles graphs, behind a server that replies to lease requests itself."""

    def build(replies, *, graphs=1, **settings):
        def change(_request, answer):
            if answer is not None:
                return answer
            status, reply = next(replies)
            return Answer(status, dict(JSON), reply.encode())

        box = middlebox(change)
        ask = box.ask
        box.ask = lambda request: None if "/leases/" in request.path else ask(request)
        job = victim(url=box.url, token=fort.token(f"write:{space}"), **settings)
        for number in range(graphs):
            assert job.build(key(number)) == OWN
        return job, box

    return build


def _held_by(name, *, seconds=1):
    reply = {"state": "held", "holder": name, "expires_in_seconds": seconds}
    return 202, json.dumps(reply)


def test_job_stops_waiting_after_false_ready_replies(leased):
    """The server replies `held`, then `ready`, but has no artifact. The wait counts as failed."""
    nothing = {"state": "ready", "digest": "sha256:" + "0" * 64, "size_bytes": 1}
    ready = (200, json.dumps(nothing))
    replies = itertools.cycle([_held_by("h", seconds=60), ready, ready, ready])
    job, box = leased(replies, graphs=12, wait_seconds=60)
    asked = [each.headers["prefer"] for each in box.to("/leases/", method="POST")]
    assert job.compiles == 12
    assert len(asked) - asked.count("wait=0") == 3 * 3  # three waits of three requests each


@pytest.mark.parametrize("name", [ESCAPE, "x" * MEBIBYTE + "owned", ESCAPE * 10_000])
def test_holder_name_is_logged_printable_and_bounded(leased, caplog, name):
    job, _ = leased(itertools.repeat(_held_by(name)), wait_seconds=0.0)
    assert job.fallbacks == {"wait_budget": 1}
    messages = [each.getMessage() for each in caplog.records]
    (message,) = (each for each in messages if "wait_budget" in each)
    assert message.isprintable()
    assert len(message) < 30_000


def test_download_stops_after_the_size_in_its_headers(fort, space, key, publish, middlebox):
    """`Transfer-Encoding` overrides `Content-Length`. The client closes the connection."""
    publish(key(1), OWN)
    piece = b"100000\r\n" + b"x" * MEBIBYTE + b"\r\n"

    def change(_request, answer):
        headers = answer.headers | {
            "content-length": str(len(answer.body)),
            "transfer-encoding": "chunked",
        }
        return Answer(200, headers, piece * 32 + b"0\r\n\r\n")

    token = fort.token(f"read:{space}")
    config = ClientConfig.load(
        {}, url=middlebox(change).url, namespace=space, token=token, **PATIENT
    )
    client, received = ServerClient(config), io.BytesIO()
    with pytest.raises(VerificationError) as caught:
        client.download(key(1), received)
    client.close()
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    assert 0 < received.seek(0, io.SEEK_END) <= MEBIBYTE


def test_long_holder_names_take_bounded_memory(leased):
    """The job stores the time that it waited for each holder, but bounds the length of the name."""
    replies = (_held_by(f"{number}" + "x" * MEBIBYTE) for number in itertools.count())
    job, _ = leased(replies, wait_seconds=1.0)
    assert job.fallbacks == {"wait_budget": 1}
    kept = job.cache.waits._spent_on
    assert len(kept) > 1
    assert sum(map(len, kept)) < 3000


@pytest.mark.parametrize(
    ("token", "seconds"),
    [
        *(("a", seconds) for seconds in ("NaN", "-Infinity", "1e999")),
        *((token, "1e-9") for token in ("ä", "a b", "a\r\nX: y", "x" * MEBIBYTE)),
    ],
    ids=lambda each: each[:9].encode("ascii", "replace").decode(),
)
def test_lease_with_an_invalid_duration_or_token_is_refused(leased, token, seconds):
    granted = {"state": "granted", "token": token, "fencing": 1, "ttl_seconds": "?"}
    text = json.dumps(granted).replace('"?"', seconds)
    job, box = leased(itertools.repeat((201, text)))
    assert job.fallbacks == {"protocol": 1}
    assert not any("x" in request.headers for request in box.requests)


_COUNTED = (
    *("artifacts", "size_bytes", "hits", "misses", "served_bytes", "puts", "conflicts"),
    "saved_seconds",
)


def _status(middlebox, tmp_path, body):
    box = middlebox(lambda _, answer: Answer(200, dict(JSON), body.encode()))
    variables = PATIENT_VARIABLES | {"GRAPHSTASH_CACHE_DIR": str(tmp_path)}
    return graphstash_here("status", "--url", box.url, **variables)


def _statistics(row, **fields):
    totals = dict.fromkeys(("uptime_seconds", "leases_held", "waiters", "healed"), 0)
    counted = dict.fromkeys(_COUNTED, 0) | {"namespace": "n"} | row
    return json.dumps({"version": "1", **totals, "namespaces": [counted], **fields})


def test_status_prints_no_escape_sequence_of_a_server(middlebox, tmp_path):
    body = _statistics({"namespace": ESCAPE}, version=ESCAPE)
    shown = _status(middlebox, tmp_path, body)
    assert shown.returncode == 0
    _assert_harmless(shown.stdout)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("size_bytes", "1" + "0" * 400),
        ("store_limit_bytes", "1" + "0" * 400),
        ("saved_seconds", "Infinity"),
        ("uptime_seconds", "1e999"),
    ],
    ids=["larger than a float", "limit larger than a float", "infinity", "exponent"],
)
def test_status_survives_numbers_that_no_float_holds(middlebox, tmp_path, name, number):
    body = _statistics({name: "?"}, **{name: "?"}).replace('"?"', number)
    shown = _status(middlebox, tmp_path, body)
    assert "Traceback" not in shown.stdout + shown.stderr
    assert len(shown.stdout) < 3000


def test_login_prints_no_escape_sequence_of_a_server(middlebox, tmp_path):
    info = {"id": ESCAPE, "description": ESCAPE, "created_by": ESCAPE, "grants": []}
    info["created_at"] = "2026-01-01T00:00:00Z"
    issued = {"token": f"gst_{'a' * 16}_{'b' * 43}", "info": info}
    box = middlebox(lambda _, answer: Answer(201, dict(JSON), json.dumps(issued).encode()))
    jwt = tmp_path / "jwt"
    jwt.write_text("a.b.c")
    options = ("--oidc", "--jwt-file", jwt, "--token-file", tmp_path / "token", "--url", box.url)
    shown = graphstash_here("login", *map(str, options), **PATIENT_VARIABLES)
    assert shown.returncode == 0, shown.stderr
    _assert_harmless(shown.stdout)
