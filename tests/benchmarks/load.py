"""The load generators: `wrk` for GETs where it is installed, threads with raw sockets for the rest.

wrk cannot HEAD (it waits for the body that Content-Length announces) and its scripts cannot PUT
megabytes that differ. The client in here keeps its connections and throws bodies away unread by
Python; it manages some 20,000 small requests per second, so a figure near that is the generator's.
"""

import itertools
import json
import shutil
import socket
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Connection", "Load", "get", "latencies", "many", "wrk"]

LUA = Path(__file__).with_name("wrk.lua")
BUFFER_BYTES = 1 << 18


@dataclass(frozen=True)
class Load:
    """What a target has done in `seconds`."""

    requests: int
    received_bytes: int
    seconds: float
    p50_ms: float
    p99_ms: float

    @property
    def per_second(self):
        return self.requests / self.seconds

    @property
    def megabytes_per_second(self):
        return self.received_bytes / self.seconds / 1e6


class Connection:
    """One kept connection; opened again when the other side has closed it."""

    def __init__(self, port):
        self._port = port
        self._socket = None
        self._buffer = bytearray(BUFFER_BYTES)

    def close(self):
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def request(self, method, path, headers="", *body):
        """Sends a request and reads the whole answer.

        Returns:
            Status, the raw header lines, and how many bytes of body came.
        """
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=60)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n".encode()
        if sum(map(len, body)) > BUFFER_BYTES:
            self._socket.sendall(head)
            for part in body:
                self._socket.sendall(part)
        else:
            self._socket.sendall(head + b"".join(body))
        return self._answer(method)

    def _answer(self, method):
        head = bytearray()
        while (end := head.find(b"\r\n\r\n")) < 0:
            received = self._socket.recv(65536)
            if not received:
                raise ConnectionError("the target hung up")
            head += received
        lines = head[:end].decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        fields = dict(line.lower().split(":", 1) for line in lines[1:])
        expected = 0 if method == "HEAD" else int(fields.get("content-length", 0))
        left = expected - (len(head) - end - 4)
        while left > 0:
            count = self._socket.recv_into(self._buffer, min(left, BUFFER_BYTES))
            if not count:
                raise ConnectionError("the target hung up")
            left -= count
        if fields.get("connection", "").strip() == "close":
            self.close()
        return status, lines[1:], expected


def wrk():
    """The path of wrk, or None."""
    return shutil.which("wrk")


def get(port, path, *, connections, seconds):
    """GETs one path over and over."""
    if wrk() is None:
        return many(port, connections, seconds, lambda c: c.request("GET", path))
    command = [
        *(wrk(), "--threads", "1", "--connections", str(connections)),
        *("--duration", f"{seconds}s", "--timeout", "60s", "--script", str(LUA)),
        f"http://127.0.0.1:{port}{path}",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures = json.loads(done.stderr.splitlines()[-1])
    assert figures.pop("errors") == 0, done.stdout
    return Load(**figures)


def many(port, connections, seconds, work):
    """Calls `work(connection)` in threads of one connection each, until the time is over.

    What has begun is finished and counted, with the time it took.
    """
    times = [[] for _ in range(connections)]
    received = [0] * connections
    failures = []
    begin = threading.Barrier(connections + 1)

    def run(number):
        connection = Connection(port)
        try:
            begin.wait()
            until = time.perf_counter() + seconds
            while (started := time.perf_counter()) < until:
                status, _, size = work(connection)
                assert status < 300, status
                times[number].append(time.perf_counter() - started)
                received[number] += size
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
    every = list(itertools.chain(*times))
    return Load(len(every), sum(received), took, *latencies(every))


def latencies(seconds):
    """Median and 99th percentile, in milliseconds."""
    p99 = statistics.quantiles(seconds, n=100)[98] if len(seconds) > 1 else seconds[0]
    return statistics.median(seconds) * 1e3, min(p99, max(seconds)) * 1e3
