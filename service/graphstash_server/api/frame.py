"""RequestFrame: the outermost frame of every request, in plain ASGI.

It gives the request an id, refuses what no call could understand, puts the protocol headers on
every answer and turns an unforeseen failure into a sanitised one.
"""

import asyncio
import itertools
import logging
import re
import secrets
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphstash_schema import ErrorCode
from graphstash_schema.protocol import (
    API_PREFIX,
    HEADER_PROTOCOL,
    HEADER_REQUEST_ID,
    PROTOCOL_VERSION,
)
from graphstash_server.api.problems import problem_response
from graphstash_server.errors import ServerError

__all__ = ["RequestFrame"]

_LOGGER = logging.getLogger(__name__)

_MAX_HEADER_BYTES = 64 * 1024
"""Of all request headers together: four times the largest metadata header."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_ID_NAME = HEADER_REQUEST_ID.lower().encode()
_PROTOCOL_NAME = HEADER_PROTOCOL.lower().encode()
_PROTOCOL = str(PROTOCOL_VERSION).encode()
_PREFIX = API_PREFIX + "/"


def _request_ids() -> Callable[[], bytes]:
    """Random for the process and counted within it: random bytes for each cost as much as a hit."""
    process = secrets.token_hex(8)
    numbers = itertools.count(1)

    def new_id() -> bytes:
        return f"{process}-{next(numbers):x}".encode()

    return new_id


class RequestFrame:
    """ASGI middleware; other scopes than HTTP pass through."""

    def __init__(self, app: ASGIApp, *, new_request_id: Callable[[], bytes] | None = None) -> None:
        self._app = app
        self._new_request_id = new_request_id or _request_ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        own_headers = [(_PROTOCOL_NAME, _PROTOCOL), (_ID_NAME, request_id)]
        is_started = False

        async def send_framed(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                message["headers"] = [*message.get("headers", ()), *own_headers]
            await send(message)

        refusal = _refusal(scope)
        if refusal is not None:
            await problem_response(request_id.decode(), refusal)(scope, receive, send_framed)
            return
        try:
            await self._app(scope, receive, send_framed)
        except asyncio.CancelledError:
            if not is_started:  # the server ends, and the request took longer than it may wait
                ending = ServerError(
                    ErrorCode.UNAVAILABLE, "the server is ending: nothing was done, ask again"
                )
                await problem_response(request_id.decode(), ending)(scope, receive, send_framed)
            raise
        except Exception:
            _LOGGER.exception(
                "%s %s failed (%s)", scope["method"], scope["path"], request_id.decode()
            )
            if is_started:
                raise  # the connection is cut: what was sent must not look complete
            failure = ServerError(
                ErrorCode.INTERNAL,
                f"the server failed; its log has the reason under {request_id.decode()}",
            )
            await problem_response(request_id.decode(), failure)(scope, receive, send_framed)

    def _request_id(self, scope: Scope) -> bytes:
        """The caller's id if it is well-formed, so that both logs say the same; else a new one."""
        for name, value in scope["headers"]:
            if name == _ID_NAME and _REQUEST_ID.fullmatch(value):
                return bytes(value)
        return self._new_request_id()


def _refusal(scope: Scope) -> ServerError | None:
    size_bytes = 0
    spoken = _PROTOCOL
    for name, value in scope["headers"]:
        size_bytes += len(name) + len(value)
        if name == _PROTOCOL_NAME:
            spoken = value
    if size_bytes > _MAX_HEADER_BYTES:
        return ServerError(
            ErrorCode.HEADERS_TOO_LARGE,
            f"the headers have {size_bytes} bytes and this server takes {_MAX_HEADER_BYTES}",
            limit=_MAX_HEADER_BYTES,
        )
    if spoken.strip() != _PROTOCOL and scope["path"].startswith(_PREFIX):
        shown = spoken[:32].decode("latin-1")
        return ServerError(
            ErrorCode.UNSUPPORTED_PROTOCOL,
            f"{HEADER_PROTOCOL}: {shown!r} is not spoken here, only version {PROTOCOL_VERSION}: "
            "use a client and a server of matching releases",
        )
    return None
