"""create_app: puts the calls, the frame and the process's singletons together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from graphstash_schema import ArtifactKey, ManifestEntry, Problem
from graphstash_server import __version__
from graphstash_server.api import (
    admin,
    artifacts,
    leases,
    manifests,
    namespaces,
    quarantine,
    tokens,
)
from graphstash_server.api.access import OPEN_PATHS, SECURITY_SCHEMES
from graphstash_server.api.frame import RequestFrame
from graphstash_server.api.problems import add_problem_handlers
from graphstash_server.clock import Clock, system_clock
from graphstash_server.context import open_context
from graphstash_server.settings import Settings
from graphstash_server.storage import BlobStore

__all__ = ["create_app"]


def create_app(
    settings: Settings, *, blob_store: BlobStore | None = None, clock: Clock = system_clock
) -> FastAPI:
    """The ASGI application of one server.

    Args:
        settings: of this server.
        blob_store: used instead of the one that the settings name; the caller closes it.
        clock: the time.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_context(settings, blob_store=blob_store, clock=clock) as context:
            app.state.context = context
            yield

    app = FastAPI(
        title="graphstash",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    routes = list(app.routes)
    for api in (artifacts, quarantine, leases, manifests, namespaces, tokens, admin):
        app.include_router(api.router)
        routes += api.router.routes
    add_problem_handlers(app, routes)
    app.add_middleware(RequestFrame)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Adds the models that calls refer to and read or write by themselves."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document["components"]["schemas"]
        for model in (Problem, ArtifactKey, ManifestEntry):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            for name, definition in schema.pop("$defs", {}).items():
                schemas.setdefault(name, definition)
            schemas.setdefault(model.__name__, schema)
        document["components"]["securitySchemes"] = SECURITY_SCHEMES
        for path, calls in document["paths"].items():
            for call in calls.values():
                call["security"] = [] if path in OPEN_PATHS else [{"token": []}]
        app.openapi_schema = document
    return app.openapi_schema
