"""RequestFrame: the outermost frame of every request, in plain ASGI.

It gives the request an id, refuses requests that no call could understand, adds the headers that
all answers have, and turns an unexpected exception into an answer without internals.
"""

import asyncio
import itertools
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphstash_schema import ErrorCode
from graphstash_schema.protocol import (
    API_PREFIX,
    HEADER_PROTOCOL,
    HEADER_REQUEST_ID,
    PROTOCOL_VERSION,
)
from graphstash_server.api.problems import logged_id, problem_response
from graphstash_server.counters import Counters
from graphstash_server.errors import ServerError
from graphstash_server.logs import REQUEST

__all__ = [
    "MAX_HEADER_BYTES",
    "RequestFrame",
    "callers_request_id",
    "frame_headers",
    "internal_failure",
    "request_ids",
    "shutting_down",
]

_LOGGER = logging.getLogger(__name__)

MAX_HEADER_BYTES: Final = 64 * 1024
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
_DATA_POLICY = (
    b"content-security-policy",
    b"sandbox; default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
)
_OVER_TLS = (b"strict-transport-security", b"max-age=31536000")
_OF_PAGES = frozenset({b"content-security-policy", b"referrer-policy"})
"""Headers of which pages bring their own."""

_FORMS = frozenset({"/sign-in", "/sign-out"})
"""What a page may send. They change nothing but a browser's session, and compare the Origin
themselves."""


def request_ids() -> Callable[[], bytes]:
    """Random for the process and counted within it: random bytes for each cost as much as a hit."""
    process = secrets.token_hex(8)
    numbers = itertools.count(1)

    def new_id() -> bytes:
        return f"{process}-{next(numbers):08x}".encode()  # so that equal answers are equally long

    return new_id


class RequestFrame:
    """ASGI middleware; other scopes than HTTP pass through."""

    def __init__(self, app: ASGIApp, *, counters: Counters) -> None:
        self._app = app
        self._counters = counters
        self._new_request_id = request_ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        try:
            await self._answer(scope, receive, send)
        finally:
            self._counters.count_seconds(time.perf_counter() - began)

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
                self._counters.count_request(scope["method"], message["status"])
                given = list(message.get("headers", ()))
                brought = {name for name, _ in given} & _OF_PAGES
                message["headers"] = given + [one for one in own_headers if one[0] not in brought]
            await send(message)

        refusal = _refusal(scope)
        if refusal is not None:
            scope["app"].state.context.accounting.count_refusal(refusal.code)
            await problem_response(request_id.decode(), refusal)(scope, receive, send_framed)
            return
        try:
            await self._app(scope, receive, send_framed)
        except asyncio.CancelledError:
            if not is_started:  # the server shuts down and does not wait any longer
                ending = problem_response(request_id.decode(), shutting_down())
                await ending(scope, receive, send_framed)
            raise
        except Exception:
            _LOGGER.exception("%s %s failed (%s)", scope["method"], scope["path"], logged_id(state))
            if is_started:
                raise  # cuts the connection, so that what was sent does not look complete
            failure = internal_failure(request_id.decode())
            await problem_response(request_id.decode(), failure)(scope, receive, send_framed)


def callers_request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The caller's id if it is well-formed: the answer has it, so that both logs do."""
    for name, value in headers:
        if name == _ID_NAME and _REQUEST_ID.fullmatch(value):
            return bytes(value)
    return None


def frame_headers(scheme: str, request_id: bytes) -> list[tuple[bytes, bytes]]:
    """What every answer has, but for what a page says otherwise."""
    headers = [(_PROTOCOL_NAME, _PROTOCOL), (_ID_NAME, request_id), *_SAFETY, _DATA_POLICY]
    if scheme == "https":
        headers.append(_OVER_TLS)
    return headers


def shutting_down() -> ServerError:
    """The answer to a request that the end of the server has cut short."""
    return ServerError(ErrorCode.UNAVAILABLE, "the server is shutting down; retry")


def internal_failure(request_id: str) -> ServerError:
    """The answer to a request that met an unexpected exception, which is in the log."""
    return ServerError(
        ErrorCode.INTERNAL, f"the server failed; see its log for request {request_id}"
    )


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
    if size_bytes > MAX_HEADER_BYTES:
        return ServerError(
            ErrorCode.HEADERS_TOO_LARGE,
            f"the headers have {size_bytes} bytes; the limit is {MAX_HEADER_BYTES}",
            limit=MAX_HEADER_BYTES,
        )
    return _target_refusal(scope) or _header_refusal(scope, watched, hosts=hosts)


def _target_refusal(scope: Scope) -> ServerError | None:
    """Refuses a path that is too long, or that others may read as another one."""
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
    if b"origin" in given and scope["method"] not in _READING and scope["path"] not in _FORMS:
        return ServerError(
            ErrorCode.FORBIDDEN,
            "requests with an Origin header come from a page in a browser, which may change "
            "nothing on this server: remove the header",
        )
    spoken = given.get(_PROTOCOL_NAME, _PROTOCOL)
    if spoken.strip() != _PROTOCOL and scope["path"].startswith(_PREFIX):
        shown = spoken[:32].decode("latin-1")
        return ServerError(
            ErrorCode.UNSUPPORTED_PROTOCOL,
            f"{HEADER_PROTOCOL}: version {shown!r} is not supported; this server supports version "
            f"{PROTOCOL_VERSION}. Use a client and a server of matching releases",
        )
    return None
