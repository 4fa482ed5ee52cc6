"""A TCP proxy in front of a real server that fails on demand, byte by byte."""

import re
import socket
import threading
import time
from contextlib import suppress
from enum import StrEnum
from typing import Final

from support.tcp_proxy import TcpProxy, read_head, reset

IMPATIENT: Final = {"connect_seconds": 0.5, "first_byte_seconds": 2}
"""The product's default timeouts, for clients of the proxy. Some faults last until a timeout."""


class Fault(StrEnum):
    """How the proxy fails. Only `NONE` passes a connection through unchanged."""

    NONE = "none"
    RESET = "reset"
    """Reset every connection after its request."""
    SILENT = "silent"
    """Never answer."""
    DRIP = "drip"
    """Send one byte of the answer every 0.2 s, headers included."""
    GARBAGE = "garbage"
    """Answer with bytes that are not HTTP."""
    STRANGER = "stranger"
    """Answer every request with 200 and valid HTTP, as another server would."""
    FAILING = "failing"
    """Answer every request with 500."""
    BUSY = "busy"
    """Answer every request with 503 and Retry-After."""
    FLIP = "flip"
    """Flip a bit in the middle of every artifact's body."""
    TRUNCATE = "truncate"
    """End the connection in the middle of an artifact's body."""
    SWAP = "swap"
    """Answer every GET of an artifact with the artifact `swap_to`."""


_STRANGER = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>"
_FAILING = b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n"
_BUSY = b"HTTP/1.1 503 Busy\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"
_ANSWERS = {
    Fault.GARBAGE: b"\x16\x03\x01 this is not HTTP\r\n\r\n\xff\xfe",
    Fault.STRANGER: _STRANGER,
    Fault.FAILING: _FAILING,
    Fault.BUSY: _BUSY,
}
LEASE_REQUEST: Final = re.compile(rb"POST /v1/[^/ ]+/leases/")

_GET_ARTIFACT = re.compile(rb"^GET (/v1/[^/ ]+/artifacts/)([^ ]+)( HTTP)")


class FaultProxy(TcpProxy):
    """A proxy whose `fault` may be changed at any time.

    Each connection carries one request, so every request meets the present fault.

    Attributes:
        hold: pattern of requests whose answers wait for `go_on`. Default: none.
        held: set when the server has answered such a request.
    """

    def __init__(self, upstream_port: int) -> None:
        self.fault = Fault.NONE
        self.swap_to = ""
        self.hold: re.Pattern[bytes] | None = None
        self.held, self.go_on = threading.Event(), threading.Event()
        self._closed = False
        super().__init__(upstream_port)

    def close(self) -> None:
        self._closed = True
        self.go_on.set()
        super().close()

    def serve(self, connection: socket.socket) -> None:
        head, body = read_head(connection)
        if not head:
            return
        fault = self.fault
        if fault is Fault.SILENT:
            while not self._closed and connection.recv(65536):
                pass
        elif fault is Fault.RESET:
            reset(connection)
        elif fault in _ANSWERS:
            connection.sendall(_ANSWERS[fault])
        else:
            self._forward(connection, head + b"\r\n\r\n" + body, fault)

    def _forward(self, connection: socket.socket, head: bytes, fault: Fault) -> None:
        artifact = _GET_ARTIFACT.match(head)
        if fault is Fault.SWAP and artifact:
            head = _GET_ARTIFACT.sub(rb"GET \g<1>" + self.swap_to.encode() + rb"\g<3>", head)
        # With one request per connection, the end of the connection ends the answer.
        head = re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", head)
        head = head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        answer = bytearray()
        with self.upstream(connection, head) as upstream, suppress(OSError):
            while chunk := upstream.recv(1 << 20):
                answer += chunk
        if self.hold and self.hold.match(head):
            self.held.set()
            self.go_on.wait()
        body_at = answer.find(b"\r\n\r\n") + 4
        middle = body_at + (len(answer) - body_at) // 2
        if artifact and answer.startswith(b"HTTP/1.1 200") and len(answer) > body_at:
            if fault is Fault.FLIP:
                answer[middle] ^= 0x10
            if fault is Fault.TRUNCATE:
                del answer[middle:]
        if fault is Fault.DRIP:
            for byte in answer:
                connection.sendall(bytes([byte]))
                time.sleep(0.2)
                if self._closed:
                    return
        else:
            connection.sendall(answer)
        # Closing alone would not end the connection while the pump still reads from it.
        connection.shutdown(socket.SHUT_RDWR)
