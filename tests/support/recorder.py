"""A reverse proxy in front of a real server that notes each request, and may answer some itself."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from support.waiting import until

__all__ = ["Recorded", "Recorder"]

_METHODS = ["GET", "HEAD", "PUT", "POST", "DELETE"]


@dataclass(frozen=True)
class Recorded:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Recorder:
    """A context manager; one thread serves.

    Attributes:
        url: what jobs take for the server.
        requests: what came, in order.
        answer: gives the status of a request that the server is not to see; None passes it on.
    """

    def __init__(self, upstream: str) -> None:
        self.requests: list[Recorded] = []
        self.answer: Callable[[Recorded], int | None] = lambda _: None
        self._upstream = upstream
        app = Starlette(routes=[Route("/{path:path}", self._pass, methods=_METHODS)])
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        until(lambda: self._server.started)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(20)

    async def _pass(self, request: Request) -> Response:
        got = Recorded(
            request.method, request.url.path, dict(request.headers), await request.body()
        )
        self.requests.append(got)
        if (status := self.answer(got)) is not None:
            return Response(status_code=status)
        target = f"{self._upstream}{request.url.path}"
        if request.url.query:
            target += f"?{request.url.query}"
        headers = {name: value for name, value in got.headers.items() if name != "host"}
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream(got.method, target, headers=headers, content=got.body) as answer,
        ):
            body = b"".join([chunk async for chunk in answer.aiter_raw()])
            passed = {
                name: value
                for name, value in answer.headers.items()
                if name not in ("connection", "transfer-encoding", "date", "server")
            }
            return Response(body, answer.status_code, passed)
