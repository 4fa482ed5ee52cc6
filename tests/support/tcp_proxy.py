"""A TCP proxy on loopback with a thread for each connection, for proxies that fail on demand."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self


class TcpProxy:
    """A proxy on a free loopback port; a context manager.

    Attributes:
        port: port of the proxy.
        url: URL of the proxy, without a path.
        connections: number of accepted connections.
    """

    def __init__(self, upstream_port: int) -> None:
        self.connections = 0
        self._upstream_port = upstream_port
        self.listen(0)

    def serve(self, connection: socket.socket) -> None:
        """Handle one connection, in a thread. An `OSError` ends the connection."""
        raise NotImplementedError

    def listen(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        """Refuse further connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            self.serve(connection)

    @contextmanager
    def upstream(self, connection: socket.socket, request: bytes) -> Iterator[socket.socket]:
        """Send the upstream a request, and the bytes that follow it on the connection."""
        with socket.create_connection(("127.0.0.1", self._upstream_port)) as upstream:
            upstream.sendall(request)
            threading.Thread(target=_pump, args=(connection, upstream), daemon=True).start()
            yield upstream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_head(source: socket.socket, data: bytes = b"") -> tuple[bytes, bytes]:
    """Return the head without its empty line, and the bytes after it."""
    while b"\r\n\r\n" not in data:
        chunk = source.recv(1 << 16)
        if not chunk:
            return b"", b""
        data += chunk
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def reset(connection: socket.socket) -> None:
    """Reset the connection when it is closed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(1 << 20):
            target.sendall(chunk)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)  # the sender of half a body has closed
