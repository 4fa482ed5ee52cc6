"""Load generators: `wrk` for GETs if it is installed, and threads with raw sockets for the rest.

wrk cannot HEAD, because it waits for the body that Content-Length announces. Its scripts cannot PUT
megabytes that differ. The clients here keep their connections and discard bodies. They manage some
10,000 small requests per second, so a figure near that is the generator's limit. The CPU time of a
server does not depend on the generator.
"""

import itertools
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

LUA = Path(__file__).with_name("wrk.lua")
BUFFER_BYTES = 1 << 18


@dataclass(frozen=True)
class Load:
    """Work of a target in `seconds`."""

    requests: int
    received_bytes: int
    seconds: float

    @property
    def per_second(self):
        return self.requests / self.seconds


class Kept:
    """One kept connection, reopened after the other side has closed it."""

    def __init__(self, port):
        self._port = port
        self._socket = None
        self._buffer = bytearray(BUFFER_BYTES)

    def close(self):
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, head, body):
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=60)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sum(map(len, body)) > BUFFER_BYTES:
            self._socket.sendall(head)
            for part in body:
                self._socket.sendall(part)
        else:
            self._socket.sendall(head + b"".join(body))

    def _head(self, end):
        """Return the received bytes up to a mark, mark included."""
        head = bytearray()
        while (found := head.find(end)) < 0:
            received = self._socket.recv(65536)
            if not received:
                raise ConnectionError("the target hung up")
            head += received
        return bytes(head), found + len(end)

    def _drop(self, left):
        while left > 0:
            count = self._socket.recv_into(self._buffer, min(left, BUFFER_BYTES))
            if not count:
                raise ConnectionError("the target hung up")
            left -= count


class HttpConnection(Kept):
    def request(self, method, path, headers="", *body):
        """Send a request, and read the whole answer.

        Returns:
            Status, the raw header lines, and the number of body bytes.
        """
        self._send(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n".encode(), body)
        head, end = self._head(b"\r\n\r\n")
        lines = head[: end - 4].decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        fields = dict(line.lower().split(":", 1) for line in lines[1:])
        if fields.get("transfer-encoding", "").strip() == "chunked":
            expected = self._chunks(head[end:])
        else:
            expected = 0 if method == "HEAD" else int(fields.get("content-length", 0))
            self._drop(expected - (len(head) - end))
        if fields.get("connection", "").strip() == "close":
            self.close()
        return status, lines[1:], expected

    def _chunks(self, body):
        """Read a small answer without Content-Length, such as a peer's error."""
        while not body.endswith(b"0\r\n\r\n"):
            body += self._socket.recv(65536)
        return len(body)


class RedisConnection(Kept):
    """A connection for RESP2, limited to commands with a simple answer."""

    def command(self, *words):
        """Send a command, and read its answer.

        Returns:
            The size of a bulk answer, -1 for nil, or the number of an integer answer.
        """
        parts = [f"*{len(words)}\r\n".encode()]
        for word in words:
            parts += [f"${len(word)}\r\n".encode(), word, b"\r\n"]
        self._send(parts[0], parts[1:])
        head, end = self._head(b"\r\n")
        kind, length = head[:1], head[1 : end - 2]
        assert kind in b"+:$", head[:end]
        if kind == b"+":
            return 0
        if kind == b"$" and int(length) >= 0:
            self._drop(int(length) + 2 - (len(head) - end))
        return int(length)


def wrk():
    return shutil.which("wrk")


def get(port, paths, *, connections, seconds, headers="", status=200):
    """GET the paths in turn, and require the status of every answer.

    `%d` in the headers becomes another number in each request.
    """
    if wrk() is None:
        turns = itertools.cycle(paths)
        return many(port, connections, seconds, ask("GET", turns, headers, status))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("\n".join(paths))
        listed.flush()
        command = [
            *(wrk(), "--threads", "1", "--connections", str(connections)),
            *("--duration", f"{seconds}s", "--timeout", "60s", "--script", str(LUA)),
            *itertools.chain(*(("-H", line) for line in headers.split("\r\n") if line)),
            f"http://127.0.0.1:{port}{paths[0]}",
        ]
        done = subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PATHS": listed.name},
        )
    figures = json.loads(done.stderr.splitlines()[-1])
    refused = figures.pop("refused")
    assert figures.pop("errors") == 0, done.stdout
    assert refused == (figures["requests"] if status >= 400 else 0), done.stdout
    return Load(**figures)


def ask(method, turns, headers, expected):
    """Return a function for `many` that requests the next path and checks the status."""

    numbers = itertools.count()

    def work(connection):
        lines = headers.replace("%d", str(next(numbers)), 1)
        status, _, size = connection.request(method, next(turns), lines)
        assert status == expected, status
        return size

    return work


def many(port, connections, seconds, work, *, kind=HttpConnection):
    """Call `work(connection)`, which returns a number of bytes, in threads until the time is over.

    Each thread has one connection. Calls that have begun are finished and counted, with the time
    that they took.
    """
    requests = [0] * connections
    received = [0] * connections
    failures = []
    begin = threading.Barrier(connections + 1)

    def run(number):
        connection = kind(port)
        try:
            begin.wait()
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                received[number] += work(connection)
                requests[number] += 1
        except Exception as error:
            failures.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    begin.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - started
    if failures:
        raise failures[0]
    return Load(sum(requests), sum(received), took)
