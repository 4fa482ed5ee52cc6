"""connections: what one TCP connection may cost before a request has come in whole.

uvicorn and httptools bound neither the bytes of a head nor the time that it takes, neither the
requests that wait in a pipeline nor the connections: three megabytes of one header, or one byte a
minute, are read without end. What has come in whole is checked in `api.frame`.

A refusal is a problem document, and the connection ends after it. While an answer is on its way,
nothing may be written into the middle of it: then that answer is the last one.
"""

import asyncio
from dataclasses import dataclass
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

__all__ = ["MAX_HEAD_BYTES", "Connection", "ConnectionLimits", "connections"]

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of a request line and headers that have not come in whole; counted from the second read on, of
which each brings at most 256 KiB."""

_MAX_PIPELINED: Final = 32
"""Requests of one connection that wait for the answers before them. No client of ours sends a
second one before it has the first answer."""

_STALLED_SECONDS: Final = 60.0
"""How long an answer may wait for a caller that reads nothing of it."""

_DRAINED_BYTES_PER_SECOND: Final = 8 * 1024
"""Slowest rest of a body that was answered already: reading it saves the connection."""

_LINGER_SECONDS: Final = 1.0
"""Time for a caller to read the refusal: closing at once, with bytes of it unread, would make the
kernel reset the connection and the answer be lost."""

_MAX_LINGERING: Final = 64
"""Connections beyond the limit that still get an answer; others are cut."""

_MAX_REFUSED_BYTES: Final = 8 * 1024**2
"""Of what comes after a refusal, or in chunks, which are refused: read, so that the caller gets to
its answer, and dropped."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What the settings say about connections.

    Attributes:
        header_seconds: for a head to come in, from its first byte or from the connection's start.
        max_connections: of this process.
    """

    header_seconds: float
    max_connections: int


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits; `connections` makes the class that uvicorn is given."""

    limits: ClassVar[ConnectionLimits]

    _is_deaf = False  # whatever still comes is dropped
    _is_in_head = False
    _is_in_body = False
    _head_bytes = 0
    _drained_bytes = 0  # of a body that was answered already, since the timer was set
    _dropped_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuses it when there are too many."""
        super().connection_made(transport)
        most = self.limits.max_connections
        if len(self.connections) <= most:
            self._head_timer = self.loop.call_later(self.limits.header_seconds, self._head_is_late)
        elif len(self.connections) <= most + _MAX_LINGERING:
            self._refuse(
                ServerError(
                    ErrorCode.UNAVAILABLE,
                    f"this server process has {most} connections: ask again, or raise "
                    "GRAPHSTASH_MAX_CONNECTIONS or GRAPHSTASH_WORKERS",
                    limit=most,
                )
            )
        else:
            self._is_deaf = True
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets its timers."""
        self._is_deaf = True
        self._unset_head_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser, and bounds what it keeps for itself."""
        if self._is_deaf:
            self._drop(len(data))
            return
        was_in_head = self._is_in_head
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade:
            self._end_after_answer()  # what follows is in no protocol that is spoken here
            return
        except HttpParserError:
            self._refuse(
                ServerError(ErrorCode.INVALID_REQUEST, "this is no request as RFC 9112 has it")
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

    def on_headers_complete(self) -> None:
        """A head has come in; the frame looks at what it says."""
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise _TooManyError
        self._is_in_head = False
        self._is_in_body = True
        self._unset_head_timer()
        refusal = _unreadable(self.url, self.parser.get_http_version())
        if refusal is not None:
            self.scope["state"]["refusal"] = refusal
            self.url = b"/-"  # what uvicorn can read; no call looks at it
        super().on_headers_complete()
        if refusal is not None:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """A request has come in."""
        self._is_in_body = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The caller reads more slowly than it is answered: for a while that is fine."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(_STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read on."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    @property
    def _is_answering(self) -> bool:
        newest: RequestResponseCycle | None = self.cycle
        return newest is not None and not newest.response_complete

    def _drop(self, size_bytes: int) -> None:
        """Counts bytes that nobody wants; their patient reader would work for the attacker."""
        self._dropped_bytes += size_bytes
        if self._dropped_bytes > _MAX_REFUSED_BYTES:
            self.transport.abort()

    def _watch(self, size_bytes: int) -> None:
        """Sets the timer unless a request is being answered; a whole request costs none."""
        if self._is_in_body:
            self._drained_bytes += size_bytes
        if self._head_timer is None and (self._is_in_head or not self._is_answering):
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
                    f"the headers did not come within {seconds:g} seconds: ask again, or raise "
                    "GRAPHSTASH_HEADER_SECONDS on the server",
                    limit=seconds,
                )
            )
        elif not self._is_answering:
            self._is_deaf = True
            self.transport.close()

    def _end_after_answer(self) -> None:
        """The newest request of this connection is the last one."""
        self._is_deaf = True
        self._unset_head_timer()
        if self._is_answering:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    def _refuse(self, error: ServerError) -> None:
        """Answers where an answer has a place; the connection ends in any case."""
        if self._is_answering:
            self._end_after_answer()
            return
        self._is_deaf = True
        self._unset_head_timer()
        context = self.config.app.state.context  # type: ignore[union-attr] # ours, see `server`
        context.accounting.count_refusal(error.code)
        self.transport.write(_answer(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.abort)


class _TooManyError(Exception):
    """Stops the parser: too many requests wait."""


def connections(limits: ConnectionLimits) -> type[Connection]:
    """The class of the connections of one server, as uvicorn wants it."""
    return type("Connection", (Connection,), {"limits": limits})


def _is_chunked(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name == b"transfer-encoding" for name, _ in headers)


def _unreadable(target: bytes, version: str) -> ServerError | None:
    """Why a request line is not answered; None for `/...` in HTTP/1.0 or 1.1."""
    if version not in {"1.0", "1.1"}:
        return ServerError(
            ErrorCode.INVALID_REQUEST, f"HTTP/{version} is not spoken here: use HTTP/1.1"
        )
    if not target.startswith(b"/"):
        return ServerError(
            ErrorCode.INVALID_REQUEST,
            "this server is no proxy: ask for a path, not for a whole URL",
        )
    return None


def _answer(error: ServerError) -> bytes:
    """A problem document as it stands on the wire, for a request that never came in."""
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
