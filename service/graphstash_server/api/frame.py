"""RequestFrame: the outermost frame of every request, in plain ASGI.

It gives the request an id, refuses what no call could understand, puts the headers that all answers
have on every one and turns an unforeseen failure into a sanitised one.
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

_MAX_TARGET_BYTES = 8 * 1024
"""Of path and query: the longest path of a call has less than 500 bytes."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_ID_NAME = HEADER_REQUEST_ID.lower().encode()
_PROTOCOL_NAME = HEADER_PROTOCOL.lower().encode()
_PROTOCOL = str(PROTOCOL_VERSION).encode()
_PREFIX = API_PREFIX + "/"

_WATCHED = frozenset({_PROTOCOL_NAME, b"host", b"origin", b"transfer-encoding"})
"""Request headers that may be a reason to refuse."""

_READING = frozenset({"GET", "HEAD"})

_SAFETY = (
    # An answer is data. Should a browser show one, nothing in it runs, loads, sends or is framed.
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_POLICY_NAME = b"content-security-policy"
_DATA_POLICY = (
    _POLICY_NAME,
    b"sandbox; default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
)
_OVER_TLS = (b"strict-transport-security", b"max-age=31536000")
_PAGES = frozenset({"/"})
"""They bring a Content-Security-Policy of their own."""


def _request_ids() -> Callable[[], bytes]:
    """Random for the process and counted within it: random bytes for each cost as much as a hit."""
    process = secrets.token_hex(8)
    numbers = itertools.count(1)

    def new_id() -> bytes:
        return f"{process}-{next(numbers):08x}".encode()  # so that equal answers are equally long

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
        own_headers = _own_headers(scope, request_id)
        is_started = False

        async def send_framed(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                message["headers"] = [*message.get("headers", ()), *own_headers]
            await send(message)

        refusal = _refusal(scope)
        if refusal is not None:
            scope["app"].state.context.accounting.count_refusal(refusal.code)
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


def _own_headers(scope: Scope, request_id: bytes) -> list[tuple[bytes, bytes]]:
    """What every answer has."""
    headers = [(_PROTOCOL_NAME, _PROTOCOL), (_ID_NAME, request_id), *_SAFETY]
    if scope["path"] not in _PAGES:
        headers.append(_DATA_POLICY)
    if scope["scheme"] == "https":
        headers.append(_OVER_TLS)
    return headers


def _refusal(scope: Scope) -> ServerError | None:
    """Why no call gets to see the request; None when one does."""
    size_bytes = 0
    watched = {}
    hosts = 0
    for name, value in scope["headers"]:
        size_bytes += len(name) + len(value)
        if name in _WATCHED:
            watched[name] = value
            hosts += name == b"host"
    if (refusal := scope["state"].get("refusal")) is not None:
        assert isinstance(refusal, ServerError)  # noqa: S101 - the connection found one
        return refusal
    if size_bytes > _MAX_HEADER_BYTES:
        return ServerError(
            ErrorCode.HEADERS_TOO_LARGE,
            f"the headers have {size_bytes} bytes and this server takes {_MAX_HEADER_BYTES}",
            limit=_MAX_HEADER_BYTES,
        )
    return _target_refusal(scope) or _header_refusal(scope, watched, hosts=hosts)


def _target_refusal(scope: Scope) -> ServerError | None:
    """Refuses a path that is too long, or that others may read as another one."""
    raw: bytes = scope.get("raw_path") or b""
    size_bytes = len(raw) + len(scope["query_string"])
    if size_bytes > _MAX_TARGET_BYTES:
        return ServerError(
            ErrorCode.HEADERS_TOO_LARGE,
            f"path and query have {size_bytes} bytes and this server takes {_MAX_TARGET_BYTES}",
            limit=_MAX_TARGET_BYTES,
        )
    if b"%" in raw and raw.count(b"/") != scope["path"].count("/"):
        return ServerError(
            ErrorCode.NOT_FOUND,
            "the path has a / that is written as %2F: no word of a path has one",
        )
    return None


def _header_refusal(scope: Scope, given: dict[bytes, bytes], *, hosts: int) -> ServerError | None:
    """Refuses headers that would be read in two ways, or that only a browser sends."""
    if hosts != 1 and (hosts or scope["http_version"] == "1.1"):
        return ServerError(
            ErrorCode.INVALID_REQUEST, f"there are {hosts} Host headers: expected 1 (RFC 9112)"
        )
    if b"transfer-encoding" in given:
        # Two ways to say where a body ends are one too many: requests are smuggled between them.
        return ServerError(
            ErrorCode.LENGTH_REQUIRED, "send Content-Length instead of Transfer-Encoding"
        )
    if b"origin" in given and scope["method"] not in _READING:
        return ServerError(
            ErrorCode.FORBIDDEN,
            "a request with the header Origin comes from a page in a browser, which may change "
            "nothing here: leave it out",
        )
    spoken = given.get(_PROTOCOL_NAME, _PROTOCOL)
    if spoken.strip() != _PROTOCOL and scope["path"].startswith(_PREFIX):
        shown = spoken[:32].decode("latin-1")
        return ServerError(
            ErrorCode.UNSUPPORTED_PROTOCOL,
            f"{HEADER_PROTOCOL}: {shown!r} is not spoken here, only version {PROTOCOL_VERSION}: "
            "use a client and a server of matching releases",
        )
    return None
