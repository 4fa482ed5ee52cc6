"""What a network does to single requests of the load."""

import http.client
import random
import select
import socket
import struct
from enum import StrEnum

import httpx


class Damage(StrEnum):
    LOST = "the answer is lost"
    TWICE = "the answer is lost, and the request is sent again"
    GONE = "the caller leaves while the server works"
    BROKEN_OFF = "an upload breaks off within the body"
    SHORT = "an upload has fewer bytes than its digest announces"
    FLIPPED = "a bit of an upload is flipped"
    ABANDONED = "the reader of a download leaves within the body"


LOSSES = (Damage.LOST, Damage.LOST, Damage.TWICE, Damage.TWICE, Damage.GONE)
"""Damages of any request. A damage that is listed twice is twice as frequent."""

LONG_BYTES = 150_000
"""Minimum bytes that `read_part` leaves unread. With its socket options, the kernel buffers 70,000
bytes for a client that does not read. So the server is still sending when the client leaves."""

_RECEIVE_BUFFER_BYTES = 4096
_SEGMENT_BYTES = 1400
_MAX_STAY_SECONDS = 0.05


class UnharmedError(Exception):
    """The damage did not strike: the server answered too early, closed the connection, or sent no
    long body.
    """


def damaged_body(body: bytes, damage: Damage, pick: random.Random) -> bytes:
    """Return `body`, which must not be empty, with a flipped bit or without its end."""
    at = pick.randrange(len(body))
    if damage is Damage.FLIPPED:
        return body[:at] + bytes([body[at] ^ 1 << pick.randrange(8)]) + body[at + 1 :]
    return body[:at]


def lose(request: httpx.Request, damage: Damage, pick: random.Random, *, timeout: float) -> None:
    """Send a request, and leave without reading the answer.

    Raises:
        UnharmedError: the damage did not strike.
        OSError: the server cannot be reached, or does not answer in time.
    """
    is_served = damage in {Damage.LOST, Damage.TWICE}
    stays_seconds = pick.random() * _MAX_STAY_SECONDS
    body = request.content
    if damage is Damage.BROKEN_OFF:
        body = damaged_body(body, damage, pick)
    with socket.socket() as connection:
        connection.settimeout(timeout)
        _send(connection, request, body)
        if is_served and not connection.recv(1, socket.MSG_PEEK):
            raise UnharmedError
        if not is_served and any(select.select([connection], [], [], stays_seconds)):
            raise UnharmedError
        if pick.random() < 0.5:  # reset the connection instead of closing it
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def read_part(request: httpx.Request, pick: random.Random, *, timeout: float) -> httpx.Response:
    """Return an answer with the first part of its body, and close the connection.

    Raises:
        UnharmedError, OSError: as `lose`.
    """
    with socket.socket() as connection:
        connection.settimeout(timeout)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
        _send(connection, request, b"")
        try:
            answer = http.client.HTTPResponse(connection, method=request.method)
            answer.begin()
            if answer.status != 200 or (answer.length or 0) < LONG_BYTES:
                raise UnharmedError
            part = answer.read(pick.randrange(answer.length - LONG_BYTES + 1))
        except http.client.HTTPException as error:
            raise UnharmedError from error
        return httpx.Response(answer.status, headers=answer.getheaders(), content=part)


def _send(connection: socket.socket, request: httpx.Request, body: bytes) -> None:
    connection.connect((request.url.host, request.url.port))
    lines = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%b: %b" % header for header in request.headers.raw]
    connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
