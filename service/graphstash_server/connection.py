"""connections: limits for a TCP connection until a request has arrived completely.

uvicorn and httptools limit neither the size of a head nor the time that it takes, neither pipelined
requests nor connections: they read a header of three megabytes, or one byte per minute, without
end. `api.frame` checks complete requests.

Where all connections are taken, an address with fewer of them takes one of the address that has
most: one that waits for a request, else one that waits for its caller in the middle of a body or of
an answer. So no single address can keep the others out by being slow. Behind a proxy all have its
address, and the proxy has to share.

A refusal is a problem document, and the connection ends after it. While another answer is being
sent, nothing may be written into the middle of it; then that answer is the last one.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from ipaddress import IPv6Address
from itertools import chain
from secrets import token_hex
from typing import Any, ClassVar, Final

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from graphstash_schema import ErrorCode, Problem
from graphstash_schema.protocol import HEADER_PROTOCOL, PROBLEM_MEDIA_TYPE, PROTOCOL_VERSION
from graphstash_server.errors import ServerError
from graphstash_server.settings import ListenSettings

__all__ = ["MAX_HEAD_BYTES", "MAX_PIPELINED", "Connection", "connections", "owner_connections"]

MAX_HEAD_BYTES: Final = 64 * 1024
"""Limit for an incomplete request line with headers; counted from the second read on, of which each
returns at most 256 KiB."""

MAX_PIPELINED: Final = 32
"""Requests of one connection that wait for earlier answers. graphstash's client never sends a
request before it has the answer to the one before."""

_STALLED_SECONDS: Final = 60.0
"""How long an answer may wait for a caller that reads none of it."""

_DRAINED_BYTES_PER_SECOND: Final = 8 * 1024
"""Slowest rest of a body that was already answered: reading it keeps the connection usable."""

_LINGER_SECONDS: Final = 1.0
"""Time for a caller to read the refusal. If the connection were closed at once, with bytes of the
request unread, the kernel would reset it and the answer would be lost."""

_MAX_LINGERING: Final = 64
"""Connections beyond the limit that still get an answer; others are cut."""

_MAX_REFUSED_BYTES: Final = 8 * 1024**2
"""Limit for the bytes after a refusal, or in chunks, which are refused: they are read, so that the
caller gets to its answer, and dropped."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits; `connections` makes the class that uvicorn is given."""

    limits: ClassVar[ListenSettings]
    count_refusal: "ClassVar[staticmethod[[ErrorCode], None]]"
    by_address: "ClassVar[defaultdict[str, dict[Connection, None]]]"
    is_owners: ClassVar[bool] = False

    _address = ""
    _is_deaf = False  # whatever still comes is dropped
    _is_in_head = False
    _is_in_body = False
    _head_bytes = 0
    _drained_bytes = 0  # of a body that was answered already, since the timer was set
    _dropped_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuses the connection when there are too many, and none makes room for it."""
        super().connection_made(transport)
        self._address = _group_of(self.client[0] if self.client else "")
        self.by_address[self._address][self] = None
        most = self.limits.max_connections
        if len(self.connections) <= most or self._take_place():
            self._head_timer = self.loop.call_later(self.limits.header_seconds, self._head_is_late)
        elif len(self.connections) <= most + _MAX_LINGERING:
            self._refuse(
                ServerError(
                    ErrorCode.UNAVAILABLE,
                    f"this server process has {most} connections, its limit: retry, or raise "
                    "GRAPHSTASH_MAX_CONNECTIONS or GRAPHSTASH_WORKERS",
                    limit=most,
                )
            )
        else:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timers."""
        self._stop_listening()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser, and limits what it buffers."""
        if self._is_deaf:
            self._drop(len(data))
            return
        was_in_head = self._is_in_head
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade:
            self._end_after_answer()  # what follows is in a protocol that is not supported
            return
        except HttpParserError:
            self._refuse(
                ServerError(ErrorCode.INVALID_REQUEST, "malformed HTTP request (RFC 9112)")
            )
            return
        if self._is_in_head:
            self._head_bytes = self._head_bytes + len(data) if was_in_head else 0
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    ServerError(
                        ErrorCode.HEADERS_TOO_LARGE,
                        f"path and headers have more than {MAX_HEAD_BYTES} bytes",
                        limit=MAX_HEAD_BYTES,
                    )
                )
                return
        elif self._is_in_body and _is_chunked(self.headers):
            self._drop(len(data))
        self._watch(len(data))

    def on_message_begin(self) -> None:
        """A head begins."""
        self._is_in_head = True
        super().on_message_begin()
        self.scope["state"]["is_owner"] = self.is_owners

    def on_headers_complete(self) -> None:
        """A head has arrived; the frame checks its content."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _TooManyError
        self._head_is_complete()
        self._is_in_body = True
        refusal = _unreadable(self.url, self.parser.get_http_version())
        if refusal is not None:
            self.scope["state"]["refusal"] = refusal
            self.url = b"/-"  # what uvicorn can read; no call looks at it
        super().on_headers_complete()
        if refusal is not None:
            self.cycle.keep_alive = False

    def _head_is_complete(self) -> None:
        self._is_in_head = False
        self._unset_head_timer()

    def on_body(self, body: bytes) -> None:
        """A piece of a body. The first that waits is passed on as it is: uvicorn would copy it into
        a `bytearray` and out again, and an upload is copied often enough.
        """
        if not self.cycle.body:
            self.cycle.body = b""  # type: ignore[assignment] # it only adds to it and reads it
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has arrived."""
        self._is_in_body = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The caller reads more slowly than the server sends, which is fine for a while."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(_STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The caller reads again."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    @property
    def is_answering(self) -> bool:
        """Whether a request has arrived, at least its head, and is not answered yet."""
        newest: RequestResponseCycle | None = self.cycle
        return newest is not None and not newest.response_complete

    @property
    def is_up_to_caller(self) -> bool:
        """Whether the rest of a body has to be sent, or that of an answer to be read."""
        return self._is_in_body or self._write_timer is not None

    def _take_place(self) -> bool:
        """Cuts the oldest connection that waits for its caller, of the address that has most of
        them; False when none has more than this one's. Those without a request go first.
        """
        own_count = len(self.by_address[self._address])
        for others in sorted(self.by_address.values(), key=len, reverse=True):
            if len(others) <= own_count:
                return False
            idle = (other for other in others if not other.is_answering)
            slow = (other for other in others if other.is_up_to_caller)
            if (other := next(chain(idle, slow), None)) is not None:
                self.count_refusal(ErrorCode.UNAVAILABLE)
                other.cut()
                return True
        return False

    def cut(self) -> None:
        """Ends the connection at once."""
        self._stop_listening()
        self.transport.abort()

    def _stop_listening(self) -> None:
        """Drops whatever still comes; the connection counts for its address no longer."""
        self._is_deaf = True
        self._unset_head_timer()
        mates = self.by_address[self._address]
        mates.pop(self, None)
        if not mates:
            del self.by_address[self._address]

    def _drop(self, size_bytes: int) -> None:
        """Counts unwanted bytes: reading them without limit would only help an attacker."""
        self._dropped_bytes += size_bytes
        if self._dropped_bytes > _MAX_REFUSED_BYTES:
            self.transport.abort()

    def _watch(self, size_bytes: int) -> None:
        """Sets the timer unless a request is being answered; a whole request costs none."""
        if self._is_in_body:
            self._drained_bytes += size_bytes
        is_idle = not self.is_answering and self.timeout_keep_alive_task is None
        if self._head_timer is None and (self._is_in_head or is_idle):
            self._drained_bytes = 0
            self._head_timer = self.loop.call_later(self.limits.header_seconds, self._head_is_late)

    def _unset_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        seconds = self.limits.header_seconds
        self._head_timer = None
        if self._is_in_body and self._drained_bytes >= seconds * _DRAINED_BYTES_PER_SECOND:
            self._watch(0)
        elif self._is_in_head:
            self._refuse(
                ServerError(
                    ErrorCode.UPLOAD_TIMEOUT,
                    f"the headers did not arrive within {seconds:g} seconds: retry, or raise "
                    "GRAPHSTASH_HEADER_SECONDS on the server",
                    limit=seconds,
                )
            )
        elif not self.is_answering:
            self._stop_listening()
            self.transport.close()

    def _end_after_answer(self) -> None:
        """Makes the newest request of this connection the last one."""
        self._stop_listening()
        if self.is_answering:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    def _refuse(self, error: ServerError) -> None:
        """Sends the refusal unless another answer is being sent, then ends the connection."""
        if self.is_answering:
            self._end_after_answer()
            return
        self._stop_listening()
        self.count_refusal(error.code)
        self.transport.write(_answer(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.abort)


class _TooManyError(Exception):
    """Stops the parser: too many requests wait."""


def connections(
    limits: ListenSettings,
    *,
    count_refusal: Callable[[ErrorCode], None],
    kind: type[Connection] = Connection,
    **members: object,
) -> type[Connection]:
    """The class of the connections of one server, as uvicorn expects it.

    Args:
        limits: the settings that hold the limits.
        count_refusal: called for every request that is refused before the application gets it.
        kind: what the class is derived from.
        members: other attributes of the class.
    """
    members |= {
        "limits": limits,
        "count_refusal": staticmethod(count_refusal),
        "by_address": defaultdict(dict),
    }
    return type("Connection", (kind,), members)


def _group_of(host: str) -> str:
    """Whose connections are counted together: an IPv4 address, or the network of an IPv6 address,
    of which a host has as many as it likes.
    """
    if ":" not in host:
        return host
    address = IPv6Address(host)
    mapped = address.ipv4_mapped
    return str(mapped) if mapped else str(IPv6Address(int(address) >> 64 << 64))


def owner_connections(kind: type[Connection]) -> type[Connection]:
    """The same class for connections that only the owner of the server can make."""
    return type("OwnerConnection", (kind,), {"is_owners": True})


def _is_chunked(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name == b"transfer-encoding" for name, _ in headers)


def _unreadable(target: bytes, version: str) -> ServerError | None:
    """Why a request line is not answered; None for `/...` in HTTP/1.0 or 1.1."""
    if version not in {"1.0", "1.1"}:
        return ServerError(
            ErrorCode.INVALID_REQUEST, f"HTTP/{version} is not supported; use HTTP/1.1"
        )
    if not target.startswith(b"/"):
        return ServerError(
            ErrorCode.INVALID_REQUEST,
            "this server is not a proxy: request a path, not a whole URL",
        )
    return None


def _answer(error: ServerError) -> bytes:
    """A whole HTTP answer with a problem document, for a request that was never parsed."""
    request_id = token_hex(8)
    problem = Problem.of(error.code, error.detail, request_id=request_id, limit=error.limit)
    body = problem.model_dump_json(exclude_none=True).encode()
    headers: dict[str, Any] = {
        "Content-Type": PROBLEM_MEDIA_TYPE,
        "Content-Length": len(body),
        "Cache-Control": "no-store",
        "Connection": "close",
        HEADER_PROTOCOL: PROTOCOL_VERSION,
        "X-Request-Id": request_id,
        "X-Content-Type-Options": "nosniff",
    }
    if error.code is ErrorCode.UNAVAILABLE:
        headers["Retry-After"] = 2
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[problem.status] + lines.encode() + b"\r\n" + body
