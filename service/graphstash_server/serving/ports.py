"""take_port: reserve a TCP port for a starting server without accepting connections.

If the port listened, the kernel would accept connections: proxies would not try another server, and
clients would wait for their timeouts.
"""

import socket
from typing import Any

__all__ = ["allow_listening", "take_port"]


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
