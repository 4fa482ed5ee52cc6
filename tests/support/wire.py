"""One TCP connection and its bytes, for requests that no HTTP client would send."""

import json
import socket
import time
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from graphstash_schema import Digest

_SECONDS = 20


def head(method: str, path: str, *headers: str, token: str | None = None) -> bytes:
    """Return the head of a request, with a bearer token if one is given."""
    shown = [] if token is None else [f"Authorization: Bearer {token}"]
    lines = [f"{method} {path} HTTP/1.1", "Host: a", *shown, *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def put_head(path: str, announced: Digest, *headers: str, token: str | None = None) -> bytes:
    """Return the head of an upload that declares a size and a digest."""
    sent = f"Content-Length: {announced.size_bytes}", f"Repr-Digest: {announced.repr_digest}"
    return head("PUT", path, *sent, *headers, token=token)


class Answer(NamedTuple):
    """One answer, as received."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def problem(self) -> Any:
        assert self.headers["content-type"] == "application/problem+json"
        assert self.headers["graphstash-protocol"] == "1"
        assert self.headers["cache-control"] == "no-store"
        assert self.headers["x-content-type-options"] == "nosniff"
        problem = json.loads(self.body)
        assert problem["instance"].endswith(self.headers["x-request-id"])
        return problem


class Wire:
    """A connection; a context manager."""

    def __init__(self, url: str, *, source: str = "127.0.0.1") -> None:
        """Connect from an address of this host, which may be any of 127.0.0.0/8."""
        where = urlsplit(url)
        family, *_, address = socket.getaddrinfo(
            where.hostname, where.port or 80, type=socket.SOCK_STREAM
        )[0]
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        # Otherwise the kernel grows the buffer up to `tcp_rmem`, which may hold a whole blob.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        self._socket.settimeout(_SECONDS)
        self._socket.bind((source, 0))
        self._socket.connect(address)
        self._received = b""

    def fileno(self) -> int:
        """Let `select` wait for received bytes."""
        return self._socket.fileno()

    def send(self, data: bytes) -> bool:
        try:
            self._socket.sendall(data)
        except OSError:
            return False  # the server has closed
        return True

    def ask(self, data: bytes) -> Answer | None:
        self.send(data)
        return self.answer()

    def answer(self) -> Answer | None:
        """Return the next answer, or None if the connection ends before one begins."""
        while b"\r\n\r\n" not in self._received:
            if not self._receive():
                return None
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        size_bytes = int(headers["content-length"])
        while len(self._received) < size_bytes:
            assert self._receive(), "the answer is cut"
        body, self._received = self._received[:size_bytes], self._received[size_bytes:]
        return Answer(int(status_line.split()[1]), headers, body)

    def begin(self) -> int:
        """Return the status of the next interim answer: 100 if a body may follow."""
        while b"\r\n\r\n" not in self._received:
            assert self._receive(), "the server has closed"
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        return int(head.split()[1])

    def answers(self) -> list[Answer]:
        """Return all answers until the server closes."""
        found = []
        while (answer := self.answer()) is not None:
            found.append(answer)
        return found

    def drip(self, data: bytes, *, every: float) -> Answer | None:
        """Send bytes repeatedly until the server answers, or closes: then return None."""
        deadline = time.monotonic() + _SECONDS
        self._socket.settimeout(every)
        while time.monotonic() < deadline:
            self.send(data)
            try:
                if not self._receive():
                    return None
            except TimeoutError:
                continue
            self._socket.settimeout(_SECONDS)
            return self.answer()
        raise AssertionError("the server neither answered nor closed")

    def flood(self, data: bytes, *, at_most: int) -> int:
        """Send until the server closes, and return the number of bytes sent."""
        sent_bytes = 0
        while sent_bytes < at_most and self.send(data):
            sent_bytes += len(data)
        return sent_bytes

    @property
    def is_closed(self) -> bool:
        """Return whether the server closes within the timeout of the socket."""
        try:
            while self._receive():
                pass
        except TimeoutError:
            return False
        return True

    def _receive(self) -> bool:
        try:
            more = self._socket.recv(1 << 20)
        except ConnectionError:
            return False
        self._received += more
        return more != b""

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        self._socket.close()

    def __exit__(self, *_: object) -> None:
        self.close()
