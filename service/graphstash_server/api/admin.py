"""Health, readiness, statistics, and what stands at the root."""

from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from graphstash_schema import ErrorCode, Namespace, ServerStats
from graphstash_schema.protocol import API_PREFIX, PROTOCOL_VERSION
from graphstash_server import __version__
from graphstash_server.api.access import authenticated
from graphstash_server.api.problems import refusals
from graphstash_server.context import ProcessContext
from graphstash_server.errors import ServerError

__all__ = ["router"]

router = APIRouter(tags=["administration"])

_NO_STORE: Final = {"Cache-Control": "no-store"}
_PAGE: Final = {
    **_NO_STORE,
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
}
"""Headers of a page: nothing in it runs or is loaded; its links work."""

_ROOT: Final = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>graphstash</title></head>
<body><h1>graphstash {__version__}</h1>
<p>A shared compilation cache. Set <code>GRAPHSTASH_URL</code> to this address.</p>
<ul><li><a href="/v1/stats">statistics</a></li><li><a href="/readyz">readiness</a></li>
<li><a href="/openapi.json">API description</a> (protocol version {PROTOCOL_VERSION})</li></ul>
</body></html>
"""


@router.get("/", response_class=HTMLResponse)
async def get_root() -> Response:
    """Says what this is."""
    return HTMLResponse(_ROOT, headers=_PAGE)


@router.get("/healthz", response_class=JSONResponse)
async def get_health() -> Response:
    """The process runs and answers; nothing else is asked."""
    return JSONResponse({"status": "ok", "version": __version__}, headers=_NO_STORE)


@router.get(
    "/readyz",
    response_class=JSONResponse,
    responses={
        200: {"description": "database and blob store work; a full store still serves hits"},
        **refusals(ErrorCode.UNAVAILABLE),
    },
)
async def get_readiness(request: Request) -> Response:
    """Uses the database and the blob store once, and says which of them failed."""
    context: ProcessContext = request.app.state.context
    readiness = await context.health.check()
    if not readiness.is_ready:
        raise ServerError(
            ErrorCode.UNAVAILABLE,
            f"not ready: database {readiness.database}, blob store {readiness.blob_store}",
        )
    return JSONResponse({"status": "ready", **readiness._asdict()}, headers=_NO_STORE)


@router.get(
    API_PREFIX + "/stats",
    response_class=Response,
    responses={
        200: {"model": ServerStats},
        **refusals(
            ErrorCode.UNAUTHENTICATED, ErrorCode.UNSUPPORTED_PROTOCOL, ErrorCode.UNAVAILABLE
        ),
    },
)
async def get_stats(request: Request) -> Response:
    """What was stored, served and saved, by namespace, of those that the caller may read."""
    principal = await authenticated(request)
    context: ProcessContext = request.app.state.context
    stats = await context.statistics.read()
    readable = []
    for usage in stats.namespaces:
        where = Namespace(usage.namespace)
        if principal.may_read(where, await context.policies.of(where)):
            readable.append(usage)
    stats = stats.model_copy(update={"namespaces": tuple(readable)})
    return Response(stats.model_dump_json(), headers=_NO_STORE, media_type="application/json")
