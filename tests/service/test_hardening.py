"""Attacks on the HTTP layer end in a refusal or a closed connection, with an untouched store."""

import base64
import hashlib
import re

import pytest

from graphstash_schema import Digest
from support.waiting import until
from support.wire import Wire

# These requests never reach a database.
pytestmark = pytest.mark.parametrize("start_once", ["sqlite"], indirect=True)

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
    until(lambda: files() == before)


MALFORMED = (
    *(SENT + f"Content-Length: {each}\r\n\r\nx" for each in ("1, 1", "+1", "-1", "0x1", "9" * 30)),
    *(SENT + f"Content-Length: 1\r\nContent-Length: {each}\r\n\r\nx" for each in (1, 5)),
    SENT + "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    HEAD + "Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    CHUNKED + "2\r\n{}\r\n0\r\n\r\n",
    LOOKUP + "Transfer-Encoding: xchunked\r\n\r\n{}",
    CHUNKED.replace(":", " :") + "0\r\n\r\n",
    HEAD + "X-Folded: a\r\n b\r\n\r\n",
    HEAD.replace("\r\n", "\n") + "\n",
    "GET /healthz\r\n\r\n",
    *(HEALTH.replace("1.1", each) for each in ("2.0", "1.2")),
    *(HEALTH.replace("/healthz", f"http://elsewhere{each}") for each in ("/healthz", "")),
    *(HEALTH.replace("GET /healthz", each) for each in ("OPTIONS *", "CONNECT elsewhere:443")),
    *(HEALTH.replace("Host: a\r\n", each) for each in ("", "Host: a\r\nHost: b\r\n")),
    HEALTH.replace("GET", "BREW"),
    *(HEALTH.replace("healthz", each) for each in ("health\0z", "health\xffz")),
    "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    "\x00\x01\x02\x03" * 64,
)


def test_malformed_request_is_refused(live_server):
    for sent in MALFORMED:
        with Wire(live_server.url) as wire:
            answer = wire.ask(sent.encode("latin-1"))
        assert answer.status in {400, 411}, sent
        assert answer.problem["status"] == answer.status


def test_bytes_of_refused_request_are_not_parsed_as_request(live_server):
    """Request smuggling: bytes that a proxy forwards as a body must not become a request."""
    last = HEALTH[:-2] + "Connection: close\r\n\r\n"
    inner = HEALTH.replace("healthz", "nothing")
    sized = f"Content-Length: {len(inner)}\r\n\r\n"
    for sent, statuses in (
        (CHUNKED.replace("chunked", "xchunked"), [411]),
        (CHUNKED.replace("\r\n\r\n", "\r\nContent-Length: 5\r\n\r\n") + "0\r\n\r\n", [400]),
        ("\x01\r\n\r\n", [400]),
        (f"{CHUNKED}{len(inner):x}\r\n{inner}\r\n0\r\n\r\n", [411, 200]),
        (LOOKUP + "Graphstash-Protocol: 9\r\n" + sized + inner, [400, 200]),
        (HEALTH[:-2] + "Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n", [200]),
    ):
        with Wire(live_server.url) as wire:
            wire.send((sent + last).encode())
            assert [answer.status for answer in wire.answers()] == statuses, sent


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (CHUNKED, b"1;" + b"a" * 65536 + b"\r\nx\r\n"),
        (HEALTH[:-2] + "X-Large: ", b"a" * 65536),
    ],
    ids=["chunks", "header"],
)
def test_endless_request_closes_the_connection_while_it_arrives(wire, begin, more):
    wire.send(begin.encode())
    sent_bytes = wire.flood(more, at_most=64 * 1024**2)

    assert sent_bytes < 32 * 1024**2  # the server drops 8 MiB, and the kernel buffers some
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


def test_page_in_a_browser_cannot_change_anything(api, problem):
    """By DNS rebinding, a page can have the same origin as a server on loopback."""
    sent = {"Origin": api.url, "Repr-Digest": Digest.of(b"x").repr_digest}

    problem(api.http.put(api.path(1), content=b"x", headers=sent), 403, "forbidden", "Origin")
    problem(api.http.post(api.lease_path(1), headers=sent), 403, "forbidden")
    assert api.get(1).status_code == 404


def test_ambiguous_json_is_refused_with_a_short_reason(api, problem):
    """tests/attacks/test_oversized.py covers large and deep bodies."""
    for body in (
        *('{"keys":[],"keys":[],"keys":1}', '{"keys":["\\ud800"]}', '{"keys":[NaN]}'),
        *("\ufeff{}", "{}\0", "{}{}", '{"' + "a" * 10_000 + '":1}'),
    ):
        answer = api.http.post(f"/v1/{api.namespace}/artifacts:lookup", content=body.encode())
        assert len(problem(answer, 400, "invalid_request")["detail"]) < 1000, body

    sound = '"compile_seconds":1,"raw_size_bytes":1'
    for more in (
        *('"producer":"a\\u0000b"', '"toolchain":"a\\u0000b"', '"toolchain":"' + "a" * 5000 + '"'),
        *('"parts":{"a":"\\ud800"}', '"parts":[[[[]]]]'),
    ):
        header = base64.urlsafe_b64encode(f"{{{sound},{more}}}".encode()).rstrip(b"=").decode()
        problem(api.put(b"x", 1, Graphstash_Metadata=header), 400, "invalid_metadata")


def test_lease_call_requires_finite_numbers_and_printable_holder(api, problem):
    for number in ("NaN", "1e999", "0.5", "601"):
        answer = api.http.post(api.lease_path(1), content=f'{{"ttl_seconds": {number}}}')
        problem(answer, 400, "invalid_request", "ttl_seconds")
    for text in ("a\\u0000b", "a\\nb", "\\u001b[2J"):
        answer = api.http.post(api.lease_path(1), content=f'{{"holder": "{text}"}}')
        problem(answer, 400, "invalid_request", "holder")
    for body in ("[]", "{", '{"colour": 1}'):
        problem(api.http.post(api.lease_path(1), content=body), 400, "invalid_request")
    assert api.acquire(1).status_code == 201


def test_every_answer_has_security_headers(api):
    api.put(b"x", 1)
    pages = {"/", "/search", "/docs", "/sign-in"}
    script = re.search(r"<script>(.*)</script>", api.http.get("/").text, re.DOTALL)[1]
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    for path in (*pages, "/healthz", "/v1/stats", "/nothing", api.path(1), api.path(2)):
        headers = api.http.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        scripts = re.findall(r"[a-z-]*script[^;]*", policy)
        assert scripts == (["script-src 'sha256-" + own + "'"] if path in pages else [])
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
