"""Health, readiness and statistics."""

from typing import Any, Final

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from graphstash_schema import ErrorCode, ServerStats
from graphstash_schema.protocol import API_PREFIX
from graphstash_server import __version__
from graphstash_server.api.calls import ANONYMOUS_RIGHT, KNOWN, NO_STORE, Call, Calls, json_answer
from graphstash_server.errors import ServerError

__all__ = ["router"]

router = Calls(tags=["administration"])

_NO_TOTALS: Final[dict[str, Any]] = {
    **dict.fromkeys(("leases_held", "waiters", "healed", "reported"), 0),
    "refused": {},
    "reads": {},
}
"""Totals for callers who may not read every namespace."""


@router.get("/healthz", response_class=JSONResponse)
async def get_health(_: Request) -> Response:
    """Respond, without checking the database or the blob store."""
    return JSONResponse({"status": "ok", "version": __version__}, headers=NO_STORE)


@router.call(
    "GET",
    "/readyz",
    needs=ANONYMOUS_RIGHT,
    answers={
        200: {
            "description": "database and blob store work; a full store still serves hits",
            "content": {"application/json": {"schema": {}}},
        }
    },
    refuses=[ErrorCode.UNAVAILABLE],
)
async def get_readiness(call: Call) -> Response:
    """Probe the database and the blob store. The response has the state of each part."""
    readiness = await call.context.health.check()
    if not readiness.is_ready:
        raise ServerError(
            ErrorCode.UNAVAILABLE,
            f"not ready: database {readiness.database}, blob store {readiness.blob_store}, locks "
            f"{readiness.locks}",
        )
    return JSONResponse({"status": "ready", **readiness._asdict()}, headers=NO_STORE)


@router.call("GET", API_PREFIX + "/stats", needs=KNOWN, answers={200: {"model": ServerStats}})
async def get_stats(call: Call) -> Response:
    """Return what was stored, served and saved in each namespace that the caller may read. The
    server's totals are 0 for a caller without a grant on the pattern `*`.
    """
    stats = await call.context.statistics.read(may_read=call.may_read)
    limit = {"store_limit_bytes": call.context.settings.store_limit_bytes}
    totals = limit if call.principal.may_see_totals else _NO_TOTALS
    return json_answer(stats.model_copy(update=totals))
