"""take_port: keep a TCP port for a server that starts, and refuse connections meanwhile.

A port that listens before the server can answer is worse than a closed one: the kernel accepts
connections, so a proxy does not try another server, and clients wait for their timeouts.
"""

import socket
from typing import Any

__all__ = ["allow_listening", "take_port"]


def take_port(listener: socket.socket, address: Any) -> None:
    """Bind a socket that does not listen yet. No other socket can bind its port meanwhile.

    Linux gives a port to several sockets that have SO_REUSEADDR and do not listen, so a second
    server on the port would fail only when it listens, after its migration. The option is therefore
    set only to bind past connections of an earlier server, and `allow_listening` restores it.

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
    """Let a bound socket listen although connections of an earlier server still end."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
