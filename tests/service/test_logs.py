"""JSON logs of a server: one object per line for any input, with the ids of requests."""

import asyncio
import io
import json
import logging
from pathlib import Path

import pytest

import graphstash_server
from graphstash_server.logs import REQUEST, JsonFormatter, in_background
from support.waiting import until
from support.wire import Wire

HOSTILE = '\n\r\t\x00\x1b[2J\x7f\x9b\u202e\u2028\\"} {"level": "forged\ud800'


@pytest.fixture
def logged():
    """Log a message and return the output, without a logger, whose output pytest captures."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("graphstash_server.test")

    def log(message, *arguments, exc_info=None):
        record = logger.makeRecord(
            logger.name, logging.WARNING, __file__, 1, message, arguments, exc_info
        )
        handler.handle(record)
        return stream.getvalue()

    return log


def test_entry_and_traceback_are_one_line_of_printable_ascii(logged):
    written = logged("%s", HOSTILE, exc_info=(ValueError, ValueError(HOSTILE), None))

    assert written.endswith("\n")
    line = written[:-1]
    assert line.isascii()
    assert line.isprintable()
    entry = json.loads(line)
    assert entry["message"] == HOSTILE
    assert (entry["level"], entry["logger"]) == ("WARNING", "graphstash_server.test")
    assert entry["time"].endswith("+00:00")
    assert "ValueError: " in entry["traceback"]


def test_entries_of_shared_work_have_no_request_id(logged):
    async def work():
        logged("shared")

    async def request():
        REQUEST.set({"server_request_id": "own", "request_id": "own"})
        await in_background(work())
        return logged("own")

    shared, own = map(json.loads, asyncio.run(request()).splitlines())
    assert "request" not in shared
    assert own["request"] == "own"
    assert "caller_request" not in own


def test_background_tasks_do_not_inherit_request_ids():
    package = Path(graphstash_server.__file__).parent
    for room in ("db", "services", "storage"):
        sources = {path.name: path.read_text() for path in (package / room).rglob("*.py")}
        assert sources
        assert [name for name, text in sources.items() if "create_task(" in text] == []


def test_fast_path_and_application_log_json_with_request_ids(start, connect):
    as_json = {"GRAPHSTASH_LOG_FORMAT": "json"}
    server = start("--access-log", "--log-level", "debug", environment=as_json)
    api = connect(server.url)
    api.put(b"blob", 1)
    fast = api.get(1, X_Request_Id="mine-1").headers["x-request-id"]
    slow = api.http.get("/healthz", headers={"X-Request-Id": "mine-2"}).headers["x-request-id"]
    refused = api.get(404, X_Request_Id="mine-3").headers["x-request-id"]
    with Wire(server.url) as wire:
        wire.send(b"GET /\x1b[2J\x9b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        wire.answers()

    def entries():
        lines = [line for line in server.log.splitlines() if line.startswith("{")]
        return [json.loads(line) for line in lines]

    def messages(request_id):
        return [each["message"] for each in entries() if each.get("caller_request") == request_id]

    until(lambda: messages(refused) and messages(slow) and messages(fast))
    assert any("artifacts/jax" in each and each.endswith("200") for each in messages(fast))
    assert any("/healthz" in each for each in messages(slow))
    assert any("not_found" in each or "404" in each for each in messages(refused))
    assert all(line.isprintable() for line in server.log.splitlines())
    assert {each["process"] for each in entries()} == {server.process.pid}
