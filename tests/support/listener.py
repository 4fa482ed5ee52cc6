"""A server that records each request and sends the answer that the test has set."""

import ssl

from support.http_server import Answer, HttpServer, Request


class Listener(HttpServer):
    """A listener on a free loopback port, for one request per connection; a context manager.

    Attributes:
        heads: head of every request, as received.
        status: status of the next answers.
        body: body of the next answers.
        headers: further headers of the next answers.
    """

    def __init__(self, *, context: ssl.SSLContext | None = None) -> None:
        super().__init__(context=context)
        self.heads: list[str] = []
        self.status = 404
        self.body = ""
        self.headers: dict[str, str] = {}

    def answer_to(self, request: Request) -> Answer:
        self.heads.append(request.head)
        headers = {"Graphstash-Protocol": "1", "Connection": "close", **self.headers}
        return Answer(self.status, headers, self.body.encode())
