"""Stream: a connection whose waits are bounded by a timeout and by the deadline of a call."""

import encodings.idna  # noqa: F401 - connecting imports it, which could race with a fork
import ipaddress
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final, TypeVar

from graphstash._forking import forkable
from graphstash._http.deadline import Deadline
from graphstash._http.lean_httpx import httpx
from graphstash_schema.own_files import open_own_directory

__all__ = ["NO_ADDRESS", "Stream", "connect_tcp", "connect_unix"]

NO_ADDRESS: Final = "no address"
"""End of the text of the error for a name that cannot be resolved."""

_READ_BYTES: Final = 128 * 1024
"""Maximum bytes of one read. Larger pieces do not fit into the processor's cache."""

_WRITE_BYTES: Final = 64 * 1024

_T = TypeVar("_T")


class Stream:
    """A connected socket. One thread at a time uses it.

    Attributes:
        tls: the same socket if it uses TLS, or None.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._timeout = connection.gettimeout()
        self.tls = connection if isinstance(connection, ssl.SSLSocket) else None
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def read(self, most: int, *, seconds: float, deadline: Deadline) -> bytes:
        """Return at most `most` bytes as they arrive, or b"" at the end of the stream.

        Raises:
            httpx.TransportError: no byte arrives in time, or the connection fails.
        """
        most, seconds = min(most, _READ_BYTES), deadline.bound(seconds)
        try:
            if self.tls is not None:
                return _over_tls(self.tls, partial(self.tls.recv, most), seconds)
            with forkable():
                self._limit(seconds)
                return self._socket.recv(most)
        except TimeoutError as error:
            raise httpx.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ReadError(str(error)) from error

    def write(self, data: bytes, *, seconds: float, deadline: Deadline) -> None:
        """Send all bytes.

        Raises:
            httpx.TransportError: the kernel takes no byte in time, or the connection fails.
        """
        left = memoryview(data)
        try:
            while left:
                # The timeout restarts whenever the kernel accepts a part. Small pieces keep it
                # accurate.
                piece, bounded = left[:_WRITE_BYTES], deadline.bound(seconds)
                if self.tls is not None:
                    sent = _over_tls(self.tls, partial(self.tls.send, piece), bounded)
                else:
                    with forkable():
                        self._limit(bounded)
                        sent = self._socket.send(piece)
                left = left[sent:]
        except TimeoutError as error:
            raise httpx.WriteTimeout(str(error)) from error
        except OSError as error:
            raise httpx.WriteError(str(error)) from error

    @property
    def is_readable(self) -> bool:
        """Whether bytes or the end of the stream have arrived."""
        return bool(self._readable.poll(0))

    def close(self) -> None:
        self._socket.close()

    def _limit(self, seconds: float) -> None:
        if seconds != self._timeout:  # a system call each time
            self._socket.settimeout(seconds)
            self._timeout = seconds


def _over_tls(connection: ssl.SSLSocket, operation: Callable[[], _T], seconds: float) -> _T:
    """Return the result of an operation on a non-blocking socket. Allow forks while it waits for
    the network, but not inside OpenSSL.

    Raises:
        TimeoutError: the operation does not end within `seconds`.
        OSError: the operation failed.
    """
    end = monotonic() + seconds
    while True:
        try:
            return operation()
        except ssl.SSLWantReadError:
            event = select.POLLIN
        except ssl.SSLWantWriteError:
            event = select.POLLOUT
        network = select.poll()
        network.register(connection, event)
        left = end - monotonic()
        with forkable():
            is_ready = left > 0 and network.poll(1000 * left)
        if not is_ready:
            raise TimeoutError("timed out")


def connect_tcp(
    host: str, port: int, *, context: ssl.SSLContext | None, seconds: float, deadline: Deadline
) -> Stream:
    """Connect to a host, with TLS if there is a context. Each attempt may take `seconds`.

    Raises:
        httpx.TransportError: the connection fails, or the deadline has passed.
    """
    *others, last = _addresses(host, deadline.bound(seconds))
    for address in others:
        with suppress(httpx.ConnectError, httpx.ConnectTimeout):
            connection = _connect_to(address, port, deadline.bound(seconds))
            break
    else:
        connection = _connect_to(last, port, deadline.bound(seconds))
    if context is None:
        return Stream(connection)
    with ExitStack() as undo:
        undo.callback(connection.close)
        bounded = deadline.bound(seconds)
        try:
            tls = context.wrap_socket(
                connection, server_hostname=host, do_handshake_on_connect=False
            )
            undo.callback(tls.close)
            tls.settimeout(0)
            _over_tls(tls, tls.do_handshake, bounded)
        except OSError as error:
            raise _failure(error) from error
        undo.pop_all()
    return Stream(tls)


def connect_unix(path: Path, *, seconds: float, deadline: Deadline) -> Stream:
    """Connect to a Unix socket, in a directory that only this user can write to.

    Raises:
        httpx.TransportError: the connection fails, or the deadline has passed.
    """
    bounded = deadline.bound(seconds)
    with ExitStack() as undo:
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            undo.callback(connection.close)
            connection.settimeout(bounded)
            directory = open_own_directory(path.parent)
            try:
                # Use the descriptor: another process could swap the directory after the check.
                with forkable():
                    connection.connect(f"/proc/self/fd/{directory}/{path.name}")
            finally:
                os.close(directory)
        except OSError as error:
            # If the listener's backlog is full, the kernel refuses the connection at once.
            is_late = isinstance(error, TimeoutError | BlockingIOError)
            kind = httpx.ConnectTimeout if is_late else httpx.ConnectError
            raise kind(error.strerror or str(error)) from error
        undo.pop_all()
    return Stream(connection)


def _connect_to(address: str, port: int, seconds: float) -> socket.socket:
    try:
        with forkable():
            connection = socket.create_connection((address, port), seconds)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            connection.close()
            raise
    except OSError as error:
        raise _failure(error) from error
    return connection


def _failure(error: OSError) -> httpx.TransportError:
    kind = httpx.ConnectTimeout if isinstance(error, TimeoutError) else httpx.ConnectError
    return kind(str(error))


def _addresses(host: str, seconds: float) -> list[str]:
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
            resolver.join(seconds)
    if not found:
        raise httpx.ConnectError(f"{host}: {NO_ADDRESS}")
    return [*found.values()]
