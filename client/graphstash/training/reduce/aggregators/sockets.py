"""UDP sockets: large buffers, addresses of both families, and no waiting."""

import errno
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

from graphstash.errors import ConfigError

__all__ = [
    "Address",
    "Name",
    "address_of",
    "bound",
    "connected",
    "is_refused",
    "parsed",
    "received",
    "room_of",
    "send",
]

Address: TypeAlias = tuple[str, int]

Name: TypeAlias = tuple[Any, ...]
"""An address as sockets have it; with IPv6 it has four parts."""

_BUFFER_BYTES: Final = 4 * 1024**2
"""Of each direction. Linux gives `net.core.rmem_max` at most, 208 KiB unless somebody raised it."""

_MAX_DATAGRAM: Final = 65_535

_MOST_AT_ONCE: Final = 64
"""Datagrams that are read before anything else is looked at."""

_PATIENCE_MILLISECONDS: Final = 100
"""With a full buffer; then the datagram is lost, and sent again later."""


def parsed(text: str) -> Address:
    """The host and port of `HOST:PORT` or `[IPV6]:PORT`.

    Raises:
        ConfigError: it is none.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ConfigError(f"{text!r} is no address: write HOST:PORT, or [HOST]:PORT with IPv6")
    return host, int(port)


def bound(address: Address) -> socket.socket:
    """A socket at an address of this host; port 0 is a free one.

    Raises:
        ConfigError: there is no such address here, or it is taken.
    """
    return _opened(address, socket.socket.bind, "cannot be listened on")


def connected(address: Address) -> socket.socket:
    """A socket that exchanges datagrams with this address alone.

    Raises:
        ConfigError: no network leads there.
    """
    return _opened(address, socket.socket.connect, "cannot be reached")


def address_of(name: Name) -> Address:
    """The host and port of what a socket says."""
    return str(name[0]), int(name[1])


def room_of(at: socket.socket) -> int:
    """How many bytes of datagrams may wait. Linux counts what it adds to each as well, and reports
    twice what was asked for.
    """
    return at.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2


def received(at: socket.socket) -> Iterator[tuple[bytes, Name]]:
    """The datagrams that are there, a number of them at most, and where they come from."""
    for _ in range(_MOST_AT_ONCE):
        try:
            yield at.recvfrom(_MAX_DATAGRAM)
        except BlockingIOError:
            return
        except OSError:  # what the network says of an earlier one, such as ECONNREFUSED
            continue


def is_refused(at: socket.socket) -> bool:
    """Whether the other host has said that nobody listens there (ICMP), since this was asked."""
    return at.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED


def send(at: socket.socket, datagram: bytearray, to: Name | None = None) -> bool:
    """Whether a datagram is on its way; if not, it is lost as others are."""
    for _ in range(2):
        try:
            if to is None:
                at.send(datagram)
            else:
                at.sendto(datagram, to)
        except BlockingIOError:
            poll = select.poll()
            poll.register(at, select.POLLOUT)
            poll.poll(_PATIENCE_MILLISECONDS)
        except OSError:  # a network that is down for a while, or an error as above
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
    except (OSError, UnicodeError) as error:  # a host of more than 63 letters without a dot
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
