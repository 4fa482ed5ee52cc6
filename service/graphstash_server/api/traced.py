"""TraceRequests: a span around `api.frame` for each request that reaches the application."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphstash_server.tracing import Tracing

__all__ = ["TraceRequests"]

_HEADER = b"traceparent"


class TraceRequests:
    """ASGI middleware for HTTP requests, whose log entries carry the IDs of their spans."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or pass another scope through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        values = [value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER]
        span = self._tracing.begin(scope["method"], values)
        scope.setdefault("state", {}).update(self._tracing.ids(span))
        status: int | None = None

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            with self._tracing.inside(span):
                await self._app(scope, receive, send_noted)
        finally:
            route = getattr(scope.get("route"), "path", None)
            self._tracing.finish(span, status=status, route=route, path=scope["path"])
