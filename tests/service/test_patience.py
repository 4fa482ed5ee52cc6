"""Callers that take their time, or come in crowds: a server waits for each of them with a bound."""

import resource
from contextlib import ExitStack
from pathlib import Path

import pytest

from graphstash_server.testing import LiveServer, ServerProcess
from support.wire import Wire

HEALTH = "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"

_SECONDS = 1.0


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    """A server that has little patience."""
    with LiveServer(
        tmp_path_factory.mktemp("hasty"),
        header_seconds=_SECONDS,
        upload_idle_seconds=_SECONDS,
        log_level="error",
    ) as server:
        yield server


@pytest.mark.parametrize("before", [b"", HEALTH.encode()])
def test_an_idle_connection_is_closed(hasty, before):
    """Empty lines before a request are allowed, and no reason to wait for ever."""
    with Wire(hasty.url) as wire:
        if before:
            assert wire.ask(before).status == 200
        assert wire.drip(b"\r\n", every=_SECONDS / 10) is None
        assert wire.is_closed


def test_an_unread_body_is_not_awaited_forever(hasty):
    with Wire(hasty.url) as wire:
        wire.send(b"GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
        assert wire.answer().status == 200
        assert wire.drip(b"x", every=_SECONDS / 10) is None
        assert wire.is_closed


def test_a_connection_over_the_limit_gets_503_and_the_others_continue(tmp_path):
    with ExitStack() as stack:
        crowded = stack.enter_context(
            LiveServer(tmp_path / "data", max_connections=20, header_seconds=60, log_level="error")
        )
        wires = [stack.enter_context(Wire(crowded.url)) for _ in range(20)]
        assert {wire.ask(HEALTH.encode()).status for wire in wires} == {200}
        beyond = stack.enter_context(Wire(crowded.url))

        answer = beyond.answer()

        assert (answer.status, answer.problem["code"]) == (503, "unavailable")
        assert answer.headers["retry-after"] == "2"
        assert beyond.is_closed
        assert {wire.ask(HEALTH.encode()).status for wire in wires} == {200}


def test_as_many_files_may_be_open_as_connections_need(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        with ServerProcess(tmp_path / "data", "--min-free-bytes", "0") as server:
            said = Path(f"/proc/{server.process.pid}/limits").read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    (line,) = [line for line in said.splitlines() if line.startswith("Max open files")]
    assert int(line.split()[3]) == min(2 * 2048 + 512, hard)
