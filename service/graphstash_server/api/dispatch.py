"""Dispatch: hands each request to the handler of its call, in plain ASGI.

FastAPI's router and request handler serve dependencies, forms, models and middleware of their own,
which no call uses. They took a third of the event loop's time for a small upload. FastAPI still
describes the calls (OpenAPI), serves the pages, and refuses unknown paths and methods.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from re import Pattern
from typing import NamedTuple

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from graphstash_schema import InvalidValueError
from graphstash_server.api.problems import refused
from graphstash_server.errors import ServerError

__all__ = ["Dispatch"]


class _Call(NamedTuple):
    path: Pattern[str]
    handle: Callable[[Request], Awaitable[Response]]
    route: APIRoute


class Dispatch:
    """ASGI middleware. Passes other scopes, and requests that match no call, to the application."""

    def __init__(self, app: ASGIApp, *, routes: Iterable[BaseRoute]) -> None:
        """Prepare to handle the calls among `routes`. The first matching call handles a request."""
        self._app = app
        self._calls: defaultdict[str, list[_Call]] = defaultdict(list)
        for route in routes:
            if isinstance(route, APIRoute):
                for method in route.methods or ():
                    self._calls[method].append(_Call(route.path_regex, route.endpoint, route))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            path = scope["path"]
            for call in self._calls.get(scope["method"], ()):
                if (match := call.path.match(path)) is not None:
                    scope["route"], scope["path_params"] = call.route, match.groupdict()
                    request = Request(scope, receive, send)
                    try:
                        response = await call.handle(request)
                    except (ServerError, InvalidValueError) as error:
                        response = refused(request, error)
                    await response(scope, receive, send)
                    return
        await self._app(scope, receive, send)
