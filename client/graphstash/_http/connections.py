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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final, TypeAlias, cast

import h11

from graphstash._forking import forkable, unforked
from graphstash._http.deadline import Deadline
from graphstash._http.lean_client import LeanClient
from graphstash._http.lean_httpx import httpx
from graphstash._http.sockets import Stream, connect_tcp, connect_unix
from graphstash.config import UNIX
from graphstash.errors import Reason, TransportError

__all__ = ["REPEATED", "TLS", "DeadlineTransport", "ProcessClient"]

REPEATED: Final = "graphstash.repeated"
"""Extension of the response to a repeated request: the server may have carried out the first one.
"""

TLS: Final = "graphstash.tls"
"""Extension of a response: the TLS socket, or None."""

_MAX_CONNECTIONS: Final = 16

_KEEP_ALIVE_SECONDS: Final = 110.0
"""Seconds after which an idle connection is closed. The server closes it after 120."""

_MAX_HEAD_BYTES: Final = 100 * 1024
"""Maximum size of a response's status line and headers."""

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
        """As many items as further requests may run."""
        for _ in range(_MAX_CONNECTIONS):
            self._free.put(None)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read the response's status and headers."""
        self._take_turn(request)
        try:
            origin = _origin_of(request.url)
            kept = self._kept(origin)
            if kept is None:
                return self._exchange(self._connect(origin, request), request)
            try:
                return self._exchange(kept, request)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                if kept.is_answered:
                    raise
                first = error
            try:
                response = self._exchange(self._connect(origin, request), request)
            except httpx.TransportError as error:
                if isinstance(request.stream, httpx.ByteStream):
                    raise
                # "Not connected" would mean that the server stores nothing of the upload.
                raise first from error
        except BaseException:
            self._free.put(None)
            raise
        response.extensions[REPEATED] = True
        return response

    def close(self) -> None:
        """Close the idle connections now, and others at the end of their requests."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    def _take_turn(self, request: httpx.Request) -> None:
        with suppress(Empty):
            self._free.get_nowait()
            return
        seconds = request.extensions["timeout"]["pool"]
        try:
            with forkable():
                self._free.get(timeout=request.extensions["deadline"].bound(seconds))
        except Empty:
            raise httpx.PoolTimeout(f"{_MAX_CONNECTIONS} requests are running") from None

    def _kept(self, origin: _Origin) -> "_Connection | None":
        for connection in self._idle[::-1]:
            if connection.origin == origin:
                try:
                    self._idle.remove(connection)
                except ValueError:  # another thread took it
                    continue
                if connection.is_usable:
                    return connection
                connection.close()
        return None

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

    def _exchange(self, connection: "_Connection", request: httpx.Request) -> httpx.Response:
        try:
            head = connection.exchange(request)
        except BaseException:
            connection.close()
            raise
        return httpx.Response(
            head.status_code,
            headers=head.headers.raw_items(),
            stream=_Body(connection, self._give_back),
            extensions={TLS: connection.tls},
        )

    def _give_back(self, connection: "_Connection") -> None:
        if connection.finish() and not self._is_closed:
            self._idle.append(connection)
            if len(self._idle) > _MAX_CONNECTIONS:  # of several origins
                self._idle.pop(0).close()
        else:
            connection.close()
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
        self._parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._idle_until = 0.0
        self._read_seconds = 0.0
        self._deadline = Deadline(0.0)

    @property
    def is_usable(self) -> bool:
        """Whether the server has probably kept this idle connection open."""
        return monotonic() < self._idle_until and not self._stream.is_readable

    def exchange(self, request: httpx.Request) -> h11.Response:
        """Send a request and return the head of the response."""
        self.is_answered = False
        self._deadline = request.extensions["deadline"]
        timeouts = request.extensions["timeout"]
        self._read_seconds = timeouts["read"]
        # A server may refuse a request before it has read all of it. Then read its response.
        with suppress(httpx.WriteError):
            try:
                self._send(request, timeouts["write"])
            except h11.LocalProtocolError as error:
                raise httpx.LocalProtocolError(str(error)) from error
        while isinstance(event := self.next_event(), h11.InformationalResponse):
            pass
        return cast("h11.Response", event)

    def _send(self, request: httpx.Request, seconds: float) -> None:
        head = h11.Request(
            method=request.method,
            target=request.extensions.get("target", request.url.raw_path),
            headers=request.headers.raw,
        )
        data = self._parser.send(head) or b""
        for chunk in cast("httpx.SyncByteStream", request.stream):
            data += self._parser.send(h11.Data(chunk)) or b""
            self._stream.write(data, seconds, self._deadline)
            data = b""
        data += self._parser.send(h11.EndOfMessage()) or b""
        if data:
            self._stream.write(data, seconds, self._deadline)

    def next_event(self) -> object:
        """Return the next part of the response.

        Raises:
            httpx.TransportError: the server does not send it in time, or breaks the protocol.
        """
        try:
            while (event := self._parser.next_event()) is h11.NEED_DATA:
                data = self._stream.read(self._read_seconds, self._deadline)
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
        parser = self._parser
        is_done = parser.our_state is h11.DONE and parser.their_state is h11.DONE
        if not is_done or parser.trailing_data[0]:  # bytes that no request asked for
            return False
        parser.start_next_cycle()
        self._idle_until = monotonic() + _KEEP_ALIVE_SECONDS
        return True


class _Body(httpx.SyncByteStream):
    def __init__(self, connection: _Connection, give_back: Callable[[_Connection], None]) -> None:
        self._connection = connection
        self._give_back: Callable[[_Connection], None] | None = give_back

    def __iter__(self) -> Iterator[bytes]:
        while isinstance(event := self._connection.next_event(), h11.Data):
            yield event.data  # a bytearray; a copy would cost as much as the read

    def close(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self._connection)


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

    def connected(self) -> tuple[LeanClient, DeadlineTransport]:
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


def _origin_of(url: httpx.URL) -> _Origin:
    if url.scheme not in _PORTS:
        raise httpx.UnsupportedProtocol(f"not http or https: {url.scheme!r}")
    return url.scheme, url.raw_host.decode("ascii"), url.port or _PORTS[url.scheme]
