"""The sockets on which a server listens: a TCP port, and a Unix socket for its owner.

`take_port` reserves the port of a starting server without accepting connections. If the port
listened, the kernel would accept connections: proxies would not try another server, and clients
would wait for their timeouts.

Only the user who runs the server can reach the Unix socket, because its directory admits no other
user (`graphstash_schema.own_files`). If a user runs several servers, the first keeps the socket
until its last process ends.
"""

import fcntl
import os
import socket
from pathlib import Path
from typing import Any

from graphstash_schema.own_files import make_own_directory

__all__ = ["OwnSocket", "allow_listening", "take_port"]


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
