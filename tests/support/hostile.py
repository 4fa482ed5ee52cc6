"""A hostile server: a proxy in front of a real one that changes requests and answers."""

import http.server
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import httpx

_HOP = {"connection", "transfer-encoding", "content-length", "date"}


class Request(NamedTuple):
    """A client's request. Names of headers are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """An answer to the client. Content-Length is the body's length unless the headers have one."""

    status: int
    headers: dict[str, str]
    body: bytes


class Middlebox:
    """A proxy; a context manager.

    Attributes:
        requests: all received requests.
        change: makes an answer of a request and the real server's answer to it.

    Args:
        upstream: the real server's URL.
        change: see the attribute. Default: change nothing.
        context: to speak TLS.
        token: sent to the real server instead of the client's token.
    """

    def __init__(
        self,
        upstream: str,
        change: Callable[[Request, Answer], Answer] | None = None,
        *,
        context: ssl.SSLContext | None = None,
        token: str | None = None,
    ) -> None:
        self.requests: list[Request] = []
        self.change = change or (lambda request, answer: answer)
        self._shown = {} if token is None else {"authorization": f"Bearer {token}"}
        self._upstream = httpx.Client(base_url=upstream, timeout=30, trust_env=False, verify=False)
        box = self

        class Handler(http.server.BaseHTTPRequestHandler):
            disable_nagle_algorithm = True  # the body follows the headers at once
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, self.rfile.read(size))
                box.requests.append(request)
                answer = box.change(request, box.ask(request))
                self.send_response_only(answer.status)
                sent = {"content-length": str(len(answer.body))} | answer.headers
                for name, value in sent.items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(BrokenPipeError, ConnectionResetError):  # the client closed early
                    self.wfile.write(answer.body)
                self.close_connection = sent["content-length"] != str(len(answer.body))

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - as the library has it

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"http{'s' if context else ''}://127.0.0.1:{self._server.server_port}"

    def ask(self, request: Request, *, path: str | None = None) -> Answer:
        """Return the real server's answer for the same path or another one."""
        sent = {name: value for name, value in request.headers.items() if name not in _HOP}
        sent.pop("graphstash-accept-redirect", None)
        answer = self._upstream.request(
            request.method, path or request.path, headers=sent | self._shown, content=request.body
        )
        sent = {name: value for name, value in answer.headers.items() if name not in _HOP}
        return Answer(answer.status_code, sent, answer.content)

    def to(self, part: str, *, method: str | None = None) -> list[Request]:
        """Return the requests whose path contains a part."""
        return [
            request
            for request in self.requests
            if part in request.path and method in {None, request.method}
        ]

    def __enter__(self) -> Self:
        thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._upstream.close()
