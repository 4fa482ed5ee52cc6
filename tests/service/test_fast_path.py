"""The fast path and the application behind it give the same answer to each read of an artifact.

Each request is sent twice: unchanged, and with a header that the fast path leaves to the
application. The answers are compared byte by byte, except for the date and the request's id.
"""

import os
import re
import socket
import threading
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from itertools import cycle, product
from pathlib import Path

import httpx
import pytest

from graphstash_schema import Digest
from graphstash_server.artifact import Artifact
from graphstash_server.services.artifacts.service import RecentRows
from graphstash_server.testing import LiveServer
from support.api import Api
from support.moto import s3_settings
from support.services import FakeClock, key_of
from support.waiting import until
from support.wire import Wire, head

SMALL = os.urandom(5_000)
LARGE = os.urandom(1_500_000)
BLOBS = {"small": SMALL, "large": LARGE, "empty": b""}
ETAG = Digest.of(SMALL).etag
ASIDE = "X-Unheard-Of: 1"
"""A header that no code reads, so the fast path cannot judge its effect."""

CASES = (
    [],
    ["Accept: */*", "Accept-Encoding: gzip, br", "User-Agent: any/1"],
    *([f"X-Request-Id: {each}"] for each in ("mine.1", "<script>")),
    *([f"Graphstash-Job: {each}"] for each in ("train-gpt.1", "../<script>")),
    ["Graphstash-Protocol: 1"],
    ["Authorization: Bearer nonsense"],  # this server needs no token
    *([f"If-None-Match: {each}"] for each in (ETAG, f'"a", W/{ETAG}', "*", '"a"')),
    *([f"Range: bytes={each}"] for each in ("10-19", "0-0", "4990-", "-10", "-9999999", "0-")),
    *([f"Range: bytes={each}"] for each in ("0-1,5-6", "99999999-", "-0")),
    ["Range: lines=1-2"],
    *(["Range: bytes=10-19", f"If-Range: {each}"] for each in (ETAG, '"a"')),
    ["Range: bytes=10-19", f"If-None-Match: {ETAG}"],
    ["Graphstash-Copy: 1"],
    ["Graphstash-Accept-Redirect: 1"],
    ["Graphstash-Accel: 1", "X-Forwarded-For: 192.0.2.1"],
    ["Graphstash-Accel: 1", "Range: bytes=10-19"],
    ["Graphstash-Accel: 1", 'If-None-Match: "a"'],
    *(["Graphstash-Accel: 1", each] for each in ('If-Match: "a"', "If-Modified-Since: never")),
    ['If-Match: "a"', "If-Unmodified-Since: Thu, 01 Jan 1970 00:00:00 GMT"],
    ["Connection: close"],
    ["X-Forwarded-For: 192.0.2.1", "x-forwarded-for: 192.0.2.2, 192.0.2.3", "Via: a", "via: b"],
    ["X-Amzn-Trace-Id: Root=1-67891233-abcdef012345678912345678", "X-Forwarded-Port: 443"],
    ["X-Real-IP: 192.0.2.1", "X-Scheme: https", "X-Forwarded-Host: a", "X-Forwarded-Scheme: https"],
    ["x-envoy-external-address: 192.0.2.1", "x-envoy-attempt-count: 1", "x-request-id: mine.2"],
    ["CF-Ray: 230b030023ae2822-FRA", 'CF-Visitor: {"scheme":"https"}', "CDN-Loop: cloudflare"],
    [
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "b3: 0",
        "baggage: a=b",
    ],
    ["Cookie: __Host-graphstash=a; b=c", "Cookie: d=e"],
    ["Origin: http://elsewhere", "Sec-Fetch-Site: cross-site", "Referer: http://elsewhere/"],
    ["Content-Type: application/json", "Cache-Control: no-cache", "Keep-Alive: timeout=5"],
)
"""Headers that the fast path answers, besides Host."""

LONG = [f"Accept: {'a' * 60_000}"]
"""May arrive in several pieces, which the fast path leaves to the application."""

LEFT = (
    ["Graphstash-Protocol: 99"],
    ['If-None-Match: "a"', f"If-None-Match: {ETAG}"],
    ["X-Request-Id: first.id.1", "X-Request-Id: second.id.2"],
    ["Graphstash-Job: a", "X-Forwarded-For: 192.0.2.1", "Graphstash-Job: b"],
    ["X-HTTP-Method-Override: DELETE"],
    ["X-Original-URL: /v1/other/artifacts"],
    ["X-Forwarded: 1", "X-Forwarded_For: 192.0.2.1"],
    ["Proxy-Connection: close"],
    ["Connection: Upgrade", "Upgrade: websocket"],
    ["Content-Length: 0"],
    ["Expect: 100-continue"],
    ["Transfer-Encoding: chunked"],
    ["Host: b"],
    [*LONG, f"User-Agent: {'a' * 20_000}"],
)
"""Headers that the fast path leaves to the application."""

ON_SQLITE = pytest.mark.parametrize("start_once", ["sqlite"], indirect=True)
"""For headers and connections, whose handling does not depend on the database."""

_OWN = re.compile(rb"^(date|x-request-id): ", re.IGNORECASE)


def ask(url, method, path, *headers, version="1.1"):
    """Return the whole response to one request, without the parts that differ per request."""
    lines = [f"{method} {path} HTTP/{version}", "Host: a", *headers]
    if not any(each.startswith("Connection:") for each in headers):
        lines.append("Connection: close")
    where = httpx.URL(url)
    with socket.create_connection((where.host, where.port), timeout=20) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        received = b""
        while more := client.recv(1 << 20):
            received += more
    head, _, body = received.partition(b"\r\n\r\n")
    ids = re.findall(rb"(?im)^x-request-id: (.*?)\r?$", head)
    if ids and method != "HEAD":
        body = body.replace(ids[0], b"ID")
    body = re.sub(rb"headers have \d+ bytes", b"headers have N bytes", body)  # ASIDE adds one
    head = re.sub(rb"(?m)^graphstash-hits: \d+", b"graphstash-hits: N", head)  # counted later
    kept = [line for line in head.split(b"\r\n") if not _OWN.match(line)]
    return kept, body


def context_of(server):
    return server._server.config.loaded_app.context


def both_ways(server, method, path, *headers, **options):
    """Return the answer, equal for both ways, and whether the fast path gave exactly one.

    The fast path caches policy and caller for two seconds. If it had to look up either, ask again.
    """
    reads = context_of(server).accounting.reads
    for _ in range(20):
        before = Counter(reads)
        fast = ask(server.url, method, path, *headers, **options)
        slow = ask(server.url, method, path, *headers, ASIDE, **options)
        taken = Counter(reads) - before
        assert fast == slow, f"{method} {path} {headers}"
        if not taken["caller"]:
            break
    return fast, taken["fast"] == 1


@pytest.fixture
def both(live_server):
    """Send requests to the open server in both ways."""

    def ask_both(*request, **options):
        return both_ways(live_server, *request, **options)

    return ask_both


@pytest.fixture(scope="module")
def paths(live_server, new_namespace):
    """The path of each blob."""
    with closing(Api(live_server.url, new_namespace())) as api:
        for number, blob in enumerate(BLOBS.values()):
            assert api.put(blob, number, seconds=12.5).status_code == 201
        names = (*BLOBS, "absent")
        return {size: api.path(number) for number, size in enumerate(names)}


@ON_SQLITE
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_fast_path_and_application_give_same_answer(both, paths, method):
    """The first case reads all blobs, every other case the small one and one of the others."""
    others = cycle([["large"], ["empty"], ["absent"]])
    for number, headers in enumerate((*CASES, LONG, *LEFT)):
        for size in ["small", *(next(others) if number else [*BLOBS, "absent"])]:
            (head, body), is_fast = both(method, paths[size], *headers)

            assert is_fast == (headers in CASES) or headers is LONG, (headers, size)
            if size == "absent":
                assert b" 404 " in head[0] or headers in LEFT, headers
            elif head[0].endswith(b" 200 OK") and b"x-accel" not in b"".join(head):
                assert body == BLOBS[size] or method == "HEAD", (headers, size)


def test_fast_path_and_application_give_same_answer_from_database(api, live_server):
    api.put(SMALL, seconds=12.5)
    rows = context_of(live_server).artifacts._recent._rows
    for method in ("GET", "HEAD"):
        answers = []
        for aside in ([], [ASIDE]):
            rows.clear()
            answers.append(ask(api.url, method, api.path(), *aside))
        assert answers[0] == answers[1]


ARTIFACT = "/v1/{ns}/artifacts/jax/cpu/" + "a" * 64
PATHS = (
    *(ARTIFACT[:-1], ARTIFACT + "/", ARTIFACT + "?a=b", "/" + ARTIFACT),
    ARTIFACT.replace("a" * 64, "A" * 64),
    ARTIFACT.replace("/jax/", "/none/"),
    *(ARTIFACT.replace("/cpu/", each) for each in ("/CPU/", "/cp%75/")),
    *(ARTIFACT.replace("/artifacts", each) for each in ("%2Fartifacts", "/../{ns}/artifacts")),
    ARTIFACT.replace("{ns}", "UPPER"),
)
AMBIGUOUS = (
    *(
        f"Accept: a{end}GET {{path}} HTTP/1.1\r\nUser-Agent: b"
        for end in ("\n\n", "\r\n\n", "\n\r\n")
    ),
    *("Accept: a\nVia: b", "Accept: a\r\n folded", "Accept : a", "Accept: a\x00b"),
    *("Accept: a\rVia: b", "Cookie", "Cookie: a\r\n\tAuthorization: Bearer b", "CF- Ray: a"),
)


@ON_SQLITE
def test_unusual_requests_are_left_to_the_application(api, both, paths):
    for method, path in zip(cycle(["GET", "HEAD"]), PATHS, strict=False):
        assert not both(method, path.format(ns=api.namespace))[1], path
    for method in ("DELETE", "POST", "get"):
        assert not both(method, api.path())[1], method
    for lines in AMBIGUOUS:
        (head, _), is_fast = both("GET", paths["small"], lines.format(path=paths["small"]))
        assert b" 400 " in head[0], lines
        assert not is_fast, lines
    for size in ("small", "large"):
        (_, body), is_fast = both("GET", paths[size], version="1.0")
        assert body == BLOBS[size]
        assert not is_fast


def test_fast_path_and_application_give_same_answer_from_s3(
    tmp_path, moto, s3_credentials, connect
):
    """A reader of S3 is not a file."""
    settings = s3_settings(f"http://127.0.0.1:{moto.port}", moto.new_bucket())
    with LiveServer(tmp_path, **settings) as server:
        api = connect(server.url)
        assert api.put(SMALL).status_code == 201
        for headers in (
            ["Range: bytes=99999999-"],
            ["Range: bytes=1-9"],
            [],
            ["Graphstash-Accel: 1"],
        ):
            assert both_ways(server, "GET", api.path(), *headers)[1]


# -- counters and logs --


def test_fast_path_and_application_write_same_access_log(start, connect):
    """tests/service/test_logs.py covers entries of all levels."""
    server = start("--access-log", "--log-level", "error")
    api = connect(server.url)
    api.put(SMALL)
    for aside in ([], [ASIDE]):
        ask(server.url, "GET", api.path(), *aside)
        ask(server.url, "HEAD", api.path(), "If-None-Match: *", *aside)
        ask(server.url, "GET", api.path(404), *aside)

    until(lambda: server.log.count("HTTP/1.1") == 7)
    said = re.findall(r'"\w+ \S+ HTTP/1.1" \d+', server.log)
    assert [line.rpartition(" ")[2] for line in said[1:4]] == ["200", "304", "404"]
    assert said[1:4] == said[4:7]


def test_fast_path_and_application_count_alike(api, connect, live_server):
    refused = context_of(live_server).accounting.refused
    counted = []
    for aside in ([], [ASIDE]):
        before = Counter(refused)
        mine = connect(api.url, f"{api.namespace}-{len(aside)}")
        mine.put(SMALL, seconds=12.5)
        mine.put(LARGE, 1, seconds=2.5)
        for method, number, *headers in (
            *(("GET", 0), ("GET", 1), ("GET", 0)),
            ("GET", 1, "Range: bytes=5-9"),
            ("GET", 1, "Range: bytes=0-9"),
            ("GET", 0, "If-None-Match: *"),
            ("GET", 0, "Range: bytes=99999-"),
            ("GET", 0, "Graphstash-Copy: 1"),
            ("GET", 7, "Graphstash-Copy: 1"),
            *(("GET", 7), ("HEAD", 0), ("HEAD", 7)),
        ):
            ask(api.url, method, mine.path(number), *headers, *aside)
        assert Counter(refused) - before == {"not_found": 3, "range_not_satisfiable": 1}
        sent = 3 * len(SMALL) + len(LARGE) + 15
        until(lambda mine=mine, sent=sent: mine.stats().get("served_bytes") == sent)
        until(lambda mine=mine: mine.stats()["misses"] == 1)
        counted.append(mine.stats() | {"namespace": ""})

    assert counted[0] == counted[1]
    stats = counted[0]
    assert (stats["hits"], stats["misses"], stats["saved_seconds"]) == (4, 1, 30.0)


# -- connections --


BOTH_WAYS = pytest.mark.parametrize("aside", [[], [ASIDE]], ids=["fast path", "application"])


asked_for = partial(head, "GET")


@ON_SQLITE
def test_answers_on_one_connection_keep_the_order_of_the_requests(api):
    blobs = {0: SMALL, 1: LARGE}
    for number, blob in blobs.items():
        api.put(blob, number)
    numbers = [number for number in (0, 1, 7, 0, 0, 1, 1, 7) for _ in range(2)]
    asides = [[], [ASIDE]] * 8
    asked = zip(numbers, asides, strict=True)
    with Wire(api.url) as wire:
        wire.send(b"".join(asked_for(api.path(number), *aside) for number, aside in asked))
        for number in numbers:
            answer = wire.answer()
            assert answer.status == (200 if number in blobs else 404)
            assert answer.body == blobs.get(number, answer.body)


@ON_SQLITE
def test_requests_stay_unanswered_while_client_reads_no_answers(api, live_server):
    """Otherwise a pipeline of small requests would fill the memory with large answers."""
    api.put(os.urandom(60_000))
    assert api.get().status_code == 200
    reads = context_of(live_server).accounting.reads
    before = reads.total()
    with Wire(api.url) as wire:
        wire.send(asked_for(api.path()) * 1500)
        until(lambda: reads.total() > before)  # the first one may look its caller up
        api.http.get("/healthz")
        # The requests ask for 90 MB, and the socket's buffers hold 4 MB.
        assert reads.total() - before < 300


@pytest.fixture
def large(api, file_of):
    """A blob larger than a socket's buffers, and its file."""
    blob = str(api.namespace).encode().ljust(16 * 1024**2)
    assert api.put(blob).status_code == 201
    file = file_of(blob)
    until(lambda: not is_open(file))  # the upload may close it after its response
    return blob, file


def is_open(file):
    """Return whether this process, in which the server runs, has a file open."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if descriptor.readlink().name.startswith(file.name):
                return True
    return False


@ON_SQLITE
@BOTH_WAYS
def test_download_ends_when_its_reader_hangs_up_but_not_by_a_deletion(api, large, aside):
    blob, file = large
    with Wire(api.url) as wire:
        wire.send(asked_for(api.path(), *aside))
        wire.begin()
        until(lambda: is_open(file))
    until(lambda: not is_open(file))

    with Wire(api.url) as wire:
        wire.send(asked_for(api.path(), *aside))
        until(lambda: is_open(file))
        assert api.delete().status_code == 204
        assert wire.answer().body == blob


@ON_SQLITE
@BOTH_WAYS
def test_file_that_shrinks_during_a_download_cuts_the_connection(api, large, aside, caplog):
    _, file = large
    with Wire(api.url) as wire:
        wire.send(asked_for(api.path(), *aside))
        until(lambda: is_open(file))
        os.truncate(file, 5_000_000)
        with pytest.raises(AssertionError, match="the answer is cut"):
            wire.answer()

    until(lambda: "ShortBlobError" in caplog.text)


@ON_SQLITE
def test_connection_cut_while_a_thread_sends_closes_the_file(api, large, live_server, monkeypatch):
    """The client neither reads nor hangs up, so the socket accepts no further byte."""
    _, file = large
    has_begun, may_end = threading.Event(), threading.Event()
    send = os.sendfile

    def sendfile(*arguments):
        with suppress(BlockingIOError):
            return send(*arguments)
        has_begun.set()
        may_end.wait()
        raise BlockingIOError

    monkeypatch.setattr("graphstash_server.storage.files._is_cached", lambda *_: False)
    # If the policies expired, the application would answer this request.
    monkeypatch.setattr("graphstash_server.services.namespaces._FRESH_SECONDS", 3600)
    monkeypatch.setattr("os.sendfile", sendfile)
    connections = live_server._server.server_state.connections
    with Wire(api.url) as wire:
        wire.send(asked_for(api.path()))
        has_begun.wait()
        (sending,) = (each for each in connections if each.is_answering)
        sending.loop.call_soon_threadsafe(sending.cut)
        until(lambda: sending not in connections)
        may_end.set()
        until(lambda: not is_open(file))


@ON_SQLITE
class TestKeptConnections:
    """On a server with a short timeout for idle connections."""

    @pytest.fixture
    def close_idle(self, live_server, monkeypatch):
        return partial(monkeypatch.setattr, live_server._server.config, "timeout_keep_alive")

    def test_idle_connection_is_closed_after_a_fast_answer(self, api, close_idle):
        api.put(SMALL)
        close_idle(2.0)  # this process may pause between the two requests
        with Wire(api.url) as wire:
            for _ in range(2):
                assert wire.ask(asked_for(api.path())).body == SMALL
            assert wire.is_closed

    def test_connection_stays_open_while_a_later_request_waits(self, api, close_idle):
        """Both requests arrive in one segment. The fast path answers the first one. The second one
        takes five times as long as the timeout of idle connections.
        """
        api.put(SMALL)
        assert api.acquire(7).status_code == 201
        close_idle(0.2)
        waiting = (
            f"POST {api.lease_path(7)} HTTP/1.1\r\nHost: a\r\nPrefer: wait=1\r\n"
            "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )
        with Wire(api.url) as wire:
            wire.send(asked_for(api.path()) + waiting.encode())
            assert wire.answer().body == SMALL
            assert wire.answer().status == 202


@ON_SQLITE
class TestCallers:
    """On a server that requires tokens."""

    @pytest.fixture
    def mine(self, guarded, namespace):
        api = guarded.api(namespace)
        assert api.put(SMALL).status_code == 201
        return api

    @pytest.fixture
    def both(self, guarded):
        def ask_both(token, method, path):
            return both_ways(guarded.server, method, path, f"Authorization: Bearer {token}")

        return ask_both

    def test_fast_path_and_application_authorize_alike(self, guarded, mine):
        reader, elsewhere = (guarded.token(f"read:{n}") for n in (mine.namespace, "elsewhere"))
        for is_public, shown in product(
            (False, True),
            (
                *([f"Bearer {reader}"], [f"Bearer {elsewhere}"], [f"Bearer {guarded.admin}"] * 2),
                *(["Bearer gs_" + "a" * 16 + "_" + "b" * 43], ["Bearer a b"], ["Basic YTpi"], []),
            ),
        ):
            guarded.set_policy(mine.namespace, anonymous_read=is_public)
            headers = [f"Authorization: {each}" for each in shown]
            for number, method in ((0, "GET"), (7, "HEAD")):
                for _ in range(2):  # looked up, then cached
                    fast = ask(mine.url, method, mine.path(number), *headers)
                    assert fast == ask(mine.url, method, mine.path(number), *headers, ASIDE)

    def test_known_token_reads_whole_artifact_until_revoked_or_withheld(self, guarded, mine, both):
        token = guarded.token(f"read:{mine.namespace}")
        (_, body), is_fast = both(token, "GET", mine.path())
        assert body == SMALL
        assert is_fast

        wrong = token[:-1] + ("a" if token[-1] != "a" else "b")
        assert b"401" in both(wrong, "GET", mine.path())[0][0][0]

        answer = mine.http.delete(f"/v1/-/tokens/{token.split('_')[1]}")
        assert answer.status_code == 204
        until(lambda: b"401" in both(token, "GET", mine.path())[0][0][0])

        assert both(guarded.admin, "GET", mine.path())[0][1] == SMALL
        mine.withhold(SMALL)
        for method in ("GET", "HEAD"):
            assert b"404" in both(guarded.admin, method, mine.path())[0][0][0]

    def test_fast_path_and_application_count_towards_rate_limit(self, guarded, mine):
        guarded.set_policy(mine.namespace, requests_per_second=0.01)

        def limited(*aside):
            head, body = ask(
                *(mine.url, "GET", mine.path(), f"Authorization: Bearer {guarded.admin}", *aside)
            )
            return b"429" in head[0] and head, body

        until(lambda: limited()[0])
        until(lambda: limited(ASIDE)[0])
        head, body = limited()
        assert any(line.startswith(b"retry-after: ") for line in head)
        assert b"rate_limited" in body

    def test_overwritable_artifact_stays_revalidated_after_other_policy_changes(
        self, guarded, mine, both
    ):
        """The first request after the change of another policy takes the fast path."""
        guarded.set_policy(mine.namespace, mode="overwrite")
        (head, _), is_fast = both(guarded.admin, "GET", mine.path())
        assert b"cache-control: private, no-cache" in head
        assert is_fast

        for number in range(3):
            other = f"{mine.namespace}-{number}"
            guarded.set_policy(other, mode="overwrite")
            mine.http.get(f"/v1/{other}/manifests/none")  # reads the policies
            for _ in range(3):
                assert mine.get().headers["cache-control"] == "private, no-cache"


def test_dropped_keys_push_out_no_cached_row():
    clock = FakeClock()
    rows = RecentRows(clock=clock)
    row = Artifact(key_of(), Digest.of(b"a"), "", 1.0, "", 0, clock(), clock())
    rows.add(row, read_at=clock())
    for number in range(1, 2000):
        rows.drop(key_of(number))
    assert rows.get(row.key) == row


def test_row_that_was_read_earlier_does_not_replace_a_newer_one():
    clock = FakeClock()
    rows = RecentRows(clock=clock)
    old, new = (
        Artifact(key_of(), Digest.of(text), "", 1.0, "", 0, clock(), clock())
        for text in (b"a", b"b")
    )
    began = clock()
    clock.turn(0.5)
    rows.drop(old.key)
    rows.add(new, read_at=clock())
    clock.turn(0.1)
    rows.add(new, read_at=clock())
    rows.add(old, read_at=began)
    assert rows.get(new.key) == new
