"""Connections: httpx requests over kept HTTP/1.1 connections that keep deadlines.

h11 parses HTTP, as it does for httpcore, the transport that httpx brings. httpcore takes twice the
CPU time of h11 and the socket: its pool, its traces and its conversions cost more than a small
artifact. It also bounds each wait, but no call.

A server may close a kept-alive connection just as the next request is sent, for example when a
worker exits. The transport then retries once on a new connection, and callers count no failure.
"""

import os
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final, TypeAlias, cast

import h11

from graphstash._forking import forkable, unforked
from graphstash._http.lean_client import LeanClient
from graphstash._http.lean_httpx import httpx
from graphstash._http.sockets import Stream, connect_tcp, connect_unix
from graphstash.config import UNIX
from graphstash.errors import Reason, TransportError

__all__ = ["REPEATED", "TLS", "DeadlineTransport", "ProcessClient"]

REPEATED: Final = "graphstash.repeated"
"""Extension of the response to a repeated request: the server may also have executed the first one.
"""

TLS: Final = "graphstash.tls"
"""Extension of a response: the TLS socket, or None."""

_MAX_CONNECTIONS: Final = 16

_KEEP_ALIVE_SECONDS: Final = 110.0
"""Seconds after which an idle connection is closed. The server closes it after 120."""

_MAX_HEAD_BYTES: Final = 100 * 1024
"""Maximum size of a response's status line and headers."""

_HEAD_BYTES: Final = 16 * 1024
"""Maximum bytes of one read until the head of the response is complete. Small artifacts fit in."""

_PORTS: Final = {"http": 80, "https": 443}

_Origin: TypeAlias = tuple[str, str, int]
"""Scheme, host and port."""


class DeadlineTransport(httpx.BaseTransport):
    """Sends requests whose extension "deadline" bounds all waits together. Thread-safe.

    Request bodies can be iterated again.

    Args:
        context: TLS context, or None for connections without TLS.
        socket_path: path of a Unix socket, in a directory that only this user can write to. None
            for TCP.
    """

    # A signal handler may make a call while this thread is at any line here, so there are no locks:
    # each change of the queue and the list is one atomic operation.

    def __init__(self, *, context: ssl.SSLContext | None, socket_path: str | None = None) -> None:
        self._context = context
        self._socket_path = None if socket_path is None else Path(socket_path)
        self._is_closed = False
        self._idle: list[_Connection] = []
        self._free: SimpleQueue[None] = SimpleQueue()
        """One item for each further request that may run."""
        for _ in range(_MAX_CONNECTIONS):
            self._free.put(None)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read the response's status and headers."""
        body = _Body(self._give_back)
        try:
            self._take_turn(request, body)
            origin = _origin_of(request.url)
            kept = self._take_idle(origin)
            if kept is None:
                return self._exchange(self._connect(origin, request), request, body)
            try:
                return self._exchange(kept, request, body)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                if kept.is_answered:
                    raise
                first = error
            try:
                response = self._exchange(self._connect(origin, request), request, body)
            except httpx.TransportError as error:
                if isinstance(request.stream, httpx.ByteStream):
                    raise
                # "Not connected" would mean that the server stores nothing of the upload.
                raise first from error
        except BaseException:
            body.close()
            raise
        response.extensions[REPEATED] = True
        return response

    def close(self) -> None:
        """Close the idle connections now, and others at the end of their requests."""
        self._is_closed = True
        self._close_oldest(0)

    def _close_oldest(self, most: int) -> None:
        """Keep at most `most` idle connections."""
        with suppress(IndexError):  # a signal handler or another thread may take the last one
            while len(self._idle) > most:
                self._idle.pop(0).close()

    def _take_turn(self, request: httpx.Request, body: "_Body") -> None:
        # Set it first: a signal handler may raise as soon as the turn is taken.
        body.has_turn = True
        try:
            self._free.get_nowait()
        except Empty:
            body.has_turn = False
        else:
            return
        seconds = request.extensions["timeout"]["pool"]
        try:
            with forkable():
                self._free.get(timeout=request.extensions["deadline"].bound(seconds))
        except Empty:
            raise httpx.PoolTimeout(f"{_MAX_CONNECTIONS} requests are running") from None
        body.has_turn = True

    def _take_idle(self, origin: _Origin) -> "_Connection | None":
        """Take the newest usable connection, and close each idle one that is not usable."""
        found = None
        for connection in self._idle[::-1]:
            try:
                self._idle.remove(connection)
            except ValueError:  # another thread took it
                continue
            if not connection.is_usable:
                connection.close()
            elif found is None and connection.origin == origin:
                found = connection
            else:
                self._idle.insert(0, connection)  # keeps the order
        if self._is_closed:
            self._close_oldest(0)
        return found

    def _connect(self, origin: _Origin, request: httpx.Request) -> "_Connection":
        scheme, host, port = origin
        seconds, deadline = request.extensions["timeout"]["connect"], request.extensions["deadline"]
        if self._socket_path is not None:
            return _Connection(
                origin, connect_unix(self._socket_path, seconds=seconds, deadline=deadline)
            )
        context = self._context if scheme == "https" else None
        if scheme == "https" and context is None:
            raise httpx.UnsupportedProtocol("https without a TLS context")
        return _Connection(
            origin, connect_tcp(host, port, context=context, seconds=seconds, deadline=deadline)
        )

    def _exchange(
        self, connection: "_Connection", request: httpx.Request, body: "_Body"
    ) -> httpx.Response:
        try:
            status, headers = connection.exchange(request)
        except BaseException:
            connection.close()
            raise
        body.connection = connection
        return httpx.Response(
            status, headers=headers, stream=body, extensions={TLS: connection.tls}
        )

    def _give_back(self, connection: "_Connection | None") -> None:
        """End the turn of a request, and keep its connection if another request can use it."""
        try:
            if connection is not None and connection.finish():
                self._idle.append(connection)
                if self._is_closed:
                    self._close_oldest(0)
                elif len(self._idle) > _MAX_CONNECTIONS:  # of several origins
                    self._close_oldest(_MAX_CONNECTIONS)
            elif connection is not None:
                connection.close()
        finally:
            self._free.put(None)


class _Connection:
    """One connection to a server, for one request at a time.

    Attributes:
        is_answered: whether a byte of the latest response has arrived.
    """

    def __init__(self, origin: _Origin, stream: Stream) -> None:
        self.origin = origin
        self.is_answered = False
        self.tls = stream.tls
        self.close = stream.close
        self._stream = stream
        self._idle_until = 0.0
        self._may_continue = False

    @property
    def is_usable(self) -> bool:
        """Whether the server has probably kept this idle connection open."""
        return monotonic() < self._idle_until and not self._stream.is_readable

    def exchange(self, request: httpx.Request) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Send a request. Return the status and the headers of the response."""
        self.is_answered = self._may_continue = False
        self._parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        timeouts, deadline = request.extensions["timeout"], request.extensions["deadline"]
        self._receive = partial(self._stream.read, seconds=timeouts["read"], deadline=deadline)
        # A server may refuse a request before it has read all of it. Then read its response.
        with suppress(httpx.WriteError):
            try:
                self._send(
                    request,
                    partial(self._stream.write, seconds=timeouts["write"], deadline=deadline),
                )
            except h11.LocalProtocolError as error:
                raise httpx.LocalProtocolError(str(error)) from error
        while isinstance(event := self._next_event(), h11.InformationalResponse):
            pass
        head = cast("h11.Response", event)
        headers = head.headers.raw_items()
        self._length = _length_of(head.status_code, headers) if request.method == "GET" else None
        return head.status_code, headers

    def _send(self, request: httpx.Request, write: Callable[[bytes], None]) -> None:
        head = h11.Request(
            method=request.method,
            target=request.extensions.get("target", request.url.raw_path),
            headers=request.headers.raw,
        )
        data = self._parser.send(head) or b""
        for chunk in cast("httpx.SyncByteStream", request.stream):
            write(data + (self._parser.send(h11.Data(chunk)) or b""))
            data = b""
        if data := data + (self._parser.send(h11.EndOfMessage()) or b""):
            write(data)

    def body(self) -> Iterator[bytes]:
        """Yield the body of the response.

        Raises:
            httpx.TransportError: the server does not send it in time, or breaks the protocol.
        """
        if self._length is None:
            while isinstance(event := self._next_event(), h11.Data):
                yield bytes(event.data)
            is_whole = self._parser.their_state is h11.DONE and not self._parser.trailing_data[0]
        else:
            # Without h11, which copies a body twice. That takes as much CPU time as a digest.
            received, _ = self._parser.trailing_data
            chunk, left = received[: self._length], self._length
            while left:
                chunk = chunk or self._receive(left)
                if not chunk:
                    raise httpx.RemoteProtocolError(
                        "peer closed connection without sending complete message body "
                        f"(received {self._length - left} bytes, expected {self._length})"
                    )
                left -= len(chunk)
                yield chunk
                chunk = b""
            is_whole = len(received) <= self._length  # or the server sends unrequested bytes
        self._may_continue = is_whole and self._parser.our_state is h11.DONE

    def _next_event(self) -> object:
        try:
            while (event := self._parser.next_event()) is h11.NEED_DATA:
                data = self._receive(_HEAD_BYTES)
                if data:
                    self.is_answered = True
                elif self._parser.their_state is h11.SEND_RESPONSE:
                    raise httpx.RemoteProtocolError(
                        "Server disconnected without sending a response."
                    )
                self._parser.receive_data(data)
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        return event

    def finish(self) -> bool:
        """End the exchange. Return whether the connection may carry another request."""
        self._idle_until = monotonic() + _KEEP_ALIVE_SECONDS
        return self._may_continue


class _Body(httpx.SyncByteStream):
    """Body of a response. Closing or dropping it ends the turn of its request.

    Attributes:
        has_turn: whether the request counts as running.
        connection: connection that the body arrives on, or None before the response's head.
    """

    def __init__(self, give_back: Callable[[_Connection | None], None]) -> None:
        self.has_turn = False
        self.connection: _Connection | None = None
        self._give_back = give_back

    def __iter__(self) -> Iterator[bytes]:
        return iter(()) if self.connection is None else self.connection.body()

    def close(self) -> None:
        has_turn, self.has_turn = self.has_turn, False
        if has_turn:
            self._give_back(self.connection)

    __del__ = close


class ProcessClient:
    """A client over `DeadlineTransport`. Thread-safe, and usable in a forked child.

    Args:
        base_url: base URL of all requests, or `unix:<path>` for a Unix socket.
        context: called at the first connection. Returns the TLS context, or None for plain HTTP.
        headers: headers of all requests.
    """

    def __init__(
        self,
        base_url: str = "",
        *,
        context: Callable[[], ssl.SSLContext | None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._url = base_url
        self._context = context
        self._headers = headers
        self._lock = threading.Lock()  # guards the fields below
        self._connection: tuple[int, LeanClient, DeadlineTransport] | None = None
        self._closed = False

    def connect(self) -> tuple[LeanClient, DeadlineTransport]:
        """Return the client of this process and its transport.

        Raises:
            TransportError: the client is closed.
        """
        with unforked(), self._lock:
            if self._closed:
                raise TransportError(Reason.CONNECT, f"{self._url}: the client is closed")
            # A forked child must not use its parent's sockets.
            if self._connection is None or self._connection[0] != os.getpid():
                path = self._url.removeprefix(UNIX) if self._url.startswith(UNIX) else None
                transport = DeadlineTransport(context=self._context(), socket_path=path)
                client = LeanClient(
                    transport,
                    base_url=self._url if path is None else "http://localhost",
                    headers=self._headers or {},
                )
                self._connection = (os.getpid(), client, transport)
            return self._connection[1:]

    def close(self) -> None:
        """Close the connections of this process. Further requests fail."""
        with self._lock:
            if self._connection is not None and self._connection[0] == os.getpid():
                self._connection[2].close()
            self._connection = None
            self._closed = True


def _length_of(status: int, headers: Sequence[tuple[bytes, bytes]]) -> int | None:
    """Return the length of the body of a GET, or None if it is not stated as a number of bytes.

    h11 has checked that `Content-Length` is one number.
    """
    fields = {name.lower(): value for name, value in headers}
    if status in (204, 304) or b"transfer-encoding" in fields or b"content-length" not in fields:
        return None
    return int(fields[b"content-length"])


def _origin_of(url: httpx.URL) -> _Origin:
    if url.scheme not in _PORTS:
        raise httpx.UnsupportedProtocol(f"not http or https: {url.scheme!r}")
    return url.scheme, url.raw_host.decode("ascii"), url.port or _PORTS[url.scheme]
