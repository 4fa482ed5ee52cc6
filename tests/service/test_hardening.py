"""Attacks on the HTTP layer: each ends in a refusal or a closed connection, the store untouched."""

import base64
import hashlib
import time
import zlib

import pytest

from graphstash_schema import Digest
from support.wire import Wire

DEVICE = "cpu-x86_64-0123456789abcdef"
PATH = f"/v1/attack/artifacts/jax/{DEVICE}/{'0' * 64}"
HEAD = f"PUT {PATH} HTTP/1.1\r\nHost: a\r\n"
LOOKUP = "POST /v1/attack/artifacts:lookup HTTP/1.1\r\nHost: a\r\n"
HEALTH = "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
DIGEST = f"Repr-Digest: {Digest.of(b'x').repr_digest}\r\n"
SENT = HEAD + DIGEST
CHUNKED = LOOKUP + "Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def wire(live_server):
    with Wire(live_server.url) as wire:
        yield wire


@pytest.fixture(autouse=True)
def _untouched_store(files):
    before = files()
    yield
    assert files() == before


@pytest.mark.parametrize(
    "request_head",
    [
        pytest.param(SENT + "Content-Length: 1\r\nContent-Length: 1\r\n\r\nx", id="lengths"),
        pytest.param(SENT + "Content-Length: 1\r\nContent-Length: 5\r\n\r\nx", id="conflict"),
        pytest.param(SENT + "Content-Length: 1, 1\r\n\r\nx", id="length-list"),
        pytest.param(SENT + "Content-Length: +1\r\n\r\nx", id="plus"),
        pytest.param(SENT + "Content-Length: -1\r\n\r\nx", id="negative"),
        pytest.param(SENT + "Content-Length: 0x1\r\n\r\nx", id="hexadecimal"),
        pytest.param(SENT + f"Content-Length: {'9' * 30}\r\n\r\nx", id="huge-length"),
        pytest.param(
            SENT + "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            id="length-and-chunks",
        ),
        pytest.param(HEAD + "Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n", id="chunks"),
        pytest.param(CHUNKED + "2\r\n{}\r\n0\r\n\r\n", id="chunked-json"),
        pytest.param(LOOKUP + "Transfer-Encoding: xchunked\r\n\r\n{}", id="unknown-coding"),
        pytest.param(CHUNKED.replace(":", " :") + "0\r\n\r\n", id="space-before-colon"),
        pytest.param(HEAD + "X-Folded: a\r\n b\r\n\r\n", id="folded-line"),
        pytest.param(HEAD.replace("\r\n", "\n") + "\n", id="bare-newline"),
        pytest.param("GET /healthz\r\n\r\n", id="http-0.9"),
        pytest.param(HEALTH.replace("1.1", "2.0"), id="http-2"),
        pytest.param(HEALTH.replace("1.1", "1.2"), id="http-1.2"),
        pytest.param(HEALTH.replace("/healthz", "http://elsewhere/healthz"), id="whole-url"),
        pytest.param(HEALTH.replace("/healthz", "http://elsewhere"), id="url-without-path"),
        pytest.param(HEALTH.replace("GET /healthz", "OPTIONS *"), id="asterisk"),
        pytest.param(HEALTH.replace("GET /healthz", "CONNECT elsewhere:443"), id="connect"),
        pytest.param(HEALTH.replace("Host: a\r\n", ""), id="no-host"),
        pytest.param(HEALTH.replace("Host: a", "Host: a\r\nHost: b"), id="two-hosts"),
        pytest.param(HEALTH.replace("GET", "BREW"), id="unknown-method"),
        pytest.param(HEALTH.replace("healthz", "health\0z"), id="nul-in-path"),
        pytest.param(HEALTH.replace("healthz", "health\xffz"), id="raw-byte-in-path"),
        pytest.param("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="tls-to-plain"),
        pytest.param("\x00\x01\x02\x03" * 64, id="garbage"),
    ],
)
def test_a_malformed_request_is_refused(wire, request_head):
    answer = wire.ask(request_head.encode("latin-1"))

    assert answer.status in {400, 411}
    assert answer.problem["status"] == answer.status


@pytest.mark.parametrize(
    "head",
    [
        CHUNKED.replace("chunked", "xchunked"),
        CHUNKED.replace("\r\n\r\n", "\r\nContent-Length: 5\r\n\r\n") + "0\r\n\r\n",
        "\x01\r\n\r\n",
    ],
    ids=["unknown-coding", "length-and-chunks", "garbage"],
)
def test_bytes_after_refused_request_are_not_parsed_as_request(wire, head):
    """Request smuggling: what a proxy holds for a body must not be a request here."""
    wire.send((head + HEALTH).encode())

    assert [answer.status for answer in wire.answers()] in ([400], [411])
    assert wire.is_closed


def test_chunked_body_is_refused_and_next_request_is_answered(wire):
    inner = HEALTH.replace("healthz", "nothing")
    wire.send(f"{CHUNKED}{len(inner):x}\r\n{inner}\r\n0\r\n\r\n{HEALTH}".encode())

    assert [wire.answer().status, wire.answer().status] == [411, 200]


def test_endless_chunks_close_the_connection(wire):
    wire.send(CHUNKED.encode())
    sent_bytes = wire.flood(b"1;" + b"a" * 65536 + b"\r\nx\r\n", at_most=64 * 1024**2)

    assert sent_bytes < 32 * 1024**2
    assert wire.is_closed


def test_body_of_refused_request_is_not_parsed_as_request(wire):
    inner = HEALTH.encode()
    wire.send((LOOKUP + f"Graphstash-Protocol: 9\r\nContent-Length: {len(inner)}\r\n\r\n").encode())
    wire.send(inner + HEALTH.replace("healthz", "nothing").encode())

    assert [wire.answer().status, wire.answer().status] == [400, 404]


def test_upgrade_is_ignored_and_following_bytes_are_dropped(wire):
    upgrade = "Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"

    wire.send((HEALTH[:-2] + upgrade + HEALTH).encode())

    assert [answer.status for answer in wire.answers()] == [200]
    assert wire.is_closed


def test_garbage_after_request_is_not_in_its_answer(api):
    blob = bytes(range(256)) * 16384
    api.put(blob, 1)
    with Wire(api.url) as wire:
        wire.send(f"GET {api.path(1)} HTTP/1.1\r\nHost: a\r\n\r\n\x01\x02\r\n\r\n".encode())

        (answer,) = wire.answers()

    assert answer.body == blob
    api.http.delete(api.path(1))


ABSENT = f"GET /v1/nobody/artifacts/jax/cpu/{'0' * 64} HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(("request_", "status"), [(HEALTH, 200), (ABSENT, 404)])
def test_pipelined_requests_beyond_the_limit_are_dropped(wire, request_, status):
    wire.send(request_.encode() * 5000)

    answers = wire.answers()

    assert 1 <= len(answers) < 100
    assert {answer.status for answer in answers} == {status}
    assert wire.is_closed


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/../healthz", 404),
        ("/v1/%2e%2e/healthz", 404),
        ("/v1/%252e%252e/healthz", 404),
        ("/v1%2fstats", 404),
        ("/v1/team%2F..%2Fother/manifests/m", 404),
        ("/v1/team%5c..%5cother/manifests/m", 400),
        ("/v1/%00/manifests/m", 400),
        ("/v1/team%00/manifests/m", 400),
        ("/v1/team%0d%0aX-A:%20b/manifests/m", 400),
        ("/v1/%ff%fe/manifests/m", 400),
        ("/v1/%c0%ae%c0%ae/manifests/m", 400),
        ("/v1/../manifests/m", 400),
        ("/v1/./manifests/m", 400),
        ("/v1/TEAM/manifests/m", 400),
        ("/v1/team/manifests/..%2f..%2fetc%2fpasswd", 404),
        (PATH.replace("0" * 64, "../" * 21 + "x"), 404),
        (PATH.replace("jax", ".."), 400),
        ("//elsewhere/healthz", 404),
        ("/healthz/", 404),
        ("/healthz;x", 404),
        ("/_blobs/sha256/00/" + "0" * 64, 404),
    ],
)
def test_a_path_is_parsed_and_never_resolved(wire, path, status):
    answer = wire.ask(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())

    assert answer.status == status
    assert answer.problem["status"] == status
    assert wire.ask(HEALTH.encode()).status == 200


def test_oversized_headers_close_the_connection_while_they_arrive(wire):
    wire.send(HEALTH[:-2].encode() + b"X-Large: ")
    sent_bytes = wire.flood(b"a" * 65536, at_most=64 * 1024**2)

    assert sent_bytes < 32 * 1024**2  # 8 MiB are dropped, and the kernel holds some
    assert wire.is_closed


def test_headers_a_little_beyond_the_limit_are_answered(wire):
    wire.send(HEALTH[:-2].encode())
    for _ in range(10):
        wire.send(b"X-Large: " + b"a" * 8000 + b"\r\n")
        time.sleep(0.01)  # more than one read

    answer = wire.answer()

    assert (answer.status, answer.problem["code"]) == (431, "headers_too_large")
    assert "65536" in answer.problem["detail"]


@pytest.mark.parametrize("target", ["/" + "a" * 8200, "/healthz?" + "a" * 8200])
def test_a_path_beyond_the_limit_is_answered(wire, target):
    answer = wire.ask(f"GET {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())

    assert (answer.status, answer.problem["code"]) == (431, "headers_too_large")
    assert answer.problem["limit"] == 8192


def test_a_page_in_a_browser_cannot_change_anything(api, problem):
    """DNS rebinding makes a page of the same origin as a server on loopback."""
    sent = {"Origin": api.url, "Repr-Digest": Digest.of(b"x").repr_digest}

    problem(api.http.put(api.path(1), content=b"x", headers=sent), 403, "forbidden", "Origin")
    problem(api.http.post(api.lease_path(1), headers=sent), 403, "forbidden")
    assert api.get(1).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("[" * 100_000, id="open-arrays"),
        pytest.param("[" * 100_000 + "]" * 100_000, id="nested-arrays"),
        pytest.param('{"keys":' * 100_000 + "1" + "}" * 100_000, id="nested-objects"),
        pytest.param('{"keys":[' + "9" * 1_000_000 + "]}", id="huge-number"),
        pytest.param('{"keys":[1e' + "9" * 100_000 + "]}", id="huge-exponent"),
        pytest.param('{"keys":"' + "a" * 1_000_000 + '"}', id="huge-string"),
        pytest.param('{"keys":[],"keys":[],"keys":1}', id="duplicate-keys"),
        pytest.param('{"keys":["\\ud800"]}', id="lone-surrogate"),
        pytest.param('{"keys":[NaN]}', id="not-a-number"),
        pytest.param('{"' + "a" * 100_000 + '":1}', id="huge-name"),
        pytest.param("\ufeff{}", id="byte-order-mark"),
        pytest.param("{}\0", id="nul"),
        pytest.param("{}{}", id="two-documents"),
    ],
)
def test_hostile_json_is_refused_with_a_sentence(api, problem, body):
    """Much of it before it is parsed."""
    answer = api.http.post(f"/v1/{api.namespace}/artifacts:lookup", content=body.encode())

    status, code = answer.status_code, answer.json()["code"]
    assert code in {400: {"invalid_request"}, 413: {"too_large", "too_many_keys"}}[status]
    assert len(problem(answer, status, code)["detail"]) < 1000


def test_lease_call_requires_finite_numbers_and_printable_holder(api, problem):
    for number in ("NaN", "Infinity", "1e999", "9" * 5000, "0.5", "601"):
        answer = api.http.post(api.lease_path(1), content=f'{{"ttl_seconds": {number}}}')
        problem(answer, 400, "invalid_request", "ttl_seconds")
    for text in ("\\u0000", "a\\u0000b", "a\\nb", "\\u001b[2J", "x" * 129):
        answer = api.http.post(api.lease_path(1), content=f'{{"holder": "{text}"}}')
        problem(answer, 400, "invalid_request", "holder")
    for body in ("[]", "{", '{"colour": 1}'):
        problem(api.http.post(api.lease_path(1), content=body), 400, "invalid_request")
    assert api.acquire(1).status_code == 201


@pytest.mark.parametrize(
    "record",
    [
        "[" * 10_000,
        '{"compile_seconds":NaN,"raw_size_bytes":1}',
        '{"compile_seconds":Infinity,"raw_size_bytes":1}',
        '{"compile_seconds":1,"raw_size_bytes":' + "9" * 9000 + "}",
        '{"compile_seconds":1,"raw_size_bytes":1,"toolchain":"' + "a" * 5000 + '"}',
        '{"compile_seconds":1,"raw_size_bytes":1,"producer":"a\\u0000b"}',
        '{"compile_seconds":1,"raw_size_bytes":1,"toolchain":"a\\u0000b"}',
        '{"compile_seconds":1,"raw_size_bytes":1,"parts":{"a":"\\ud800"}}',
        '{"compile_seconds":1,"raw_size_bytes":1,"parts":[[[[]]]]}',
    ],
)
def test_hostile_metadata_is_refused(api, problem, record):
    header = base64.urlsafe_b64encode(record.encode()).rstrip(b"=").decode()

    problem(api.put(b"x", 1, Graphstash_Metadata=header), 400, "invalid_metadata")


def test_every_answer_has_security_headers(api):
    api.put(b"x", 1)
    pages = {"/", "/search", "/docs", "/sign-in"}
    for path in (*pages, "/healthz", "/v1/stats", "/nothing", api.path(1), api.path(2)):
        headers = api.http.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "script" not in policy
        assert ("sandbox" in policy) == (path not in pages)
        assert policy.count("default-src") == 1
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == ("same-origin" if path in pages else "no-referrer")
        assert headers["x-frame-options"] == "DENY"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert not any(name.startswith("access-control") for name in headers)
        assert "server" not in headers
    assert api.get(1).headers["content-disposition"] == "attachment"
    api.http.delete(api.path(1))


def test_zip_bomb_is_stored_without_decompression(api):
    bomb = zlib.compress(b"\0" * 10_000_000)

    assert api.put(bomb, 1, Content_Encoding="deflate").status_code == 201
    assert api.http.head(api.path(1)).headers["content-length"] == str(len(bomb))
    assert hashlib.sha256(api.get(1).content).digest() == hashlib.sha256(bomb).digest()
    api.http.delete(api.path(1))
