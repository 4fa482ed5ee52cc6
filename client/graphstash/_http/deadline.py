"""HTTP connections that keep a deadline for the whole call.

httpx bounds each wait for data, but not their sum. A server that sends one header byte per second
could block a job forever. This transport also bounds every wait by the time left until the
deadline. It implements httpcore's documented network-backend interface.

A server may close a kept-alive connection just as the next request is sent, for example when a
worker exits. The transport then retries once on a new connection, and callers count no failure.
"""

import encodings.idna  # noqa: F401 - connecting imports it, which could race with a fork
import ipaddress
import os
import select
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final, cast

import httpcore
from httpcore._backends.sync import SyncStream  # SyncBackend leaks a refused Unix socket

# If click and rich are installed, as they are here, httpx imports its own command line. That would
# cost every training process a third of a second. httpx skips a module that is absent.
_absent = sys.modules.setdefault("httpx._main", cast("Any", None)) is None
import httpx  # noqa: E402 - see above

if _absent:
    sys.modules.pop("httpx._main", None)

from graphstash._forking import forkable, unforked  # noqa: E402 - see above
from graphstash._http.lean_client import LeanClient  # noqa: E402 - see above
from graphstash.config import UNIX  # noqa: E402 - see above
from graphstash.errors import Reason, TransportError  # noqa: E402 - see above
from graphstash_schema.own_files import open_own_directory  # noqa: E402 - see above

__all__ = ["NO_ADDRESS", "REPEATABLE", "REPEATED", "Deadline", "DeadlineTransport", "ProcessClient"]

NO_ADDRESS: Final = "no address"
"""End of the text of the error for a name that cannot be resolved."""

REPEATABLE: Final = "graphstash.repeatable"
"""Extension of a request whose streamed body can be iterated again, and whose repetition changes
nothing. Other requests with a streamed body never use a kept-alive connection."""

REPEATED: Final = "graphstash.repeated"
"""Extension of the response to a repeated request: the server may have carried out the first one.
"""

_WRITE_BYTES: Final = 64 * 1024

_KEEP_ALIVE_SECONDS: Final = 110.0
"""Seconds after which an idle connection is closed. The server closes it after 120."""

_READ_BYTES: Final = 128 * 1024
"""Maximum bytes of one read. httpcore reads 64 KiB at a time, and each piece of a body passes
through four layers of Python. Larger pieces do not fit into the processor's cache."""


class Deadline:
    """Time limit of one call. It can be shortened and paused, but not extended."""

    def __init__(self, seconds: float) -> None:
        self._started = monotonic()
        self._seconds = seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = monotonic()
        try:
            yield
        finally:
            self._started += monotonic() - began

    def shorten(self, seconds: float) -> None:
        """Shorten the limit to `seconds` after the start of the call."""
        self._seconds = min(self._seconds, seconds)

    @property
    def left_seconds(self) -> float:
        """Seconds left; 0 or less after the deadline."""
        return self._started + self._seconds - monotonic()

    @property
    def seconds(self) -> float:
        """Total seconds allowed for the call."""
        return self._seconds


class DeadlineTransport(httpx.HTTPTransport):
    """Extends httpx's transport with sockets that keep the calling thread's deadline.

    Args:
        limits: connection limits.
        context: TLS context, or None for connections without TLS.
        socket_path: path of a Unix socket, in a directory that only this user can write to. None
            for TCP.

    Raises:
        httpx.TransportError: this version of httpx is not supported.
    """

    def __init__(
        self,
        limits: httpx.Limits,
        *,
        context: ssl.SSLContext | None,
        socket_path: str | None = None,
    ) -> None:
        # httpx's pool is replaced below. Pass `verify` in case a later httpx ignores `_pool`.
        verify = context or False
        super().__init__(limits=limits, verify=verify, trust_env=False)
        self._current = _Current()
        self._unkept = httpx.HTTPTransport(verify=verify, trust_env=False)
        pool = partial(
            httpcore.ConnectionPool,
            ssl_context=context,
            max_connections=limits.max_connections,
            uds=socket_path,
            network_backend=_Backend(self._current),
        )
        _replace_pool(
            self,
            pool(
                max_keepalive_connections=limits.max_keepalive_connections,
                keepalive_expiry=limits.keepalive_expiry,
            ),
        )
        _replace_pool(self._unkept, pool(max_keepalive_connections=0))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read the response's status and headers."""
        is_repeatable = isinstance(request.stream, httpx.ByteStream)
        if not is_repeatable and REPEATABLE not in request.extensions:
            return self._unkept.handle_request(request)
        self._current.is_fresh = self._current.is_answered = False
        try:
            return super().handle_request(request)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
            if self._current.is_fresh or self._current.is_answered:
                raise
            first = error
        try:
            response = self._unkept.handle_request(request)
        except httpx.TransportError as error:
            if is_repeatable:
                raise
            # "Not connected" would mean that the server stores nothing of the upload.
            raise first from error
        response.extensions[REPEATED] = True
        return response

    def close(self) -> None:
        self._unkept.close()
        super().close()

    @contextmanager
    def within(self, deadline: Deadline) -> Iterator[None]:
        """Bound this thread's sends and receives in the block by a deadline."""
        before, self._current.deadline = self._current.deadline, deadline
        try:
            yield
        finally:
            self._current.deadline = before  # a signal handler's call may interrupt another


def _replace_pool(transport: httpx.HTTPTransport, pool: httpcore.ConnectionPool) -> None:
    """Make httpx use this pool. Otherwise it would ignore deadlines and the path of a socket."""
    if not isinstance(vars(transport).get("_pool"), httpcore.ConnectionPool):
        raise httpx.TransportError(
            f"httpx {httpx.__version__} is not supported, because its connection pool cannot be "
            "replaced; install httpx 0.28"
        )
    transport._pool = pool  # noqa: SLF001 - httpx has no public name for it


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
                limits = httpx.Limits(max_connections=16, keepalive_expiry=_KEEP_ALIVE_SECONDS)
                path = self._url.removeprefix(UNIX) if self._url.startswith(UNIX) else None
                transport = DeadlineTransport(limits, context=self._context(), socket_path=path)
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


class _Current(threading.local):
    deadline: Deadline | None = None
    is_fresh = False
    """Whether the call opened a new connection."""
    is_answered = False
    """Whether a byte of the response has arrived."""


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
            with forkable():
                stream = self._inner.connect_tcp(
                    address, port, bounded, local_address, socket_options
                )
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
                    # Use the descriptor: another process could swap the directory after the check.
                    with forkable():
                        connection.connect(f"/proc/self/fd/{directory}/{Path(path).name}")
                finally:
                    os.close(directory)
            except OSError as error:
                # If the listener's backlog is full, the kernel refuses the connection at once.
                kind = (
                    httpcore.ConnectTimeout
                    if isinstance(error, TimeoutError | BlockingIOError)
                    else httpcore.ConnectError
                )
                raise kind(error.strerror or str(error)) from error
            undo.pop_all()
        return _Stream(SyncStream(connection), self._current)


class _Stream(httpcore.NetworkStream):
    def __init__(self, inner: httpcore.NetworkStream, current: _Current) -> None:
        self._inner = inner
        self._current = current
        self._tls = inner.get_extra_info("ssl_object")

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with self._waiting(select.POLLIN, timeout):
            data = self._inner.read(max(max_bytes, _READ_BYTES), _bounded(self._current, timeout))
        self._current.is_answered |= data != b""
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        # The timeout restarts whenever the kernel accepts a part. Small pieces keep it accurate.
        view = memoryview(buffer)
        for start in range(0, len(view), _WRITE_BYTES):
            piece = bytes(view[start : start + _WRITE_BYTES])
            with self._waiting(select.POLLOUT, timeout):
                self._inner.write(piece, _bounded(self._current, timeout))

    def _waiting(self, event: int, timeout: float | None) -> AbstractContextManager[None]:
        """Allow forks while waiting for the socket, but not inside OpenSSL."""
        if self._tls is None:
            return forkable()
        if not self._tls.pending():
            ready = select.poll()
            ready.register(self._inner.get_extra_info("socket"), event)
            bounded = _bounded(self._current, timeout)
            with forkable():
                ready.poll(None if bounded is None else 1000 * bounded)
        return nullcontext()

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
    """Resolve a name to its first address in each family; a server may listen on only one family.

    A thread resolves it, because the system's resolver takes no timeout.
    """
    found: dict[int, str] = {}

    def resolve() -> None:
        with suppress(OSError, UnicodeError):  # a label of the name is empty or too long
            for family, *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
                found.setdefault(family, str(address[0]))

    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        resolver = threading.Thread(target=resolve, name="graphstash-resolve", daemon=True)
    with suppress(RuntimeError):  # the system cannot start a thread
        resolver.start()
        with forkable():
            resolver.join(timeout)
    if not found:
        raise httpcore.ConnectError(f"{host}: {NO_ADDRESS}")
    return [*found.values()]


def _bounded(current: _Current, timeout: float | None) -> float | None:
    deadline = current.deadline
    if deadline is None:
        return timeout
    left = deadline.left_seconds
    if left <= 0:
        raise httpcore.ReadTimeout(f"not finished within {deadline.seconds:g} s")
    return left if timeout is None else min(left, timeout)
