"""create_app: build a server's ASGI application from its routes, middleware and context."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter
from starlette.types import ASGIApp

from graphstash_schema import ArtifactKey, ErrorCode, ManifestEntry, Problem
from graphstash_schema.explanation import Description
from graphstash_schema.listing import ArtifactQuery
from graphstash_schema.withdrawals import WithdrawalQuery
from graphstash_server import __version__
from graphstash_server.api import (
    admin,
    artifacts,
    explanations,
    history,
    leases,
    listing,
    manifests,
    metrics,
    namespaces,
    quarantine,
    runs,
    tokens,
    upstream,
)
from graphstash_server.api.calls import OPEN_PATHS, SECURITY_SCHEMES
from graphstash_server.api.dispatch import Dispatch
from graphstash_server.api.frame import RequestFrame
from graphstash_server.api.problems import add_problem_handlers
from graphstash_server.clock import Clock, system_clock
from graphstash_server.context import ProcessContext, open_context
from graphstash_server.pages.routes import add_pages
from graphstash_server.services.counters import Counters
from graphstash_server.settings import Settings
from graphstash_server.storage import BlobStore

if TYPE_CHECKING:
    from graphstash_server.tracing import Tracing

__all__ = ["ServerApp", "create_app"]


_CLEANUP_SECONDS = 2.0
"""Seconds in which requests that the shutdown cancelled can delete unused blobs. Half of the time
until the parent kills a worker."""


class ServerApp(FastAPI):
    """The ASGI application of one server.

    Attributes:
        context: what the lifespan opens when it starts, and closes when it ends.
        requests: the tasks of the HTTP server, and the work of uploads that outlasts them. The
            context is closed after they have ended.
    """

    context: ProcessContext
    requests: set[asyncio.Task[Any]]

    def __init__(self, **options: Any) -> None:
        super().__init__(
            docs_url=None,  # /docs and /redoc load scripts from other hosts; see pages.reference
            redoc_url=None,
            openapi_url=None,  # see `document`
            redirect_slashes=False,
            **options,
        )
        self.requests = set()
        self._documenting = asyncio.Lock()

    def build_middleware_stack(self) -> ASGIApp:
        """Return the middleware from `RequestFrame` on, which answers every exception.

        FastAPI's outer middleware handles errors, telemetry and limits of bodies. The server does
        all three itself, so requests need not pass through it.
        """
        app: Any = super().build_middleware_stack()
        while not isinstance(app, RequestFrame):
            app = app.app
        return app

    async def document(self) -> dict[str, Any]:
        """Return the OpenAPI document. The first call builds it in a thread, in about 0.2 s."""
        async with self._documenting:
            if self.openapi_schema is None:
                await asyncio.to_thread(self.openapi)
        return self.openapi()

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document. The first call builds it and blocks; see `document`."""
        if self.openapi_schema is None:
            self.openapi_schema = _openapi(self)
        return self.openapi_schema

    def count_refusal(self, code: ErrorCode) -> None:
        """Count a request that the HTTP server refused before it reached the application."""
        self.context.accounting.count_refusal(code)

    def stop_waiting(self) -> None:
        """Answer all requests that wait for a lease, before the server stops."""
        self.context.wait_queue.close()

    async def end_requests(self) -> None:
        """Wait for requests that the HTTP server has cancelled, and cancel slow ones again."""
        for _ in range(2):
            if self.requests:
                await asyncio.wait(list(self.requests), timeout=_CLEANUP_SECONDS)
            for task in self.requests:
                task.cancel()


def create_app(
    settings: Settings,
    *,
    blob_store: BlobStore | None = None,
    counters: Counters | None = None,
    clock: Clock = system_clock,
    tracing: "Tracing | None" = None,
) -> ServerApp:
    """Build the ASGI application of one server, with the counters of this worker. The caller closes
    a given `blob_store`, which replaces the store of the settings.
    """
    counters = counters or Counters.alone()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with open_context(
            settings, blob_store=blob_store, counters=counters, clock=clock, tracing=tracing
        ) as context:
            app.context = app.state.context = context
            context.uploads.tasks = app.requests
            yield
            await app.end_requests()

    app = ServerApp(
        title="graphstash",
        version=__version__,
        lifespan=lifespan,
        # FastAPI's own spans would record query strings, which may contain secrets by mistake.
        # `tracing` does not record query strings.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.add_route("/openapi.json", _get_openapi, include_in_schema=False)
    routes = list(app.routes)
    for api in (
        *(artifacts, listing, explanations, quarantine, leases, manifests, runs),
        *(namespaces, tokens, history, metrics, admin, upstream),
    ):
        app.include_router(api.router)
        routes += api.router.routes
    app.add_middleware(Dispatch, routes=list(routes))
    unknown_page, pages = add_pages(app, document=app.document)
    routes += pages
    add_problem_handlers(app, routes, unknown_page=unknown_page)
    app.add_middleware(RequestFrame, counters=counters, tracing=tracing)
    return app


async def _get_openapi(request: Request) -> Response:
    return JSONResponse(await request.app.document())


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Build the OpenAPI document. Add security, and models that handlers use without FastAPI."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document["components"]["schemas"]
    for model in (Problem, ArtifactKey, ManifestEntry, Description, ArtifactQuery, WithdrawalQuery):
        schema = TypeAdapter(model).json_schema(ref_template="#/components/schemas/{model}")
        for name, definition in schema.pop("$defs", {}).items():
            schemas.setdefault(name, definition)
        schemas.setdefault(model.__name__, schema)
    document["components"]["securitySchemes"] = SECURITY_SCHEMES
    for path, calls in document["paths"].items():
        for call in calls.values():
            call["security"] = [] if path in OPEN_PATHS else [{"token": []}]
    return document
