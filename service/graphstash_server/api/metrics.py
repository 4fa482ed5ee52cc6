"""The metrics for Prometheus."""

import ipaddress
from typing import Final

from fastapi import Request, Response

from graphstash_schema import ErrorCode
from graphstash_server.api.calls import ANONYMOUS_RIGHT, KNOWN, NO_STORE, Call, Calls
from graphstash_server.errors import ServerError

__all__ = ["router"]

router = Calls(tags=["administration"])

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"

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
    await _check(call)
    return Response(await call.context.exposition.read(), headers=NO_STORE, media_type=_TEXT)


async def _check(call: Call) -> None:
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
        known = await KNOWN.admit(call.request)
        if not known.principal.may_see_totals:
            raise ServerError(
                ErrorCode.FORBIDDEN,
                f"{known.principal.name} may not read the metrics, which name namespaces: use a "
                "token with the grant read:*",
            )


def _is_from_here(request: Request) -> bool:
    if any(name in request.headers for name in _PROXIED):
        return False
    if request.client is None:
        return bool(request.scope["state"].get("is_owner"))
    try:
        return ipaddress.ip_address(request.client.host.partition("%")[0]).is_loopback
    except ValueError:
        return bool(request.scope["state"].get("is_owner"))
