"""HTTP servers in a thread of the test. Each one computes its answers in Python."""

import http.server
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Self


class Request(NamedTuple):
    """A client's request. `headers` has names in lower case, and `head` everything as sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    head: str


@dataclass
class Answer:
    """An answer to the client. Content-Length is the body's length unless the headers have one."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class HttpServer:
    """A server on loopback, with a thread for each connection; a context manager.

    Attributes:
        url: URL of the server, without a path.

    Args:
        port: port to listen on. Default: any free port.
        context: to speak TLS.
    """

    def __init__(self, *, port: int = 0, context: ssl.SSLContext | None = None) -> None:
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            disable_nagle_algorithm = True  # the body follows the headers at once
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                headers = {name.lower(): value for name, value in self.headers.items()}
                lines = [f"{name}: {value}" for name, value in self.headers.items()]
                head = "\r\n".join([self.requestline, *lines, "", ""])
                request = Request(self.command, self.path, headers, self.rfile.read(size), head)
                answer = server.answer_to(request)
                if answer is None:
                    self.close_connection = True
                    return
                self.send_response_only(answer.status)
                sent = {"content-length": str(len(answer.body))} | answer.headers
                for name, value in sent.items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(BrokenPipeError, ConnectionResetError):  # the client closed early
                    self.wfile.write(answer.body)
                self.close_connection = sent["content-length"] != str(len(answer.body))

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - as the library has it

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self.url = f"http{'s' if context else ''}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )

    def answer_to(self, request: Request) -> Answer | None:
        """Return the answer to a request, or None to close the connection without one."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
