"""A hostile server: a proxy in front of a real one that changes requests and answers."""

import ssl
from collections.abc import Callable

import httpx

from support.http_server import Answer, HttpServer, Request

_HOP = {"connection", "transfer-encoding", "content-length", "date"}


class Middlebox(HttpServer):
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
        super().__init__(context=context)
        self.requests: list[Request] = []
        self.change = change or (lambda request, answer: answer)
        self._shown = {} if token is None else {"authorization": f"Bearer {token}"}
        self._upstream = httpx.Client(base_url=upstream, timeout=30, trust_env=False, verify=False)

    def answer_to(self, request: Request) -> Answer:
        self.requests.append(request)
        return self.change(request, self.ask(request))

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

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._upstream.close()
