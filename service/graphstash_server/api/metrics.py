"""`GET /metrics`, for Prometheus."""

import asyncio
import ipaddress
from datetime import timedelta
from typing import Final

from fastapi import Request, Response

from graphstash_schema import ErrorCode
from graphstash_server.api.calls import ANONYMOUS_RIGHT, KNOWN, NO_STORE, Call, Calls
from graphstash_server.errors import ServerError
from graphstash_server.services.identity.principals import Principal

__all__ = ["router"]

router = Calls(tags=["administration"])

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"

_TOKEN_SECONDS: Final = 0.5
"""Seconds that a scrape waits for the decision about its token."""

_MAX_REMEMBERED: Final = timedelta(hours=1)
"""Age up to which a decision about a token is used if the database does not answer its check in
time. Then the response has only this host's counters, which name no namespace: the token may have
been revoked since."""

_PROXIED: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
"""Headers that show that a request came through a proxy."""


@router.call(
    "GET",
    "/metrics",
    needs=ANONYMOUS_RIGHT,
    answers={
        200: {"description": "series of Prometheus", "content": {"text/plain": {"schema": {}}}}
    },
    refuses=[
        ErrorCode.UNKNOWN_PATH,
        ErrorCode.UNAUTHENTICATED,
        ErrorCode.FORBIDDEN,
        ErrorCode.UNAVAILABLE,
    ],
)
async def get_metrics(call: Call) -> Response:
    """Return the counters of this host and its database. GRAPHSTASH_METRICS sets the readers."""
    exposition = call.context.exposition
    is_known, is_remembered = await _may_read(call)
    if is_known:
        text = await exposition.read(with_database=not is_remembered)
    else:
        text = exposition.without_database()
    return Response(text, headers=NO_STORE, media_type=_TEXT)


async def _may_read(call: Call) -> tuple[bool, bool]:
    """Return whether the caller may read series, and whether that is only remembered, because the
    database does not answer. Not known if this process has no recent decision about the token.

    Raises:
        ServerError: the caller may not read the metrics.
    """
    allowed = call.context.settings.metrics
    if allowed == "off":
        raise ServerError(
            ErrorCode.UNKNOWN_PATH, "this server gives no metrics: GRAPHSTASH_METRICS is off"
        )
    if allowed == "loopback" and not _is_from_here(call.request):
        raise ServerError(
            ErrorCode.FORBIDDEN,
            "this server gives metrics to callers on its own host, without a proxy in between: "
            "set GRAPHSTASH_METRICS=token, and use a token with the grant read:*",
        )
    if allowed == "token":
        principal, is_remembered = await _principal_in_time(call)
        if principal is None:
            return False, True
        if not principal.may_see_totals:
            raise ServerError(
                ErrorCode.FORBIDDEN,
                f"{principal.name} may not read the metrics, which name namespaces: use a token "
                "with the grant read:*",
            )
        return True, is_remembered
    return True, False


async def _principal_in_time(call: Call) -> tuple[Principal | None, bool]:
    """Return the caller, and False. If the database does not answer in time, return the caller that
    an earlier decision found, or None, and True.

    Raises:
        ServerError: 401 if the caller is not authenticated.
    """
    try:
        async with asyncio.timeout(_TOKEN_SECONDS):
            return (await KNOWN.admit(call.request)).principal, False
    except TimeoutError:
        pass
    except ServerError as error:
        if error.code not in (ErrorCode.UNAVAILABLE, ErrorCode.DATABASE_CORRUPT):
            raise
    authorization = call.request.headers.get("authorization")
    return call.context.access.principal_now(authorization, max_age=_MAX_REMEMBERED), True


def _is_from_here(request: Request) -> bool:
    if any(name in request.headers for name in _PROXIED):
        return False
    if request.client is None:
        return bool(request.scope["state"].get("is_owner"))
    try:
        return ipaddress.ip_address(request.client.host.partition("%")[0]).is_loopback
    except ValueError:
        return bool(request.scope["state"].get("is_owner"))
