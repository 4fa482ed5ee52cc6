"""A server that records each request and sends the answer that the test has set."""

import socket
import ssl
import threading
from contextlib import suppress
from typing import Self

_ANSWER = (
    "HTTP/1.1 {status} Told\r\nGraphstash-Protocol: 1\r\nContent-Length: {length}\r\n"
    "Connection: close\r\n{headers}\r\n{body}"
)


class Listener:
    """A listener on a free loopback port, for one request per connection; a context manager.

    Attributes:
        heads: head of every request, as received.
        status: status of the next answers.
        body: body of the next answers.
        headers: further header lines of the next answers, with line ends.
    """

    def __init__(self, *, context: ssl.SSLContext | None = None) -> None:
        self.heads: list[str] = []
        self.status = 404
        self.body = ""
        self.headers = ""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._context = context
        self.port = self._listener.getsockname()[1]
        self.url = f"http{'s' if context else ''}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._accept)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(10)
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        if self._context is not None:
            connection = self._context.wrap_socket(connection, server_side=True)
        with connection, connection.makefile("rb") as stream:
            head = b""
            while not head.endswith(b"\r\n\r\n") and (line := stream.readline()):
                head += line
            for line in head.splitlines():
                if line.lower().startswith(b"content-length:"):
                    stream.read(int(line.split(b":")[1]))
            self.heads.append(head.decode())
            answer = _ANSWER.format(
                status=self.status, length=len(self.body), headers=self.headers, body=self.body
            )
            connection.sendall(answer.encode())
