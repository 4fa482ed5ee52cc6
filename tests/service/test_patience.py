"""Slow callers and many connections: the server bounds the wait for each."""

import asyncio
import resource
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphstash_server.api.bodies import body_chunks
from graphstash_server.testing import ServerProcess
from support.wire import Wire

HEALTH = "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize("stalls", [1, 2], ids=["once", "twice"])
def test_bytes_that_arrive_while_the_server_stalls_are_in_time(stalls):
    async def read():
        loop, has_arrived = asyncio.get_running_loop(), asyncio.Event()
        caller, connection = socket.socketpair()

        def stall():
            caller.send(b"x")
            time.sleep(0.05)

        async def receive():
            if stalls == 2 and not has_arrived.is_set():
                time.sleep(0.05)  # noqa: ASYNC251 - the time is up in the turn of `stall`
            await has_arrived.wait()
            return {"type": "http.request", "body": connection.recv(1)}

        with caller, connection:
            loop.add_reader(connection, has_arrived.set)
            loop.call_soon(stall)
            request = SimpleNamespace(receive=receive)
            found = [chunk async for chunk in body_chunks(request, idle_seconds=0.02)]
            loop.remove_reader(connection)
        return found

    assert asyncio.run(read()) == [b"x"]


@pytest.mark.extended
def test_server_raises_the_limit_of_open_files_for_its_connections(tmp_path):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = ("prlimit", f"--nofile=1024:{hard}", sys.executable, "-m", "graphstash_server")
    with ServerProcess(tmp_path / "data", "--min-free-bytes", "0", command=command) as server:
        said = Path(f"/proc/{server.process.pid}/limits").read_text()

    (line,) = [line for line in said.splitlines() if line.startswith("Max open files")]
    assert int(line.split()[3]) == min(4 * 16_384 + 256, hard)


@pytest.mark.parametrize(
    ("files", "connections"), [pytest.param(1024, 192, marks=pytest.mark.extended), (300, 11)]
)
def test_hard_limit_of_open_files_bounds_the_connections(tmp_path, files, connections):
    environment = {"GRAPHSTASH_MIN_FREE_BYTES": "0", "GRAPHSTASH_HEADER_SECONDS": "600"}
    if files == 300:
        environment["GRAPHSTASH_MAX_CONNECTIONS"] = "500"
    command = ("prlimit", f"--nofile={files}:{files}", sys.executable, "-m", "graphstash_server")
    with ServerProcess(tmp_path / "data", command=command, environment=environment) as server:
        assert f"allows only {connections}" in server.log
        with ExitStack() as stack:
            for _ in range(connections):
                stack.enter_context(Wire(server.url)).send(HEALTH[:-4].encode())
            beyond = stack.enter_context(Wire(server.url)).answer()
        assert beyond.problem["limit"] == connections
