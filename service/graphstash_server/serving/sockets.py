"""The sockets on which a server listens: a TCP port, and a Unix socket for its owner.

`take_port` reserves the port of a starting server without accepting connections. If the port
listened, the kernel would accept connections: proxies would not try another server, and clients
would wait for their timeouts.

When a listening socket is closed, the kernel resets the connections that it has established and the
server has not accepted. A proxy that has sent a body on one cannot repeat the request elsewhere. So
a server that stops lets the kernel ignore new connections, and accepts the established ones first.

Only the user who runs the server can reach the Unix socket, because its directory admits no other
user (`graphstash_schema.own_files`). If a user runs several servers, the first keeps the socket
until its last process ends.
"""

import ctypes
import fcntl
import logging
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any, Final

from graphstash_schema.own_files import make_own_directory

__all__ = [
    "OwnSocket",
    "allow_listening",
    "count_unaccepted",
    "ignore_new_connections",
    "take_port",
]

_LOGGER = logging.getLogger(__name__)

_SO_ATTACH_FILTER: Final = 26  # <asm-generic/socket.h>; Python's socket module lacks it

_WITHOUT_SYN: Final = (
    (0x30, 0, 0, 13),  # load the byte with the flags of the TCP header
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # SYN alone begins a handshake:
    (0x06, 0, 0, 0),  # drop the packet
    (0x06, 0, 0, 0xFFFF_FFFF),  # otherwise, pass it
)
"""A classic BPF program (Linux, Documentation/networking/filter.rst): code, jumps, operand."""

_UNACCEPTED: Final = slice(24, 28)
"""The field tcpi_unacked of struct tcp_info, which holds this count for a listening socket (Linux,
net/ipv4/tcp.c, tcp_get_info)."""


def take_port(listener: socket.socket, address: Any) -> None:
    """Bind a socket that does not listen yet, so that no other socket can bind its port.

    Linux lets several sockets with SO_REUSEADDR bind a port until one listens. A second server
    would fail only then, after its migration. So the option is set only while binding a port on
    which connections of an earlier server end.

    Raises:
        OSError: the address cannot be used, or its port is taken.
    """
    try:
        listener.bind(address)
    except OSError:
        allow_listening(listener)
        listener.bind(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def allow_listening(listener: socket.socket) -> None:
    """Let a socket bind and listen although connections of an earlier server still end."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def ignore_new_connections(listener: socket.socket) -> None:
    """Let the kernel ignore attempts to connect to a listening TCP socket.

    Connections that it has established can still be accepted. A client repeats its attempt after a
    second, and is refused if the socket no longer listens. A kernel without socket filters (gVisor)
    is left alone.
    """
    if listener.family == socket.AF_UNIX:
        return
    program = b"".join(struct.pack("@HBBI", *each) for each in _WITHOUT_SYN)
    buffer = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("@HP", len(_WITHOUT_SYN), ctypes.addressof(buffer))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)
    except OSError as error:
        _LOGGER.info("the kernel cannot ignore new connections: %s", error.strerror)


def count_unaccepted(listener: socket.socket) -> int:
    """Return how many connections of a listening TCP socket the kernel has established and no
    process has accepted. It is 0 for a Unix socket.
    """
    if listener.family == socket.AF_UNIX:
        return 0
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACCEPTED.stop)
    return int.from_bytes(info[_UNACCEPTED], sys.byteorder)


class OwnSocket:
    """A bound Unix socket, `listener`, on which the server has yet to listen. Raises OSError if
    another server has the socket, or another user owns the directory.
    """

    def __init__(self, path: Path) -> None:
        self._directory = make_own_directory(path.parent)
        # This path leads to the verified directory, and fits into the 107 bytes of an address.
        self._path = Path(f"/proc/self/fd/{self._directory}/{path.name}")
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path.unlink(missing_ok=True)  # left over by a killed server
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.listener.bind(str(self._path))
        except BlockingIOError:
            os.close(self._directory)
            raise BlockingIOError(f"another server of this user listens on {path}") from None
        except OSError:
            os.close(self._directory)
            raise

    def close(self) -> None:
        """Remove the socket. Call it in the process that created it, after the server has ended."""
        self.listener.close()
        self._path.unlink(missing_ok=True)
        os.close(self._directory)
