"""No caller forges an entry of the log, and no secret of a request reaches the log."""

import json
import logging

import pytest

from graphstash_server.logs import EscapingFormatter
from support.guarded_server import GuardedServer, artifact_path
from support.nginx import in_front_of
from support.waiting import until
from support.wire import Wire

_FORGED = "2026-01-01 00:00:00 CRITICAL graphstash: all is lost"
_NASTY = f"x\n{_FORGED}\r\x1b[2J\x9b2J\u202e\x00\x7f"


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """A server with access log and debug messages."""
    with GuardedServer(
        tmp_path_factory.mktemp("talkative"), access_log=True, log_level="debug"
    ) as fort:
        yield fort


def entry_of(record):
    return EscapingFormatter("%(levelname)s %(message)s").format(record)


def record_of(message, *args, error=None):
    info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("name", logging.ERROR, "", 1, message, args, info)


def test_line_ends_in_a_path_or_an_exception_are_escaped_or_indented():
    text = entry_of(record_of("%s failed", _NASTY))

    assert text.isprintable()
    assert text.startswith("ERROR x\\n2026")
    assert "\\x1b[2J\\x9b2J\\u202e\\x00\\x7f failed" in text

    text = entry_of(record_of("a request failed", error=ValueError(_NASTY)))
    first, *rest = text.split("\n")
    assert first == "ERROR a request failed"
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    assert "    ValueError: x\n    2026-01-01" in text


def test_log_escapes_the_path_and_omits_the_query(talkative, space):
    forged = "/v1/x%0A2026-01-01%20CRITICAL%1B%5B2J%C2%9B/stats"
    path = artifact_path(space)
    caller = talkative.http(talkative.admin)
    assert caller.get(forged).status_code == 404
    assert caller.get(path, params={"t": "s3cret"}).status_code == 404

    until(lambda: f'"GET {path} HTTP/1.1" 404' in talkative.log)
    lines = [line for line in talkative.log.split("\n") if "CRITICAL" in line]
    assert lines
    assert all(line.isprintable() and not line.startswith("2026-01-01") for line in lines)
    assert "s3cret" not in talkative.log


def test_repeated_request_ids_stay_distinguishable_in_the_audit(talkative, space):
    """Each audit entry also has an id that the server made, and the address of the connection."""
    headers = {"X-Request-Id": "the-same", "X-Forwarded-For": "10.1.2.3, 192.0.2.7"}
    talkative.put(artifact_path(space), b"x", **headers)
    path, admin = artifact_path(space), talkative.http(talkative.admin)
    forged = {"X-Request-Id": "the-same", "X-Forwarded-For": b"192.0.2.7\x9b<script>"}
    assert admin.delete(path, headers=forged).status_code == 204

    zoned = {"X-Forwarded-For": b"fe80::1%\x9b2J"}
    talkative.put(path, b"x", **{"X-Request-Id": "the-same"})
    assert admin.delete(path, headers=zoned).status_code == 204

    log = admin.get("/v1/-/audit", params={"namespace": space}).json()
    again, _, deleted, put = log["entries"]
    assert again["address"] == "fe80::1 via 127.0.0.1"
    assert put["request_id"] == deleted["request_id"] == "the-same"
    assert len({put["server_request_id"], deleted["server_request_id"], "the-same"}) == 3
    assert put["address"] == "192.0.2.7 via 127.0.0.1"
    assert deleted["address"] == "127.0.0.1"


def test_log_of_nginx_omits_unprintable_paths_and_queries(talkative, space, tmp_path):
    """nginx replaces the address that the client sends."""
    with in_front_of(talkative, tmp_path / "nginx") as nginx:
        for path in (b"/v1/\xc2\x9b2J/x", b"/v1/\xff\xfe/x", b"/v1/ok?secret=\xc2\x9b"):
            with Wire(nginx.url) as wire:
                wire.send(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
                assert wire.answer().status in {400, 401, 404}
        where = nginx.url + artifact_path(space)
        forged = {"X-Forwarded-For": "192.0.2.7"}
        assert talkative.put(where, b"x", **forged).status_code == 201
        nginx.close()
        entries = [json.loads(line) for line in nginx.log.splitlines() if line.startswith("{")]

    assert sorted(entry["path"] for entry in entries) == ["-", "-", artifact_path(space), "/v1/ok"]
    assert all(line.isprintable() for line in nginx.log.splitlines())
    log = talkative.http(talkative.admin).get("/v1/-/audit", params={"namespace": space}).json()
    assert [each["address"] for each in log["entries"]] == ["127.0.0.1 via 127.0.0.1"]
