"""An HTTP proxy in front of an S3 that counts requests and fails on demand."""

import itertools
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple

from support.tcp_proxy import TcpProxy, read_head, reset


class S3Fault(StrEnum):
    """How the proxy fails."""

    NONE = "none"
    FAILING = "500"
    BUSY = "503"
    FORBIDDEN = "403"
    NO_BUCKET = "404 of the bucket"
    STRANGER = "200 of some other server"
    RESET = "reset before the answer"
    HANG = "no answer until `resume`, and none then"
    HOLD = "the request is sent on after `resume`, though nobody waits for it any more"
    CUT = "the body ends half-way"
    CUT_BY_RESET = "the connection is reset half-way through the body"
    FLIP = "a bit of the body is flipped, each time another one"
    FLIP_LENGTH = "a bit of Content-Length is flipped"
    PAUSE = "half of the body, the rest after `resume`"


class Seen(NamedTuple):
    method: str
    target: str
    headers: dict[str, str]


_ANSWERS = {
    S3Fault.FAILING: ("500 Oops", "<Error><Code>InternalError</Code></Error>"),
    S3Fault.BUSY: ("503 Busy", "<Error><Code>ServiceUnavailable</Code></Error>"),
    S3Fault.FORBIDDEN: ("403 Forbidden", "<Error><Code>AccessDenied</Code></Error>"),
    S3Fault.NO_BUCKET: ("404 Not Found", "<Error><Code>NoSuchBucket</Code></Error>"),
    S3Fault.STRANGER: ("200 OK", "<html>Welcome</html>"),
}
_LENGTH = re.compile(rb"(?i)(\r\ncontent-length: )([0-9])")
_IN_THE_BODY = (S3Fault.CUT, S3Fault.CUT_BY_RESET, S3Fault.FLIP, S3Fault.PAUSE)
_IN_THE_ANSWER = (S3Fault.NONE, S3Fault.FLIP_LENGTH, *_IN_THE_BODY)


class S3Proxy(TcpProxy):
    """A proxy with one request per connection.

    Attributes:
        fault: present fault, for requests that `strikes` selects; may be changed at any time.
        left: number of further requests that it affects; None for all.
        seen: every request.
        struck: number of requests that met a fault, by its kind. A fault within the body strikes
            only answers with a body.
        resume: releases paused bodies and held requests, and ends requests that hang.
        held_count: number of requests that are or were held.
        late: first lines of the answers to held requests.
    """

    def __init__(self, upstream_port: int) -> None:
        self.fault = S3Fault.NONE
        self.strikes: Callable[[Seen], bool] = lambda _seen: True
        self.left: int | None = None
        self.seen: list[Seen] = []
        self.struck: Counter[str] = Counter()
        self.resume = threading.Event()
        self.held_count = 0
        self.late: list[str] = []
        self._flips = itertools.count()
        self._lock = threading.Lock()
        super().__init__(upstream_port)

    def __exit__(self, *_: object) -> None:
        self.resume.set()
        self.close()

    def count(self, method: str, *, within: str = "") -> int:
        return sum(seen.method == method and within in seen.target for seen in self.seen)

    @contextmanager
    def down(self) -> Iterator[None]:
        """Refuse connections during the block."""
        self.close()
        yield
        self.listen(self.port)

    def serve(self, connection: socket.socket) -> None:
        head, body = read_head(connection)
        if not head:
            return
        seen = _parsed(head)
        fault = self._note(seen)
        if fault not in _IN_THE_ANSWER:
            self._count(fault)
        if fault is S3Fault.HANG:
            self._hang()
        elif fault is S3Fault.HOLD:
            self.held_count += 1
            self.resume.wait()
            self.late.append(self._send_on(head, body))
        elif fault is S3Fault.RESET:
            reset(connection)
        elif fault in _ANSWERS:
            status, text = _ANSWERS[fault]
            connection.sendall(_answer(status, "" if seen.method == "HEAD" else text))
            # Closing with an unread body would make the kernel reset the connection before the
            # answer arrives.
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
        else:
            self._forward(connection, head, body, fault)

    def _note(self, seen: Seen) -> S3Fault:
        with self._lock:
            self.seen.append(seen)
            if self.fault is S3Fault.NONE or self.left == 0 or not self.strikes(seen):
                return S3Fault.NONE
            if self.left is not None:
                self.left -= 1
            return self.fault

    def _hang(self) -> None:
        self.resume.wait()

    def _count(self, fault: str) -> None:
        with self._lock:
            self.struck[fault] += 1

    def _send_on(self, head: bytes, body: bytes) -> str:
        with socket.create_connection(("127.0.0.1", self._upstream_port)) as upstream:
            upstream.sendall(head + b"\r\n\r\n" + body)
            return read_head(upstream)[0].decode("latin-1").split("\r\n")[0]

    def _forward(self, connection: socket.socket, head: bytes, body: bytes, fault: S3Fault) -> None:
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection")]
        lines[1:1] = [b"Connection: close"]
        request = b"\r\n".join(lines) + b"\r\n\r\n" + body
        with self.upstream(connection, request) as upstream:
            answer, rest = read_head(upstream)
            while answer.startswith(b"HTTP/1.1 100"):
                connection.sendall(answer + b"\r\n\r\n")
                answer, rest = read_head(upstream, rest)
            if fault is S3Fault.FLIP_LENGTH and _LENGTH.search(answer):
                self._count(fault)
                answer = _LENGTH.sub(lambda found: found[1] + bytes([found[2][0] ^ 1]), answer)
            connection.sendall(answer + b"\r\n\r\n")
            length = int(_parsed(answer).headers.get("content-length", "0"))
            self._forward_body(connection, upstream, rest, fault, length // 2)
        connection.shutdown(socket.SHUT_RDWR)

    def _forward_body(
        self,
        connection: socket.socket,
        upstream: socket.socket,
        chunk: bytes,
        fault: S3Fault,
        middle: int,
    ) -> None:
        sent = 0
        while True:
            if fault in _IN_THE_BODY and sent <= middle < sent + len(chunk):
                self._count(fault)
                if fault is S3Fault.FLIP:
                    count, bit = divmod(next(self._flips), 8)
                    at = (middle - sent + count) % len(chunk)
                    flipped = chunk[at] ^ 1 << bit
                    chunk = chunk[:at] + bytes([flipped]) + chunk[at + 1 :]
                else:
                    connection.sendall(chunk[: middle - sent])
                    if fault is not S3Fault.PAUSE:
                        if fault is S3Fault.CUT_BY_RESET:
                            reset(connection)
                        return
                    self.resume.wait()
                    sent, chunk = middle, chunk[middle - sent :]
                    fault = S3Fault.NONE
            connection.sendall(chunk)
            sent += len(chunk)
            chunk = upstream.recv(1 << 16)
            if not chunk:
                return


def _parsed(head: bytes) -> Seen:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, *_ = first.split(" ")
    headers = (line.partition(": ") for line in lines)
    return Seen(method, target, {name.lower(): value for name, _, value in headers})


def _answer(status: str, text: str) -> bytes:
    head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(text)}\r\n\r\n"
    return (head + text).encode()
