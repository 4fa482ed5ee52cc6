"""Both ways to an artifact give the same answer: the fast path, and the application behind it.

Every case is asked twice, as it is and with a header that the fast path does not know, so that it
leaves the request to the application. What comes back is compared byte by byte, but for the time
and the request's id.
"""

import itertools
import os
import re
import socket
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from graphstash_schema import ArtifactMetadata, Digest
from graphstash_server.db.queries.artifacts import ArtifactRow
from graphstash_server.services.artifacts.service import RecentRows
from graphstash_server.testing import LiveServer
from support.moto import s3_settings
from support.services import FakeClock, key_of
from support.waiting import until
from support.wire import Wire

SMALL = os.urandom(5_000)
LARGE = os.urandom(3_000_000)
ETAG = Digest.of(SMALL).etag
REPR_DIGEST = Digest.of(SMALL).repr_digest
ASIDE = "X-Unheard-Of: 1"
"""Nobody reads it, and the fast path cannot know that."""

CASES = {
    "plain": [],
    "usual headers": ["Accept: */*", "Accept-Encoding: gzip, br", "User-Agent: any/1"],
    "an id": ["X-Request-Id: mine.1"],
    "an id that is none": ["X-Request-Id: <script>"],
    "a job": ["Graphstash-Job: train-gpt.1"],
    "a job that is none": ["Graphstash-Job: ../<script>"],
    "the protocol": ["Graphstash-Protocol: 1"],
    "another protocol": ["Graphstash-Protocol: 99"],
    "authorization that nobody asked for": ["Authorization: Bearer nonsense"],
    "it has it": [f"If-None-Match: {ETAG}"],
    "it has several": [f'If-None-Match: "a", W/{ETAG}'],
    "it has anything": ["If-None-Match: *"],
    "it has others": ['If-None-Match: "a"'],
    "two conditions": ['If-None-Match: "a"', f"If-None-Match: {ETAG}"],
    "if-match": ['If-Match: "a"'],
    "a part": ["Range: bytes=10-19"],
    "a part from the beginning": ["Range: bytes=0-0"],
    "the rest": ["Range: bytes=4990-"],
    "the end": ["Range: bytes=-10"],
    "more than there is": ["Range: bytes=-9999999"],
    "all of it": ["Range: bytes=0-"],
    "several parts": ["Range: bytes=0-1,5-6"],
    "nothing of it": ["Range: bytes=99999999-"],
    "no byte": ["Range: bytes=-0"],
    "another unit": ["Range: lines=1-2"],
    "a part of this version": ["Range: bytes=10-19", f"If-Range: {ETAG}"],
    "a part of another version": ["Range: bytes=10-19", 'If-Range: "a"'],
    "a part that it has": ["Range: bytes=10-19", f"If-None-Match: {ETAG}"],
    "a redirect": ["Graphstash-Accept-Redirect: 1"],
    "a proxy in front": ["Graphstash-Accel: 1", "X-Forwarded-For: 192.0.2.1"],
    "a proxy, a part": ["Graphstash-Accel: 1", "Range: bytes=10-19"],
    "a proxy, a condition": ["Graphstash-Accel: 1", 'If-None-Match: "a"'],
    "the last one": ["Connection: close"],
    "an upgrade": ["Connection: Upgrade", "Upgrade: websocket"],
    "a body": ["Content-Length: 0"],
    "expecting": ["Expect: 100-continue"],
    "two hosts": ["Host: b"],
    "from a page": ["Origin: http://elsewhere"],
    "many headers": [f"Accept: {'a' * 60_000}"],
    "too many headers": [f"Accept: {'a' * 60_000}", f"User-Agent: {'a' * 20_000}"],
}
"""The headers of a request beside Host."""

_OWN = re.compile(rb"^(date|x-request-id): ", re.IGNORECASE)


def ask(url, method, path, *headers, version="1.1"):
    """Everything that the server sends to one request, to the byte, without what is its own."""
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
    body = re.sub(rb"headers have \d+ bytes", b"headers have N bytes", body)  # one has one more
    head = re.sub(rb"(?m)^graphstash-hits: \d+", b"graphstash-hits: N", head)  # grows meanwhile
    kept = [line for line in head.split(b"\r\n") if not _OWN.match(line)]
    return kept, body


def ways(api):
    """How many reads took which way, on this server."""
    return Counter(api.http.get("/v1/stats").json()["reads"])


def warm(api):
    """Brings a row into memory, and the policies; its hits are in the database."""
    assert api.get().status_code == 200
    until(lambda: api.http.head(api.path()).headers["graphstash-hits"] == "1")


def both_ways(api, method, path, *headers, **options):
    """What the fast path answers, what the application does, and which ways they took.

    Asks again when policies or callers had to be looked up: what is known of them counts for two
    seconds, which may pass at any time.
    """
    for _ in range(20):
        api.http.head(path)
        before = ways(api)
        fast = ask(api.url, method, path, *headers, **options)
        slow = ask(api.url, method, path, *headers, ASIDE, **options)
        taken = ways(api) - before
        assert fast == slow
        if not taken["caller"]:
            break
    return fast, slow, taken


LEFT = {
    *("another protocol", "two conditions", "if-match", "an upgrade", "a body", "expecting"),
    *("two hosts", "from a page", "too many headers"),
}
"""Cases that the fast path leaves to the application."""

LONG = {"many headers"}
"""Heads that may come in several pieces, which are the application's."""


BLOBS = {"small": SMALL, "large": LARGE, "empty": b""}
PLACES = list(itertools.product(["GET", "HEAD"], BLOBS))
"""Every blob has a key for each method, so that the hits that a HEAD tells never change."""


@pytest.fixture(scope="module")
def stored(live_server):
    with httpx.Client(base_url=live_server.url, timeout=60) as http:
        for place, (_, size) in enumerate(PLACES):
            metadata = ArtifactMetadata(compile_seconds=12.5, raw_size_bytes=1).to_header()
            headers = {
                "Repr-Digest": Digest.of(BLOBS[size]).repr_digest,
                "Graphstash-Metadata": metadata,
            }
            put = http.put(path_of(place), content=BLOBS[size], headers=headers)
            assert put.status_code == 201
        yield SimpleNamespace(http=http, url=live_server.url)


def path_of(place):
    return f"/v1/both-ways/artifacts/jax/cpu/{place:064}"


def pairs():
    """Every case with both methods and with every blob, but not with every pair of these."""
    methods = itertools.cycle(["GET", "HEAD"])
    for case in CASES:
        for size in BLOBS:
            yield case, next(methods), size


@pytest.mark.parametrize(("case", "method", "size"), list(pairs()))
def test_both_ways_give_the_same_answer(stored, case, method, size):
    path, blob = path_of(PLACES.index((method, size))), BLOBS[size]

    fast, slow, taken = both_ways(stored, method, path, *CASES[case])

    assert fast == slow
    assert taken["fast"] == (0 if case in LEFT else 1) or case in LONG
    if method == "GET" and fast[0][0].endswith(b" 200 OK") and b"x-accel" not in b"".join(fast[0]):
        assert fast[1] == blob


@pytest.mark.parametrize("case", ["plain", "usual headers", "an id", "a part", "it has anything"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_both_ways_miss_alike(api, case, method):
    fast, slow, taken = both_ways(api, method, api.path(404), *CASES[case])

    assert fast == slow
    assert b"404" in fast[0][0]
    assert taken["fast"] == 1


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_row_that_is_not_in_memory_is_answered_alike(api, live_server, method):
    api.put(SMALL, seconds=12.5)
    rows = live_server._server.config.loaded_app.context.artifacts._recent._rows

    rows.clear()
    fast = ask(api.url, method, api.path())
    rows.clear()
    slow = ask(api.url, method, api.path(), ASIDE)

    assert fast == slow


@pytest.mark.parametrize(
    "path",
    [
        "/v1/{ns}/artifacts/jax/cpu/" + "a" * 63,
        "/v1/{ns}/artifacts/jax/cpu/" + "A" * 64,
        "/v1/{ns}/artifacts/none/cpu/" + "a" * 64,
        "/v1/{ns}/artifacts/jax/CPU/" + "a" * 64,
        "/v1/{ns}/artifacts/jax/cpu/" + "a" * 64 + "/",
        "/v1/{ns}/artifacts/jax/cpu/" + "a" * 64 + "?a=b",
        "/v1/{ns}/artifacts/jax/cp%75/" + "a" * 64,
        "/v1/{ns}%2Fartifacts/jax/cpu/" + "a" * 64,
        "/v1/{ns}/../{ns}/artifacts/jax/cpu/" + "a" * 64,
        "//v1/{ns}/artifacts/jax/cpu/" + "a" * 64,
        "/v1/UPPER/artifacts/jax/cpu/" + "a" * 64,
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "POST", "get"])
def test_what_is_no_artifact_is_the_applications(api, path, method):
    fast, slow, taken = both_ways(api, method, path.format(ns=api.namespace))

    assert fast == slow
    assert taken["fast"] == 0


@pytest.mark.parametrize(
    "lines",
    [
        "Accept: a\n\nGET {path} HTTP/1.1\r\nUser-Agent: b",
        "Accept: a\r\n\nGET {path} HTTP/1.1\r\nUser-Agent: b",
        "Accept: a\n\r\nGET {path} HTTP/1.1\r\nUser-Agent: b",
        "Accept: a\nVia: b",
        "Accept: a\r\n folded",
        "Accept : a",
        "Accept: a\x00b",
        "Accept: a\rVia: b",
    ],
)
def test_headers_that_may_be_read_in_two_ways_are_the_parsers(api, lines):
    api.put(SMALL)
    warm(api)

    fast, slow, taken = both_ways(api, "GET", api.path(), lines.format(path=api.path()))

    assert fast == slow
    assert b" 400 " in fast[0][0]
    assert taken["fast"] == 0


@pytest.mark.parametrize("level", ["error", "info", "debug"])
def test_the_access_log_has_the_same_line_at_every_level(start, level):
    server = start("--access-log", "--log-level", level)
    path = f"/v1/team/artifacts/jax/cpu/{'a' * 64}"
    httpx.put(server.url + path, content=SMALL, headers={"Repr-Digest": REPR_DIGEST})
    for aside in ([], [ASIDE]):
        ask(server.url, "GET", path, *aside)
        ask(server.url, "HEAD", path, "If-None-Match: *", *aside)
        ask(server.url, "GET", path[:-1] + "b", *aside)

    until(lambda: server.log.count("HTTP/1.1") == 7)
    said = re.findall(r'"\w+ \S+ HTTP/1.1" \d+', server.log)
    assert [line.rpartition(" ")[2] for line in said[1:4]] == ["200", "304", "404"]
    assert said[1:4] == said[4:7]


def test_both_ways_count_alike(api, connect, eventually):
    counted = []
    for aside in ([], [ASIDE]):
        mine = connect(api.url, f"{api.namespace}-{len(aside)}")
        mine.put(SMALL, seconds=12.5)
        mine.put(LARGE, 1, seconds=2.5)
        for number in (0, 1, 0):
            ask(api.url, "GET", mine.path(number), *aside)
        ask(api.url, "GET", mine.path(1), "Range: bytes=5-9", *aside)
        ask(api.url, "GET", mine.path(1), "Range: bytes=0-9", *aside)
        ask(api.url, "GET", mine.path(0), "If-None-Match: *", *aside)
        ask(api.url, "GET", mine.path(7), *aside)
        ask(api.url, "HEAD", mine.path(0), *aside)
        ask(api.url, "HEAD", mine.path(7), *aside)
        sent = 2 * len(SMALL) + len(LARGE) + 15
        eventually(lambda mine=mine, sent=sent: mine.stats().get("served_bytes") == sent)
        eventually(lambda mine=mine: mine.stats()["misses"] == 1)
        counted.append(mine.stats() | {"namespace": ""})

    assert counted[0] == counted[1]
    assert (counted[0]["hits"], counted[0]["misses"]) == (4, 1)


def test_refusals_are_counted_alike(api):
    def refused():
        return Counter(api.http.get("/v1/stats").json()["refused"])

    api.put(SMALL)
    for aside in ([], [ASIDE]):
        before = refused()
        ask(api.url, "GET", api.path(7), *aside)
        ask(api.url, "GET", api.path(0), "Range: bytes=99999-", *aside)
        assert refused() - before == {"not_found": 1, "range_not_satisfiable": 1}


def test_a_callers_connection_is_kept_and_answers_come_in_order(api):
    api.put(SMALL)
    api.put(LARGE, 1)
    numbers = [0, 1, 7, 0, 0, 1, 1, 7]
    asked = b"".join(
        f"GET {api.path(number)} HTTP/1.1\r\nHost: a\r\n{aside}\r\n".encode()
        for number in numbers
        for aside in ("", f"{ASIDE}\r\n")
    )
    with Wire(api.url) as wire:
        wire.send(asked)
        bodies = [wire.answer() for _ in range(2 * len(numbers))]

    expected = {0: SMALL, 1: LARGE}
    for number, answer in zip((each for each in numbers for _ in "ab"), bodies, strict=True):
        assert answer.status == (404 if number == 7 else 200)
        assert number == 7 or answer.body == expected[number]


def test_a_flood_of_requests_that_nobody_reads_is_not_answered_into_memory(api, live_server):
    """Small requests for larger answers, in one piece: what is not read stays unanswered."""
    api.put(os.urandom(60_000))
    warm(api)
    before = ways(api)["fast"]
    with Wire(api.url) as wire:
        wire.send(f"GET {api.path()} HTTP/1.1\r\nHost: a\r\n\r\n".encode() * 1500)
        until(lambda: ways(api)["headers"] >= 0 and ways(api)["fast"] > before)
        api.http.get("/healthz")
        # 90 MB were asked for; the socket's buffers take some 4 MB at most.
        assert ways(api)["fast"] - before < 300


def test_a_caller_who_hangs_up_in_the_middle_is_noticed(start_one, eventually):
    """And neither the file nor the connection stays open."""
    server, path = start_one(os.urandom(64 * 1024**2))
    with Wire(server.url) as wire:
        wire.send(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        wire.begin()
        eventually(lambda: any("/blobs/" in name for name in open_files(server)))

    eventually(lambda: not any("/blobs/" in name for name in open_files(server)))


def test_a_connection_that_is_cut_while_a_thread_sends_leaves_no_file_open(
    tmp_path, connect, monkeypatch
):
    """Its caller neither reads nor hangs up, so the socket never takes another byte."""
    has_begun, may_end = threading.Event(), threading.Event()
    send = os.sendfile

    def sendfile(*arguments):
        with suppress(BlockingIOError):
            return send(*arguments)
        has_begun.set()
        may_end.wait()
        raise BlockingIOError

    monkeypatch.setattr("graphstash_server.storage.files._is_cached", lambda *_: False)
    monkeypatch.setattr("os.sendfile", sendfile)
    with LiveServer(tmp_path) as server:
        api = connect(server.url, "team")
        api.put(bytes(32 * 1024**2))
        connections = server._server.server_state.connections
        with Wire(server.url) as wire:
            wire.send(asked_for(api.path()))
            has_begun.wait()
            (sending,) = (each for each in connections if each.is_answering)
            sending.loop.call_soon_threadsafe(sending.cut)
            until(lambda: sending not in connections)
            may_end.set()
            until(lambda: not any("/blobs/" in name for name in names_open("self")))


class TestKeptConnections:
    """On a server that closes an idle connection after a fifth of a second."""

    @pytest.fixture
    def impatient(self, tmp_path, connect):
        with LiveServer(tmp_path) as server:
            server._server.config.timeout_keep_alive = 0.2
            api = connect(server.url, "team")
            api.put(SMALL)
            yield api

    def test_a_connection_that_is_idle_after_a_fast_answer_is_closed(self, impatient):
        with Wire(impatient.url) as wire:
            for _ in range(2):
                assert wire.ask(asked_for(impatient.path())).body == SMALL
            assert wire.is_closed

    def test_a_connection_stays_open_while_a_later_request_is_answered(self, impatient):
        """A fast answer, and in the same segment a request that takes five times as long as an idle
        connection may last.
        """
        lease = impatient.path(7).replace("/artifacts/", "/leases/")
        assert impatient.http.post(lease, json={}).status_code == 201
        waiting = (
            f"POST {lease} HTTP/1.1\r\nHost: a\r\nPrefer: wait=1\r\n"
            "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )
        with Wire(impatient.url) as wire:
            wire.send(asked_for(impatient.path()) + waiting.encode())
            assert wire.answer().body == SMALL
            assert wire.answer() is not None


def asked_for(path):
    return f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()


def test_an_artifact_that_is_deleted_while_it_is_read_is_read_to_the_end(start_one):
    blob = os.urandom(64 * 1024**2)
    server, path = start_one(blob)
    with Wire(server.url) as wire:
        wire.send(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        until(lambda: any("/blobs/" in name for name in open_files(server)))
        assert httpx.delete(server.url + path).status_code == 204
        assert wire.answer().body == blob


def test_a_file_that_gets_shorter_while_it_is_sent_cuts_the_connection(start_one):
    server, path = start_one(os.urandom(64 * 1024**2))
    with Wire(server.url) as wire:
        wire.send(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        until(lambda: any("/blobs/" in name for name in open_files(server)))
        [file] = [each for each in (server.data_dir / "blobs/sha256").rglob("*") if each.is_file()]
        os.truncate(file, 10_000_000)
        with pytest.raises(AssertionError, match="the answer is cut"):
            wire.answer()

    until(lambda: "ShortBlobError" in server.log)


@pytest.fixture
def start_one(start):
    """A server with one artifact; its path."""

    def make(blob):
        server = start()
        path = f"/v1/team/artifacts/jax/cpu/{'a' * 64}"
        headers = {"Repr-Digest": Digest.of(blob).repr_digest}
        stored = httpx.put(server.url + path, content=blob, headers=headers, timeout=60)
        assert stored.status_code == 201
        return server, path

    return make


def open_files(server):
    """What a server process has open."""
    return names_open(server.process.pid)


def names_open(pid):
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(fd.readlink()))
    return found


class TestCallers:
    """On a server that asks for tokens."""

    CALLERS = ("reader", "writer elsewhere", "unknown", "malformed", "basic", "nobody", "two")

    @pytest.fixture
    def mine(self, guarded, namespace, connect):
        api = connect(guarded.url, namespace)
        api.http.headers["Authorization"] = f"Bearer {guarded.admin}"
        assert api.put(SMALL).status_code == 201
        return api

    def shown(self, guarded, namespace, caller):
        return {
            "reader": lambda: [f"Authorization: Bearer {guarded.token(f'read:{namespace}')}"],
            "writer elsewhere": lambda: [f"Authorization: Bearer {guarded.token('write:other')}"],
            "unknown": lambda: ["Authorization: Bearer gs_" + "a" * 16 + "_" + "b" * 43],
            "malformed": lambda: ["Authorization: Bearer a b"],
            "basic": lambda: ["Authorization: Basic YTpi"],
            "nobody": list,
            "two": lambda: [f"Authorization: Bearer {guarded.admin}"] * 2,
        }[caller]()

    @pytest.mark.parametrize("is_public", [False, True], ids=["private", "public"])
    @pytest.mark.parametrize("caller", CALLERS)
    @pytest.mark.parametrize("number", [0, 7], ids=["there", "absent"])
    def test_both_ways_answer_a_caller_alike(self, guarded, mine, caller, number, is_public):
        guarded.set_policy(mine.namespace, anonymous_read=is_public)
        headers = self.shown(guarded, mine.namespace, caller)
        for method in ("GET", "HEAD"):
            for _ in range(2):  # looked up, and known
                fast = ask(mine.url, method, mine.path(number), *headers)
                slow = ask(mine.url, method, mine.path(number), *headers, ASIDE)
                assert fast == slow

    def test_a_known_token_takes_the_fast_path(self, guarded, mine):
        token = guarded.token(f"read:{mine.namespace}")
        fast, _, taken = both_ways(mine, "GET", mine.path(), f"Authorization: Bearer {token}")

        assert fast[1] == SMALL
        assert taken["fast"] == 1

    def test_a_wrong_secret_of_a_known_token_is_refused(self, guarded, mine):
        token = guarded.token(f"read:{mine.namespace}")
        both_ways(mine, "GET", mine.path(), f"Authorization: Bearer {token}")
        wrong = token[:-1] + ("a" if token[-1] != "a" else "b")

        answer = ask(mine.url, "GET", mine.path(), f"Authorization: Bearer {wrong}")

        assert b"401" in answer[0][0]

    def test_a_revoked_token_is_refused_soon(self, guarded, mine):
        token = guarded.token(f"read:{mine.namespace}")
        header = f"Authorization: Bearer {token}"
        assert b"200" in ask(mine.url, "GET", mine.path(), header)[0][0]
        token_id = token.split("_")[1]
        assert guarded.http(guarded.admin).delete(f"/v1/-/tokens/{token_id}").status_code == 204

        until(lambda: b"401" in ask(mine.url, "GET", mine.path(), header)[0][0])

    def test_the_rate_of_a_namespace_counts_both_ways(self, guarded, mine):
        guarded.set_policy(mine.namespace, requests_per_second=0.01)
        header = f"Authorization: Bearer {guarded.admin}"
        for aside in ([], [ASIDE]):
            until(
                lambda aside=aside: (
                    b"429" in ask(mine.url, "GET", mine.path(), header, *aside)[0][0]
                )
            )
        fast = ask(mine.url, "GET", mine.path(), header)
        assert any(line.startswith(b"retry-after: ") for line in fast[0])
        assert b"rate_limited" in fast[1]

    def test_a_key_that_may_change_is_not_to_be_kept(self, guarded, mine):
        guarded.set_policy(mine.namespace, mode="overwrite")
        header = f"Authorization: Bearer {guarded.admin}"
        fast, _, taken = both_ways(mine, "GET", mine.path(), header)

        assert b"cache-control: private, no-cache" in fast[0]
        assert taken["fast"] == 1

    def test_what_is_withheld_is_absent(self, guarded, mine):
        header = f"Authorization: Bearer {guarded.admin}"
        assert both_ways(mine, "GET", mine.path(), header)[0][1] == SMALL
        said = {"key": mine.key(), "digest": str(Digest.of(SMALL)), "reason": "bad_signature"}
        report = mine.http.post(f"/v1/{mine.namespace}/artifacts:report", json=said)
        assert report.status_code < 300, report.text

        for method in ("GET", "HEAD"):
            assert b"404" in both_ways(mine, method, mine.path(), header)[0][0][0]


@pytest.mark.parametrize("blob", [SMALL, LARGE], ids=["small", "large"])
def test_http_1_0_is_the_applications(api, blob):
    api.put(blob)
    warm(api)

    fast, slow, taken = both_ways(api, "GET", api.path(), version="1.0")

    assert fast == slow
    assert fast[1] == blob
    assert taken["fast"] == 0


@pytest.mark.parametrize("case", ["nothing of it", "a part", "plain", "a proxy in front"])
def test_both_ways_answer_alike_where_blobs_are_in_s3(
    tmp_path, moto, s3_credentials, connect, case
):
    """Readers of S3 are no files."""
    settings = s3_settings(f"http://127.0.0.1:{moto.port}", moto.new_bucket())
    with LiveServer(tmp_path, **settings) as server:
        api = connect(server.url, "team")
        assert api.put(SMALL).status_code == 201
        warm(api)
        both_ways(api, "GET", api.path(), *CASES[case])


def test_the_policy_of_one_namespace_stays_when_that_of_another_changes(
    guarded, namespace, connect
):
    """Whoever asks first after the change goes the fast way."""
    api = connect(guarded.url, namespace)
    api.http.headers["Authorization"] = f"Bearer {guarded.admin}"
    guarded.set_policy(namespace, mode="overwrite")
    assert api.put(SMALL).status_code == 201
    for number in range(3):
        other = f"{namespace}-{number}"
        guarded.set_policy(other, mode="overwrite")
        api.http.get(f"/v1/{other}/manifests/none")  # reads the policies
        for _ in range(3):
            assert api.get().headers["cache-control"] == "private, no-cache"


def test_an_older_read_does_not_replace_a_newer_row():
    clock = FakeClock()
    rows = RecentRows(clock=clock)
    old, new = (
        ArtifactRow(key_of(), Digest.of(text), "", 1.0, 0, clock(), None) for text in (b"a", b"b")
    )
    began = clock()
    clock.turn(0.5)
    rows.drop(old.key)
    rows.add(new, read_at=clock())
    clock.turn(0.1)
    rows.add(new, read_at=clock())
    rows.add(old, read_at=began)
    assert rows.get(new.key) == new
