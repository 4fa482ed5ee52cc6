"""Problem documents (RFC 9457), the response to every refused request."""

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from graphstash_schema import STATUS, ErrorCode, InvalidValueError, Problem
from graphstash_schema.protocol import API_PREFIX, PROBLEM_MEDIA_TYPE
from graphstash_server.context import ProcessContext
from graphstash_server.errors import ServerError

__all__ = [
    "add_problem_handlers",
    "are_refusals_logged",
    "invalid_body",
    "log_refusal",
    "logged_id",
    "problem_response",
    "refusals",
    "refused",
]

_LOGGER = logging.getLogger(__name__)


def problem_response(
    request_id: str, error: ServerError, *, headers: dict[str, str] | None = None
) -> Response:
    """Return the response to a refused request. No cache may store it."""
    headers = {"Cache-Control": "no-store", **(headers or {})}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(max(math.ceil(error.retry_after_seconds), 1))
    elif error.code is ErrorCode.UNAVAILABLE:
        headers["Retry-After"] = _RETRY_SECONDS
    if error.code is ErrorCode.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = _CHALLENGE
    if error.code is ErrorCode.RANGE_NOT_SATISFIABLE:
        headers["Content-Range"] = f"bytes */{error.limit:.0f}"
    problem = Problem.of(
        error.code,
        error.detail,
        request_id=request_id,
        limit=error.limit,
        digest=str(error.digest) if error.digest is not None else None,
        given_digest=str(error.given_digest) if error.given_digest is not None else None,
    )
    return Response(
        problem.model_dump_json(exclude_none=True),
        status_code=problem.status,
        headers=headers,
        media_type=PROBLEM_MEDIA_TYPE,
    )


def refusals(*codes: ErrorCode) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses for the errors of a call."""
    by_status: dict[int | str, dict[str, Any]] = {}
    for code in codes:
        described = by_status.setdefault(
            STATUS[code],
            {
                "description": "",
                "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": _PROBLEM_SCHEMA}}},
            },
        )
        described["description"] = " or ".join(
            filter(None, [described["description"], f"`{code}`"])
        )
    return by_status


_PROBLEM_SCHEMA = "#/components/schemas/Problem"


def invalid_body(error: ValidationError) -> ServerError:
    """Build an error that names the first invalid field, or only counts many invalid fields."""
    if (count := error.error_count()) > _MAX_ERRORS:
        return ServerError(
            ErrorCode.INVALID_REQUEST,
            f"{count} fields of the body are unknown, missing or not valid: see the call's schema "
            "in /openapi.json",
        )
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    where = ".".join(str(step) for step in first["loc"]) or "body"
    if isinstance(cause, InvalidValueError):
        return ServerError(cause.code, f"{where}: {cause}")
    shown = repr(first.get("input"))
    return ServerError(
        ErrorCode.INVALID_REQUEST,
        f"{where}: {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '...'} is not valid: "
        f"{first['msg']}",
    )


_SHOWN = 120

_MAX_ERRORS = 100
"""Above this number, name no field: to name the first one, pydantic would describe them all."""

_CHALLENGE = 'Bearer realm="graphstash"'

_RETRY_SECONDS = "2"
"""Seconds after which to retry: about as long as a database or store takes to restart."""


def logged_id(state: Mapping[str, Any]) -> str:
    """Return the request's ID for the log: the server's ID, and the caller's if it differs."""
    own, answered = state["server_request_id"], state["request_id"]
    return str(own) if own == answered else f"{own}, the caller's {answered}"


def add_problem_handlers(
    app: FastAPI,
    routes: Sequence[BaseRoute],
    *,
    unknown_page: Callable[[Request], Awaitable[Response]],
) -> None:
    """Register handlers for all errors except unexpected ones, which `api.frame` handles. Outside
    of the API, `unknown_page` answers a browser that requests an unknown path.
    """
    app.add_exception_handler(ServerError, _on_error)
    app.add_exception_handler(InvalidValueError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error(routes, unknown_page))


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServerError | InvalidValueError)  # noqa: S101 - registered for both
    return refused(request, error)


def refused(request: Request, error: ServerError | InvalidValueError) -> Response:
    """Return the response to a request whose handler raised an error. Count and log the error."""
    if isinstance(error, InvalidValueError):
        error = ServerError(error.code, str(error))
    return _answer(request, error)


def _on_http_error(
    routes: Sequence[BaseRoute], unknown_page: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return the handler of the router's errors: unknown path, unknown method, or another one."""

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - registered for it
        path = request.url.path
        if error.status_code == STATUS[ErrorCode.METHOD_NOT_ALLOWED]:
            allowed = _allowed_methods(request, routes)
            refusal = ServerError(
                ErrorCode.METHOD_NOT_ALLOWED,
                f"{request.method} is not a method of {path}: use {allowed}",
            )
            return _answer(request, refusal, headers={"Allow": allowed})
        if error.status_code == STATUS[ErrorCode.NOT_FOUND]:
            is_browser = "text/html" in request.headers.get("accept", "")
            if is_browser and not path.startswith(f"{API_PREFIX}/"):
                try:
                    return await unknown_page(request)
                except ServerError as invalid:  # the request's token is invalid
                    return _answer(request, invalid)
            refusal = ServerError(ErrorCode.UNKNOWN_PATH, f"unknown path {path}; see /openapi.json")
            return _answer(request, refusal)
        return _answer(request, ServerError(ErrorCode.INVALID_REQUEST, str(error.detail)))

    return answer


def _allowed_methods(request: Request, routes: Sequence[BaseRoute]) -> str:
    """Return the methods of all calls on this path. The router reports only those of the first."""
    allowed: set[str] = set()
    for route in routes:
        match, _ = route.matches(request.scope)
        if match is not Match.NONE:
            allowed |= getattr(route, "methods", None) or set()
    return ", ".join(sorted(allowed))


def _answer(
    request: Request, error: ServerError, *, headers: dict[str, str] | None = None
) -> Response:
    headers = dict(headers or {})
    # The client may still send the body, which would look like its next request.
    if "expect" in request.headers or error.code is ErrorCode.UPLOAD_TIMEOUT:
        headers["Connection"] = "close"
    context: ProcessContext = request.app.state.context
    state = request.scope["state"]
    context.accounting.count_refusal(error.code)
    log_refusal(error, method=request.method, path=request.url.path, state=state)
    return problem_response(state["request_id"], error, headers=headers)


def are_refusals_logged() -> bool:
    """Return whether `log_refusal` logs every refusal."""
    return _LOGGER.isEnabledFor(logging.DEBUG)


def log_refusal(error: ServerError, *, method: str, path: str, state: Mapping[str, Any]) -> None:
    """Log an internal error at ERROR, and any other refusal at DEBUG."""
    level = logging.ERROR if error.code is ErrorCode.INTERNAL else logging.DEBUG
    if _LOGGER.isEnabledFor(level):
        values = (method, path, error, logged_id(state))
        _LOGGER.log(level, "%s %s: %s (%s)", *values, extra={"state": state})
