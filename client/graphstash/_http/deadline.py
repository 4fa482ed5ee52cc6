"""HTTP connections that keep a deadline, even if a server sends one byte at a time.

httpx bounds the wait for each piece of data, not their sum: a server that sends one byte of a
header every second would hold a job for ever. Here every wait is also bounded by the time that is
left of the whole call. Uses httpcore's documented network-backend interface.

A server may close a connection just as the next request goes out on it; a worker that ends does.
Such a request is sent again, once, on a connection of its own, before anybody counts a failure.
"""

import encodings.idna  # noqa: F401 - connections need it, and would import it as others fork
import ipaddress
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, Final, cast

import httpcore
from httpcore._backends.sync import SyncStream  # its backend leaks a socket that is refused

# httpx brings its own command line along where click and rich are installed, as they are here: a
# third of a second for every training process, for nothing. An absent module is left out.
_absent = sys.modules.setdefault("httpx._main", cast("Any", None)) is None
import httpx  # noqa: E402 - see above

if _absent:
    sys.modules.pop("httpx._main", None)

from graphstash._forking import unforked  # noqa: E402 - see above
from graphstash.config import UNIX  # noqa: E402 - see above
from graphstash.errors import Reason, TransportError  # noqa: E402 - see above
from graphstash_schema.own_files import open_own_directory  # noqa: E402 - see above

__all__ = ["Deadline", "DeadlineTransport", "ProcessClient"]

_WRITE_BYTES: Final = 64 * 1024

_READ_BYTES: Final = 128 * 1024
"""What one read takes at most. httpcore asks for 64 KiB, and each piece of a body passes through
four layers of Python; larger ones than this leave the processor's cache on the way."""


class Deadline:
    """A moment after which a call is given up; it can be shortened, but not extended. What the
    caller itself pauses in between does not count.
    """

    def __init__(self, seconds: float) -> None:
        self._started = monotonic()
        self._seconds = seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time of the block does not count."""
        began = monotonic()
        try:
            yield
        finally:
            self._started += monotonic() - began

    def shorten(self, seconds: float) -> None:
        """Shortens the deadline to some seconds after the beginning of the call."""
        self._seconds = min(self._seconds, seconds)

    @property
    def left_seconds(self) -> float:
        """Seconds that are left; 0 or less after the deadline."""
        return self._started + self._seconds - monotonic()

    @property
    def seconds(self) -> float:
        """The whole allowance."""
        return self._seconds


class DeadlineTransport(httpx.HTTPTransport):
    """httpx's transport over sockets that keep the deadline of the calling thread.

    Args:
        limits: of its connections.
        context: how TLS is spoken; None where it is not.
        socket_path: of a Unix socket, which only this user may be able to make; None for TCP.
    """

    def __init__(
        self,
        limits: httpx.Limits,
        *,
        context: ssl.SSLContext | None,
        socket_path: str | None = None,
    ) -> None:
        # The pools are replaced below. Should a later httpx keep its own, it checks TLS as well.
        verify = context or False
        super().__init__(limits=limits, verify=verify, trust_env=False)
        self._current = _Current()
        self._pool = httpcore.ConnectionPool(
            ssl_context=context,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            uds=socket_path,
            network_backend=_Backend(self._current),
        )
        self._unkept = httpx.HTTPTransport(verify=verify, trust_env=False)
        self._unkept._pool = httpcore.ConnectionPool(  # noqa: SLF001 - as above
            ssl_context=context,
            max_connections=limits.max_connections,
            max_keepalive_connections=0,
            uds=socket_path,
            network_backend=_Backend(self._current),
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request and reads the head of its answer."""
        if not isinstance(request.stream, httpx.ByteStream):
            # A body that is streamed cannot be sent twice: it never meets an old connection.
            return self._unkept.handle_request(request)
        self._current.is_fresh = self._current.is_answered = False
        try:
            return super().handle_request(request)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            if self._current.is_fresh or self._current.is_answered:
                raise
        return self._unkept.handle_request(request)

    def close(self) -> None:
        """Closes every connection."""
        self._unkept.close()
        super().close()

    @contextmanager
    def within(self, deadline: Deadline) -> Iterator[None]:
        """Bounds everything that this thread sends and receives in the block."""
        before, self._current.deadline = self._current.deadline, deadline
        try:
            yield
        finally:
            self._current.deadline = before  # of a call that a signal handler's interrupts


class ProcessClient:
    """An httpx client over `DeadlineTransport`; safe for many threads, and for a forked child.

    Args:
        base_url: of all its requests; `unix:<path>` for a socket.
        context: makes what TLS needs, when the first connection does; None for plain HTTP.
        headers: of all its requests.
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
        self._connection: tuple[int, httpx.Client, DeadlineTransport] | None = None
        self._closed = False

    def connected(self) -> tuple[httpx.Client, DeadlineTransport]:
        """The client of this process, and its transport.

        Raises:
            TransportError: it was closed.
        """
        with unforked(), self._lock:
            if self._closed:
                raise TransportError(Reason.CONNECT, f"{self._url}: the client is closed")
            # A forked child must not use its parent's sockets.
            if self._connection is None or self._connection[0] != os.getpid():
                limits = httpx.Limits(max_connections=16, keepalive_expiry=30.0)
                path = self._url.removeprefix(UNIX) if self._url.startswith(UNIX) else None
                transport = DeadlineTransport(limits, context=self._context(), socket_path=path)
                client = httpx.Client(
                    transport=transport,
                    base_url=self._url if path is None else "http://localhost",
                    headers=self._headers,
                    follow_redirects=False,
                    trust_env=False,  # a proxy for the internet is not the way to the team's cache
                )
                self._connection = (os.getpid(), client, transport)
            return self._connection[1:]

    def close(self) -> None:
        """Closes the connections of this process; further requests fail."""
        with self._lock:
            if self._connection is not None and self._connection[0] == os.getpid():
                self._connection[1].close()
            self._connection = None
            self._closed = True


class _Current(threading.local):
    """The call that this thread makes."""

    deadline: Deadline | None = None
    is_fresh = False
    """A connection was opened for it."""
    is_answered = False
    """A byte of the answer came."""


class _Backend(httpcore.NetworkBackend):
    def __init__(self, current: _Current) -> None:
        self._current = current
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        self._current.is_fresh = True
        *others, last = _addresses(host, _bounded(self._current, timeout))

        def connect(address: str) -> httpcore.NetworkStream:
            bounded = _bounded(self._current, timeout)
            stream = self._inner.connect_tcp(address, port, bounded, local_address, socket_options)
            return _Stream(stream, self._current)

        for address in others:
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return connect(address)
        return connect(last)

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002 - httpcore passes none
    ) -> httpcore.NetworkStream:
        self._current.is_fresh = True
        bounded = _bounded(self._current, timeout)
        with ExitStack() as undo:
            try:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                undo.callback(connection.close)
                connection.settimeout(bounded)
                directory = open_own_directory(Path(path).parent)
                try:
                    # By the directory that was checked: nobody can put another one in its place.
                    connection.connect(f"/proc/self/fd/{directory}/{Path(path).name}")
                finally:
                    os.close(directory)
            except OSError as error:
                kind = (
                    httpcore.ConnectTimeout
                    if isinstance(error, TimeoutError)
                    else httpcore.ConnectError
                )
                raise kind(error.strerror or str(error)) from error
            undo.pop_all()
        return _Stream(SyncStream(connection), self._current)


class _Stream(httpcore.NetworkStream):
    def __init__(self, inner: httpcore.NetworkStream, current: _Current) -> None:
        self._inner = inner
        self._current = current

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._inner.read(max(max_bytes, _READ_BYTES), _bounded(self._current, timeout))
        self._current.is_answered |= data != b""
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        # The time-out below counts anew for every piece that the kernel takes.
        view = memoryview(buffer)
        for start in range(0, len(view), _WRITE_BYTES):
            piece = bytes(view[start : start + _WRITE_BYTES])
            self._inner.write(piece, _bounded(self._current, timeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        stream = self._inner.start_tls(
            ssl_context, server_hostname, _bounded(self._current, timeout)
        )
        return _Stream(stream, self._current)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def _addresses(host: str, timeout: float | None) -> list[str]:
    """The first address of each family that a name has: a server may listen on one of them only.

    It is resolved within the time; the resolver itself knows only its own time-outs.
    """
    found: dict[int, str] = {}

    def resolve() -> None:
        with suppress(OSError):
            for family, *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
                found.setdefault(family, str(place[0]))

    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        resolver = threading.Thread(target=resolve, name="graphstash-resolve", daemon=True)
    with suppress(RuntimeError):  # no thread can be started
        resolver.start()
        resolver.join(timeout)
    if not found:
        raise httpcore.ConnectError(f"{host}: no address")
    return [*found.values()]


def _bounded(current: _Current, timeout: float | None) -> float | None:
    deadline = current.deadline
    if deadline is None:
        return timeout
    left = deadline.left_seconds
    if left <= 0:
        raise httpcore.ReadTimeout(f"not finished within {deadline.seconds:g} s")
    return left if timeout is None else min(left, timeout)
