"""connections: limit a TCP connection until a request has arrived completely.

uvicorn and httptools limit neither the size nor the duration of a head, and neither pipelined
requests nor connections. They would read a header of three megabytes, or one byte per minute,
without end. `api.frame` checks complete requests.

If all connections are taken, a new connection evicts one from the address with the most: first one
that waits for a request, otherwise a stalled one. A connection is stalled if no byte of a body has
arrived, or a write has been blocked without progress, for two seconds. So no single address can
exclude the others by being slow. Behind a proxy, all callers share its address, and the proxy has
to distribute the connections.

If there is nothing to evict, the server closes the connection that has been idle between two
requests for the longest time, among addresses with at least as many connections. Processes keep
unused connections while they compile. Clients retry a request if a kept connection ends before the
response begins.

If no connection is idle, the new one waits for a second, and its request stays unread. The
connection that has waited longest takes the next place. So a crowd of processes shares a few
connections without pauses.

A refusal is a problem document, after which the connection ends. If a response is in progress, the
server finishes it and then closes the connection.
"""

import asyncio
import socket
import struct
from collections import defaultdict
from collections.abc import Callable
from ipaddress import IPv6Address
from itertools import chain, islice
from secrets import token_hex
from typing import ClassVar, Final

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from graphstash_schema import ErrorCode
from graphstash_server.api.frame import frame_headers, header_lines
from graphstash_server.api.problems import problem_response
from graphstash_server.errors import ServerError
from graphstash_server.settings import ListenSettings

__all__ = ["MAX_HEAD_BYTES", "MAX_PIPELINED", "Connection", "connections", "owner_connections"]

MAX_HEAD_BYTES: Final = 64 * 1024
"""Maximum bytes of a request line with headers that is still incomplete. Its first read, of at most
256 KiB, does not count."""

MAX_PIPELINED: Final = 32
"""Maximum number of requests of one connection that wait for earlier responses. graphstash's client
never sends a request before it has the previous response."""

_STALLED_SECONDS: Final = 60.0
_MIN_ACKNOWLEDGED_BYTES: Final = 64 * 1024
"""While a write is blocked, the caller must acknowledge this many bytes in that many seconds. One
write may be a mebibyte, which takes a slow caller longer."""

_MOVING_SECONDS: Final = 2.0
"""Seconds after which a transfer is stalled: no byte of a body arrives, or the caller acknowledges
no byte of a blocked write."""

_ACKNOWLEDGED: Final = struct.Struct("120xQ")
"""`tcpi_bytes_acked` of Linux's `struct tcp_info`."""

_DRAINED_BYTES_PER_SECOND: Final = 8 * 1024
"""Minimum rate of a body whose response was already sent. The server discards the rest of the body,
so that the connection stays usable."""

_LINGER_SECONDS: Final = 1.0
"""Seconds for a caller to read the refusal. If the server closed the connection at once with
request bytes unread, the kernel would reset it and the refusal would be lost."""

_MAX_LINGERING: Final = 64
"""Maximum connections without a place that get `_LINGER_SECONDS`. The server closes any others at
once. Linux clients still read the refusal then. With TLS, the server aborts them without a refusal,
because closing waits for the caller."""

_MAX_WAITING: Final = 1024
"""Maximum connections that wait for a place. They are also at most as many as there are places."""

_WAITING_SECONDS: Final = 1.0
"""Seconds that a connection waits for a place. Clients wait two seconds for the first byte."""

_MAX_OFFERS: Final = 16
"""Maximum waiting connections for which one idle connection is considered."""

_MAX_REFUSED_BYTES: Final = 8 * 1024**2
"""Maximum bytes to discard after a refusal, or in a chunked body, which is always refused. Callers
read the response only after they have sent the body."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits. `connections` builds the subclass for uvicorn."""

    limits: ClassVar[ListenSettings]
    count_refusal: "ClassVar[staticmethod[[ErrorCode], None]]"
    places: "ClassVar[set[Connection]]"
    by_address: "ClassVar[defaultdict[str, dict[Connection, None]]]"  # of those in `places`
    idle: "ClassVar[dict[Connection, None]]"  # those between two requests, the idlest first
    waiting: "ClassVar[dict[Connection, None]]"  # those without a place, the oldest first
    is_owners: ClassVar[bool] = False

    _address = ""
    _is_deaf = False  # further input is discarded
    _early = b""  # input that arrived before the connection had a place
    _is_in_head = False
    _is_in_body = False
    _head_bytes = 0
    _heard_at = 0.0  # when a piece of the body arrived
    _drained_bytes = 0  # of an already answered body, since the timer was set
    _dropped_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _window_bytes = 0  # acknowledged when the timer was set
    _moved_bytes = 0  # acknowledged at `_moved_at`
    _moved_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        """Let the connection wait if there are too many and none can be evicted."""
        super().connection_made(transport)
        self._address = _group_of(self.client[0] if self.client else "")
        most = self.limits.max_connections
        if len(self.places) < most or self._take_place():
            self._enter()
        elif len(self.waiting) < min(most, _MAX_WAITING):
            self.waiting[self] = None
            self._head_timer = self.loop.call_later(_WAITING_SECONDS, self._turn_away)
        elif len(self.connections) <= most + len(self.waiting) + _MAX_LINGERING:
            self._turn_away()
        elif self.scheme == "https":
            self.cut()
        else:
            self.count_refusal(ErrorCode.TOO_MANY_CONNECTIONS)
            self.transport.write(_answer(self._too_many()))
            self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._stop_listening()
        self.resume_writing()
        super().connection_lost(exc)

    def _enter(self) -> None:
        """Take a place, and wait for the first request."""
        self._unset_head_timer()
        self.waiting.pop(self, None)
        self.places.add(self)
        self.by_address[self._address][self] = None
        self._head_timer = self.loop.call_later(self.limits.header_seconds, self._head_is_late)
        if self._early:
            self.loop.call_soon(self._read_early)

    def _read_early(self) -> None:
        early, self._early = self._early, b""
        self.flow.resume_reading()  # only now: otherwise later input could come first
        self.data_received(early)

    def _turn_away(self) -> None:
        self._refuse(self._too_many())

    def _too_many(self) -> ServerError:
        most = self.limits.max_connections
        return ServerError(
            ErrorCode.TOO_MANY_CONNECTIONS,
            f"this server process has {most} connections, its limit: retry, or raise "
            "GRAPHSTASH_MAX_CONNECTIONS or GRAPHSTASH_WORKERS",
            limit=most,
            retry_after_seconds=1,
        )

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and limit how much it buffers."""
        if self in self.waiting:
            self._early += data
            self.flow.pause_reading()
            return
        if self._is_deaf:
            self._drop(len(data))
            return
        self.idle.pop(self, None)
        was_in_head = self._is_in_head
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade:
            self._end_after_answer()  # the rest is in an unsupported protocol
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
        self._rest_if_idle()

    def on_message_begin(self) -> None:
        """Handle the start of a head."""
        self._is_in_head = True
        super().on_message_begin()
        self.scope["state"]["is_owner"] = self.is_owners

    def on_headers_complete(self) -> None:
        """Handle a complete head. The frame checks its content."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _TooManyError
        self._head_is_complete()
        self._is_in_body = True
        refusal = _request_line_refusal(self.url, self.parser.get_http_version())
        if refusal is not None:
            self.scope["state"]["refusal"] = refusal
            self.url = b"/-"  # a path that uvicorn can parse; no call reads it
        super().on_headers_complete()
        if refusal is not None:
            self.cycle.keep_alive = False

    def _head_is_complete(self) -> None:
        self._is_in_head = False
        self._unset_head_timer()

    def on_body(self, body: bytes) -> None:
        """Handle a piece of a body. Pass on the first pending piece without copying it twice."""
        if not self.cycle.body:
            self.cycle.body = b""  # type: ignore[assignment] # uvicorn only appends to it and reads it
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of a request."""
        self._is_in_body = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Start the timer that aborts the connection if the write stays blocked."""
        super().pause_writing()
        if self._write_timer is None:
            self._window_bytes = self._moved_bytes = self._acknowledged_bytes()
            self._moved_at = self.loop.time()
            self._write_timer = self.loop.call_later(_STALLED_SECONDS, self._write_is_late)

    def _write_is_late(self) -> None:
        acknowledged = self._acknowledged_bytes()
        if acknowledged - self._window_bytes < _MIN_ACKNOWLEDGED_BYTES:
            self.transport.abort()
            return
        self._window_bytes = acknowledged
        self._write_timer = self.loop.call_later(_STALLED_SECONDS, self._write_is_late)

    def _acknowledged_bytes(self) -> int:
        """Return the bytes that the caller's kernel has acknowledged, 0 for a Unix socket."""
        try:
            connection = self.transport.get_extra_info("socket")
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED.size)
            return int(_ACKNOWLEDGED.unpack(info)[0])
        except (OSError, struct.error):  # also on a kernel that does not count them
            return 0

    def resume_writing(self) -> None:
        """Stop the timer, because the caller has read enough."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    @property
    def is_answering(self) -> bool:
        """Whether the head of a request has arrived and its response is not complete."""
        newest: RequestResponseCycle | None = self.cycle
        return newest is not None and not newest.response_complete

    @property
    def is_between_requests(self) -> bool:
        """Whether a request was answered completely, and nothing of another one has arrived."""
        newest: RequestResponseCycle | None = self.cycle
        is_reading = self._is_in_head or self._is_in_body
        return newest is not None and newest.response_complete and not is_reading

    def on_response_complete(self) -> None:
        """Handle the end of a response."""
        super().on_response_complete()
        self._rest_if_idle()

    def _rest_if_idle(self) -> None:
        if self.is_between_requests and not self.transport.is_closing():
            self._rest()

    def _rest(self) -> None:
        """Become idle. If another connection waits, give it the place of this one."""
        self.idle[self] = None
        for other in islice(self.waiting, _MAX_OFFERS):
            if self._may_yield_to(other):
                self.end()
                other._enter()  # noqa: SLF001 - another connection of this class
                return

    def _may_yield_to(self, other: "Connection") -> bool:
        """Return whether another connection may take this one's place. Its address then has at most
        as many connections as this one's has now.
        """
        mine, others = (self.by_address.get(each._address, ()) for each in (self, other))  # noqa: SLF001 - as above
        return mine is others or len(mine) > len(others)

    @property
    def is_stalled(self) -> bool:
        """Whether no byte moved in `_MOVING_SECONDS`, in the middle of a body or a blocked write.

        Bytes of a write count as moved when this property finds them acknowledged.
        """
        if self._write_timer is not None:
            if (acknowledged := self._acknowledged_bytes()) > self._moved_bytes:
                self._moved_bytes, self._moved_at = acknowledged, self.loop.time()
            since = self._moved_at
        elif self._is_in_body:
            since = self._heard_at
        else:
            return False
        return self.loop.time() - since >= _MOVING_SECONDS

    def _take_place(self) -> bool:
        """End another connection in favor of this one, and return whether there was one to end.

        Evict from an address with more connections than this one's, the largest first: the oldest
        that waits for a request, otherwise the oldest stalled one. If there is none, close the
        connection with the longest idle time, among addresses with at least as many.
        """
        own_count = len(self.by_address.get(self._address, ())) + 1
        larger = (others for others in self.by_address.values() if len(others) > own_count)
        for others in sorted(larger, key=len, reverse=True):
            idle = (other for other in others if not other.is_answering)
            stalled = (other for other in others if other.is_stalled)
            if (other := next(chain(idle, stalled), None)) is not None:
                self.count_refusal(ErrorCode.TOO_MANY_CONNECTIONS)
                other.cut()
                return True
        for other in self.idle:
            if other._may_yield_to(self):  # noqa: SLF001 - as above
                other.end()
                return True
        return False

    def cut(self) -> None:
        """End the connection at once."""
        self._stop_listening()
        self.transport.abort()

    def end(self) -> None:
        """End the connection after the buffered output."""
        self._stop_listening()
        self.transport.close()

    def _stop_listening(self) -> None:
        """Discard further input, and stop counting the connection for its address. The connection
        that has waited longest then takes the free place, unless a new one has taken it at once.
        """
        self._is_deaf = True
        self._unset_head_timer()
        for group in (self.idle, self.waiting):
            group.pop(self, None)
        self.places.discard(self)
        mates = self.by_address[self._address]
        mates.pop(self, None)
        if not mates:
            del self.by_address[self._address]
        self.loop.call_soon(self._fill_places)

    def _fill_places(self) -> None:
        while self.waiting and len(self.places) < self.limits.max_connections:
            next(iter(self.waiting))._enter()  # noqa: SLF001 - another connection of this class

    def _drop(self, size_bytes: int) -> None:
        """Count unwanted bytes. Abort at the limit, which stops an attacker."""
        self._dropped_bytes += size_bytes
        if self._dropped_bytes > _MAX_REFUSED_BYTES:
            self.transport.abort()

    def _watch(self, size_bytes: int) -> None:
        """Start the timer for an incomplete head, or if no request is being answered."""
        if self._is_in_body and size_bytes:
            self._heard_at = self.loop.time()
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
            self.end()

    def _end_after_answer(self) -> None:
        """Close the connection after the response to its newest request.

        Until then, the connection counts for its address, so that it can be evicted.
        """
        if self.is_answering:
            self._is_deaf = True
            self._unset_head_timer()
            self.cycle.keep_alive = False
        else:
            self.end()

    def _refuse(self, error: ServerError) -> None:
        """Send the refusal unless a response is in progress, then end the connection."""
        if self.is_answering:
            self._end_after_answer()
            return
        self._stop_listening()
        self.count_refusal(error.code)
        lingering = len(self.connections) - len(self.places) - len(self.waiting)
        # Those that waited are told that the server is busy: their jobs wait instead of compiling.
        if lingering > _MAX_LINGERING and error.code is not ErrorCode.TOO_MANY_CONNECTIONS:
            self.transport.abort()
            return
        self.transport.write(_answer(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.abort)


class _TooManyError(Exception):
    """Stops the parser, because too many requests are pipelined."""


def connections(
    limits: ListenSettings,
    *,
    count_refusal: Callable[[ErrorCode], None],
    kind: type[Connection] = Connection,
    **members: object,
) -> type[Connection]:
    """Return the connection class of one server for uvicorn, derived from `kind` with `members`.

    The class calls `count_refusal` for each request that it refuses before the application gets it.
    """
    members |= {
        "limits": limits,
        "count_refusal": staticmethod(count_refusal),
        "places": set(),
        "by_address": defaultdict(dict),
        "idle": {},
        "waiting": {},
    }
    return type("Connection", (kind,), members)


def _group_of(host: str) -> str:
    """Return the IPv4 address, or the /64 IPv6 network, because one host may use all of it."""
    if ":" not in host:
        return host
    address = IPv6Address(host)
    mapped = address.ipv4_mapped
    return str(mapped) if mapped else str(IPv6Address(int(address) >> 64 << 64))


def owner_connections(kind: type[Connection]) -> type[Connection]:
    """Derive the class for connections that only the owner of the server can open."""
    return type("OwnerConnection", (kind,), {"is_owners": True})


def _is_chunked(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name == b"transfer-encoding" for name, _ in headers)


def _request_line_refusal(target: bytes, version: str) -> ServerError | None:
    """Return the refusal of a request line, or None for a path in HTTP/1.0 or 1.1."""
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
    """Return a complete HTTP response with a problem document, for an unparsed request."""
    request_id = token_hex(8)
    made = problem_response(request_id, error, headers={"Connection": "close"})
    lines = header_lines([*made.raw_headers, *frame_headers("http", request_id.encode())])
    return STATUS_LINE[error.status] + lines + b"\r\n" + bytes(made.body)
