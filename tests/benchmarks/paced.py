"""Send requests at random times, whether or not earlier ones are answered, and record their times.

    python -m benchmarks.paced < work > times

`work` is a pickle of the arguments of `_Generator`, `times` of the times of all `Answer`s of each
load. A late generator makes answers slower, not faster, and is visible.
"""

import gc
import pickle
import random
import select
import socket
import subprocess
import sys
import time
from collections import deque
from typing import NamedTuple

SETTLE_SECONDS = 0.5
CONNECT_SECONDS = 0.001  # between two connections, so that accepting them is not measured
RECEIVE_BYTES = 1 << 16


class Answer(NamedTuple):
    """Seconds of the monotonic clock when a request was due, was sent, and had its whole answer."""

    due: float
    sent: float
    done: float

    @property
    def seconds(self):
        """Time of the answer. It includes the delay of a late GENERATOR."""
        return self.done - self.due


def send_paced(port, loads, *, connections, seconds, prefix=()):
    """Run a generator in a process of its own. `loads` has a rate per second and requests for each
    load, which are sent in turn. Returns a list of answers for each load.
    """
    work = pickle.dumps((port, loads, connections, seconds))
    command = [*prefix, sys.executable, "-m", __name__]
    done = subprocess.run(command, input=work, stdout=subprocess.PIPE, check=True)
    return [[Answer(*times) for times in load] for load in pickle.loads(done.stdout)]


class _Exchange:
    """A connection, and its request in progress."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        time.sleep(CONNECT_SECONDS)

    def send(self, request, times, due):
        self._times, self._due, self._sent = times, due, time.monotonic()
        self._missing, self._head = None, b""
        assert self.socket.send(request) == len(request)

    def receive(self):
        """Read what has arrived, and return whether the answer is complete."""
        data = self.socket.recv(RECEIVE_BYTES)
        assert data, "the target hung up"
        if self._missing is None:
            self._head += data
            head, mark, data = self._head.partition(b"\r\n\r\n")
            if not mark:
                return False
            assert head.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 201 ")), head
            self._missing = int(head.lower().partition(b"\r\ncontent-length:")[2].split()[0])
        self._missing -= len(data)
        if self._missing:
            return False
        self._times.append((self._due, self._sent, time.monotonic()))
        return True


class _Generator:
    def __init__(self, port, loads, connections, seconds):
        self._poll = select.epoll()
        self._exchanges = {}
        for _ in range(connections):
            exchange = _Exchange(port)
            self._exchanges[exchange.socket.fileno()] = exchange
            self._poll.register(exchange.socket, select.EPOLLIN)
        self._free = deque(self._exchanges.values())
        self.times = [[] for _ in loads]
        self._due = deque(sorted(self._schedule(loads, seconds)))

    def _schedule(self, loads, seconds):
        begin = time.monotonic() + SETTLE_SECONDS
        for times, (rate, requests) in zip(self.times, loads, strict=True):
            due, turn = begin, 0
            while (due := due + random.expovariate(rate)) < begin + seconds:
                yield due, id(times), requests[turn % len(requests)], times
                turn += 1

    def run(self):
        everything = len(self._due)
        while sum(map(len, self.times)) < everything:
            now = time.monotonic()
            while self._due and self._free and self._due[0][0] <= now:
                due, _, request, times = self._due.popleft()
                self._free.popleft().send(request, times, due)
            wait = max(self._due[0][0] - now, 0) if self._due and self._free else None
            select.select([self._poll], [], [], wait)  # in microseconds; `poll` rounds up to 1 ms
            for descriptor, _ in self._poll.poll(0):
                exchange = self._exchanges[descriptor]
                if exchange.receive():
                    self._free.append(exchange)


if __name__ == "__main__":
    GENERATOR = _Generator(*pickle.load(sys.stdin.buffer))
    gc.collect()
    gc.freeze()
    gc.disable()
    GENERATOR.run()
    pickle.dump(GENERATOR.times, sys.stdout.buffer)
