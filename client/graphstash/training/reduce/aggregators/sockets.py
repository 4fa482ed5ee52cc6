"""Non-blocking UDP sockets with large buffers, and the clock by which a peer counts as silent."""

import errno
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

from graphstash.errors import ConfigError

__all__ = [
    "Address",
    "AwakeClock",
    "Name",
    "address_of",
    "bound",
    "connected",
    "is_refused",
    "parsed",
    "receive_buffer_of",
    "received",
    "send",
]

Address: TypeAlias = tuple[str, int]

Name: TypeAlias = tuple[Any, ...]
"""An address as Python's sockets return it: two items for IPv4, four for IPv6."""

_BUFFER_BYTES: Final = 4 * 1024**2
"""Bytes to request for each send and receive buffer. Linux grants at most `net.core.rmem_max` and
`wmem_max`, which are 208 KiB unless an administrator has raised them.
"""

_MAX_DATAGRAM: Final = 65_535

_MAX_AT_ONCE: Final = 64
"""Maximum number of datagrams that `received` yields, so that its caller can do other work."""

_SEND_MILLISECONDS: Final = 100
"""Milliseconds to wait for room in a full send buffer. After that, the datagram counts as lost. The
caller resends it later.
"""


_MAX_ADVANCE_SECONDS: Final = 2.0
"""Maximum advance of a clock per call. A running process waits at most half of it."""


class AwakeClock:
    """Monotonic clock that advances at most two seconds per call, to exclude suspension.

    When a suspended process resumes, it has not yet read the heartbeats that arrived meanwhile. By
    an ordinary clock, their senders would count as dead.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._missed = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        now = self._clock()
        self._missed += max(0.0, now - self._last - _MAX_ADVANCE_SECONDS)
        self._last = now
        return now - self._missed


def parsed(text: str) -> Address:
    """Return the host and port of `HOST:PORT` or `[IPV6]:PORT`.

    Raises:
        ConfigError: the text is not such an address.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ConfigError(f"{text!r} is not an address: write HOST:PORT, or [HOST]:PORT with IPv6")
    return host, int(port)


def bound(address: Address) -> socket.socket:
    """Return a socket bound to an address of this host. Port 0 selects a free port.

    Raises:
        ConfigError: this host does not have the address, or the port is taken.
    """
    return _opened(address, socket.socket.bind, "cannot be listened on")


def connected(address: Address) -> socket.socket:
    """Return a socket that exchanges datagrams only with this address.

    Raises:
        ConfigError: the address cannot be resolved, or no route leads to it.
    """
    return _opened(address, socket.socket.connect, "cannot be reached")


def address_of(name: Name) -> Address:
    """Return the host and port of a socket's address."""
    return str(name[0]), int(name[1])


def receive_buffer_of(at: socket.socket) -> int:
    """Return the bytes of datagrams for which a receive buffer has room. Linux reports twice as
    much, to leave room for its overhead for each datagram.
    """
    return at.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2


def received(at: socket.socket) -> Iterator[tuple[bytes, Name]]:
    """Yield waiting datagrams and their sources, up to `_MAX_AT_ONCE`."""
    for _ in range(_MAX_AT_ONCE):
        try:
            yield at.recvfrom(_MAX_DATAGRAM)
        except BlockingIOError:
            return
        except OSError:  # the error of an earlier send, such as ECONNREFUSED
            continue


def is_refused(at: socket.socket) -> bool:
    """Return whether the other host has reported by ICMP that no process listens. Call it first:
    `received` and `send` clear the report.
    """
    return at.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED


def send(at: socket.socket, datagram: bytearray, to: Name | None = None) -> bool:
    """Send a datagram. Return False if the socket does not accept it; it then counts as lost."""
    for _ in range(2):
        try:
            if to is None:
                at.send(datagram)
            else:
                at.sendto(datagram, to)
        except BlockingIOError:
            poll = select.poll()
            poll.register(at, select.POLLOUT)
            poll.poll(_SEND_MILLISECONDS)
        except OSError:  # the network is down, or an earlier send failed
            continue
        else:
            return True
    return False


def _opened(
    address: Address, begin: Callable[[socket.socket, Any], None], problem: str
) -> socket.socket:
    try:
        (family, kind, protocol, _, name), *_ = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)
        at = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label of over 63 letters
        raise ConfigError(f"{address[0]}:{address[1]} {problem}: {error}") from error
    try:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            at.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        at.setblocking(False)
        begin(at, name)
    except OSError as error:
        at.close()
        raise ConfigError(f"{address[0]}:{address[1]} {problem}: {error}") from error
    return at
