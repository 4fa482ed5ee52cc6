"""RequestFrame: a layer around the handling of every request, in plain ASGI.

It assigns the request ID, refuses malformed, ambiguous and cross-site requests, and adds the common
response headers. It turns an unexpected exception into a response without internal details.
If tracing is on, each request is a span, and its log entries carry the IDs of the span.
"""

import asyncio
import itertools
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphstash_schema import ErrorCode
from graphstash_schema.protocol import (
    API_PREFIX,
    HEADER_PROTOCOL,
    HEADER_REQUEST_ID,
    PROTOCOL_VERSION,
)
from graphstash_server.api.problems import logged_id, problem_response
from graphstash_server.errors import ServerError
from graphstash_server.logs import REQUEST
from graphstash_server.services.counters import Counters

if TYPE_CHECKING:
    from graphstash_server.tracing import Tracing

__all__ = [
    "ID_NAME",
    "MAX_HEADER_BYTES",
    "PROTOCOL",
    "PROTOCOL_NAME",
    "REQUEST_ID",
    "RequestFrame",
    "callers_request_id",
    "frame_headers",
    "header_lines",
    "internal_failure",
    "request_ids",
    "shutting_down",
]

_LOGGER = logging.getLogger(__name__)

MAX_HEADER_BYTES: Final = 64 * 1024
"""Maximum bytes of all request headers: four times the largest metadata header."""

_MAX_TARGET_BYTES = 8 * 1024
"""Maximum bytes of path and query. The longest path of the API has fewer than 500 bytes."""

REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
ID_NAME: Final = HEADER_REQUEST_ID.lower().encode()
PROTOCOL_NAME: Final = HEADER_PROTOCOL.lower().encode()
PROTOCOL: Final = str(PROTOCOL_VERSION).encode()
_PREFIX = API_PREFIX + "/"
_TRACEPARENT = b"traceparent"

_CHECKED_HEADERS = frozenset({PROTOCOL_NAME, b"host", b"origin", b"transfer-encoding"})
"""Request headers for which a request may be refused."""

_SAFE_METHODS = frozenset({"GET", "HEAD"})

_SECURITY = (
    # Responses are data: a browser that displays one must not run, load, send or frame anything.
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_DATA_POLICY = (
    b"content-security-policy",
    b"sandbox; default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
)
_HSTS = (b"strict-transport-security", b"max-age=31536000")
_PAGE_HEADERS = frozenset({b"content-security-policy", b"referrer-policy"})
"""Headers that a page may set to other values."""

_FORMS = ("/sign-in", "/sign-out", "/actions/")
"""Beginnings of the paths of the dashboard's forms, which check the Origin themselves."""


def request_ids() -> Callable[[], bytes]:
    """Return a function that makes request IDs: a random part per process, and a counter. Random
    bytes per request would cost as much as a hit.
    """
    process = secrets.token_hex(8)
    numbers = itertools.count(1)

    def new_id() -> bytes:
        return f"{process}-{next(numbers):08x}".encode()  # equal responses have equal lengths

    return new_id


class RequestFrame:
    """ASGI middleware for HTTP requests. Passes other scopes through."""

    def __init__(
        self, app: ASGIApp, *, counters: Counters, tracing: "Tracing | None" = None
    ) -> None:
        self._app = app
        self._counters = counters
        self._tracing = tracing
        self._new_request_id = request_ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, and measure its time."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        try:
            if self._tracing is None:
                await self._answer(scope, receive, send)
            else:
                await self._trace(self._tracing, scope, receive, send)
        finally:
            self._counters.count_seconds(time.perf_counter() - began)

    async def _trace(self, tracing: "Tracing", scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request in a span."""
        values = [text.decode("latin-1") for name, text in scope["headers"] if name == _TRACEPARENT]
        span = tracing.begin(scope["method"], values)
        state = scope.setdefault("state", {})
        state.update(tracing.ids(span))
        try:
            with tracing.inside(span):
                await self._answer(scope, receive, send)
        finally:
            route = getattr(scope.get("route"), "path", None)
            tracing.finish(span, status=state.get("status"), route=route, path=scope["path"])

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        own_id = self._new_request_id()
        request_id = callers_request_id(scope["headers"]) or own_id
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        state["server_request_id"] = own_id.decode()
        REQUEST.set(state)
        own_headers = frame_headers(scope["scheme"], request_id)
        is_started = False

        async def send_framed(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                state["status"] = message["status"]
                self._counters.count_request(scope["method"], message["status"])
                given = list(message.get("headers", ()))
                overridden = {name for name, _ in given} & _PAGE_HEADERS
                message["headers"] = given + [
                    each for each in own_headers if each[0] not in overridden
                ]
            await send(message)

        refusal = _refusal(scope)
        if refusal is not None:
            scope["app"].state.context.accounting.count_refusal(refusal.code)
            await problem_response(request_id.decode(), refusal)(scope, receive, send_framed)
            return
        try:
            await self._app(scope, receive, send_framed)
        except asyncio.CancelledError:
            if not is_started:  # the time for the shutdown is over
                ending = problem_response(request_id.decode(), shutting_down())
                await ending(scope, receive, send_framed)
            raise
        except Exception:
            _LOGGER.exception("%s %s failed (%s)", scope["method"], scope["path"], logged_id(state))
            if is_started:
                raise  # closes the connection, so that a client notices the missing part
            failure = internal_failure(request_id.decode())
            await problem_response(request_id.decode(), failure)(scope, receive, send_framed)


def callers_request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the caller's request ID if it is well-formed, else None."""
    for name, value in headers:
        if name == ID_NAME and REQUEST_ID.fullmatch(value):
            return bytes(value)
    return None


def frame_headers(scheme: str, request_id: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers of every response. A page may override `_PAGE_HEADERS`."""
    headers = [(PROTOCOL_NAME, PROTOCOL), (ID_NAME, request_id), *_SECURITY, _DATA_POLICY]
    if scheme == "https":
        headers.append(_HSTS)
    return headers


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the lines of headers in HTTP/1.1."""
    return b"".join(b"%b: %b\r\n" % each for each in headers)


def shutting_down() -> ServerError:
    """Return the error for a request that did not end before the shutdown."""
    return ServerError(ErrorCode.UNAVAILABLE, "the server is shutting down; retry")


def internal_failure(request_id: str) -> ServerError:
    """Return the error for an unexpected exception, which the caller has logged."""
    return ServerError(
        ErrorCode.INTERNAL, f"the server failed; see its log for request {request_id}"
    )


def _refusal(scope: Scope) -> ServerError | None:
    """Return the error to refuse the request with, or None to handle it."""
    size_bytes = 0
    checked = {}
    hosts = 0
    for name, value in scope["headers"]:
        size_bytes += len(name) + len(value)
        if name in _CHECKED_HEADERS:
            checked[name] = value
            hosts += name == b"host"
    if (refusal := scope["state"].get("refusal")) is not None:
        assert isinstance(refusal, ServerError)  # noqa: S101 - the connection set it
        return refusal
    if size_bytes > MAX_HEADER_BYTES:
        return ServerError(
            ErrorCode.HEADERS_TOO_LARGE,
            f"the headers have {size_bytes} bytes; the limit is {MAX_HEADER_BYTES}",
            limit=MAX_HEADER_BYTES,
        )
    return _target_refusal(scope) or _header_refusal(scope, checked, hosts=hosts)


def _target_refusal(scope: Scope) -> ServerError | None:
    """Refuse a path that is too long, or has an encoded slash, which a proxy may decode."""
    raw: bytes = scope.get("raw_path") or b""
    size_bytes = len(raw) + len(scope["query_string"])
    if size_bytes > _MAX_TARGET_BYTES:
        return ServerError(
            ErrorCode.HEADERS_TOO_LARGE,
            f"path and query have {size_bytes} bytes; the limit is {_MAX_TARGET_BYTES}",
            limit=_MAX_TARGET_BYTES,
        )
    if b"%" in raw and raw.count(b"/") != scope["path"].count("/"):
        return ServerError(
            ErrorCode.NOT_FOUND,
            "the path contains an encoded slash (%2F), which is not allowed",
        )
    return None


def _header_refusal(scope: Scope, given: dict[bytes, bytes], *, hosts: int) -> ServerError | None:
    """Refuse ambiguous headers, changes by a page in a browser, and other protocol versions."""
    if hosts != 1 and (hosts or scope["http_version"] == "1.1"):
        return ServerError(
            ErrorCode.INVALID_REQUEST, f"there are {hosts} Host headers: expected 1 (RFC 9112)"
        )
    if b"transfer-encoding" in given:
        # If a proxy and this server found different ends of the body, requests could be smuggled.
        return ServerError(
            ErrorCode.LENGTH_REQUIRED, "send Content-Length instead of Transfer-Encoding"
        )
    is_change = scope["method"] not in _SAFE_METHODS
    if b"origin" in given and is_change and not scope["path"].startswith(_FORMS):
        return ServerError(
            ErrorCode.FORBIDDEN,
            "requests with an Origin header come from a page in a browser, which may change "
            "nothing on this server: remove the header",
        )
    version = given.get(PROTOCOL_NAME, PROTOCOL)
    if version.strip() != PROTOCOL and scope["path"].startswith(_PREFIX):
        shown = version[:32].decode("latin-1")
        return ServerError(
            ErrorCode.UNSUPPORTED_PROTOCOL,
            f"{HEADER_PROTOCOL}: version {shown!r} is not supported; this server supports version "
            f"{PROTOCOL_VERSION}. Use a client and a server of matching releases",
        )
    return None
