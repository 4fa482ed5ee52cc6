"""Map paths to pages, and turn refusals into pages.

A client that does not accept HTML gets a problem document, as from the API. A visitor whose session
has ended is anonymous, and a page that needs a session shows the sign-in form.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response
from markupsafe import Markup
from starlette.routing import BaseRoute

from graphstash_schema import STATUS, ErrorCode, InvalidValueError
from graphstash_server.api.calls import KEY
from graphstash_server.api.problems import log_refusal
from graphstash_server.errors import ServerError
from graphstash_server.pages import sign_in
from graphstash_server.pages.actions import ACTIONS, act
from graphstash_server.pages.artifact import artifact_of
from graphstash_server.pages.audit import audit_of
from graphstash_server.pages.job import job_of, run_of
from graphstash_server.pages.overview import overview_of
from graphstash_server.pages.reference import reference_of
from graphstash_server.pages.rendering import PAGE_HEADERS, Renderer, asset
from graphstash_server.pages.search import search_of
from graphstash_server.pages.tokens import tokens_of
from graphstash_server.pages.tuning import tuning_of
from graphstash_server.pages.visitor import Visitor, visitor_of

__all__ = ["add_pages"]

_ASSETS: Final = {"style.css": "text/css", "icon.svg": "image/svg+xml"}
_ASSET_HEADERS: Final = {
    **PAGE_HEADERS,
    "Cache-Control": "public, max-age=31536000, immutable",  # its path changes with its content
    "Vary": "Accept-Encoding",
}
_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="graphstash"'}

View = Callable[[Visitor], Awaitable[dict[str, Any]]]
"""Returns the content of a page. Raises InvalidValueError for a malformed name or key, and
ServerError: 400 for another malformed part of the query, the errors of `Visitor.enter`, 404 for an
absent artifact, job or run, and 503."""

Handler = Callable[[Visitor], Awaitable[Response]]
Document = Callable[[], Awaitable[dict[str, Any]]]
"""Returns the application's OpenAPI document."""


def add_pages(
    app: FastAPI, *, document: Document
) -> tuple[Callable[[Request], Awaitable[Response]], Sequence[BaseRoute]]:
    """Add the dashboard to an application. Return the endpoint of unknown paths, and the routes."""
    pages = _Pages(document)
    router = APIRouter(include_in_schema=False)
    for path, endpoint in {
        "/": pages.page("overview.html", overview_of, when_anonymous=pages.welcome),
        "/artifacts/{namespace}/" + KEY: pages.page("artifact.html", artifact_of),
        "/jobs/{namespace}/{name}": pages.page("job.html", job_of),
        "/runs/{namespace}/{run}": pages.page("run.html", run_of),
        "/search": pages.page("search.html", search_of, when_anonymous=pages.welcome),
        "/tuning": pages.page("tuning.html", tuning_of, when_anonymous=pages.welcome),
        "/audit": pages.page("audit.html", audit_of),
        "/tokens": pages.page("tokens.html", tokens_of),
        "/docs": pages.page("reference.html", pages.reference),
        "/sign-in": pages.answering(pages.welcome),
        "/assets/{name}": _asset,
    }.items():
        # The HTTP server omits the body of a response to HEAD.
        router.add_api_route(path, endpoint, methods=["GET", "HEAD"])
    router.post("/sign-in")(pages.answering(sign_in.begin))
    router.post("/sign-out")(pages.answering(sign_in.end))
    for action in ACTIONS:
        router.post("/actions/" + action)(pages.answering(partial(pages.act, action)))
    app.include_router(router)
    return pages.answering(_unknown), router.routes


class _Pages:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._renderer = Renderer()
        self._reference: Markup | None = None
        self._rendering = asyncio.Lock()

    def page(
        self, template: str, view: View, *, when_anonymous: Handler | None = None
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of a page. `when_anonymous` responds to anonymous visitors who may
        read nothing.
        """

        async def show(visitor: Visitor) -> Response:
            if when_anonymous and visitor.is_anonymous and not await visitor.namespaces():
                return await when_anonymous(visitor)
            return await self._render(visitor, template, **await view(visitor))

        return self.answering(show)

    def answering(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of a handler, which renders refusals as pages."""

        async def endpoint(request: Request) -> Response:
            visitor = None
            try:
                visitor = await visitor_of(request)
                return await handler(visitor)
            except (ServerError, InvalidValueError) as error:
                if "text/html" not in request.headers.get("accept", "") or visitor is None:
                    raise
                refusal = (
                    ServerError(error.code, str(error))
                    if isinstance(error, InvalidValueError)
                    else error
                )
                return await self._refuse(visitor, refusal)

        return endpoint

    async def welcome(self, visitor: Visitor) -> Response:
        request = visitor.request
        is_sign_in = request.url.path == "/sign-in"
        back = request.query_params.get("next", "/") if is_sign_in else _target(request)
        return await self._render(
            visitor, "sign_in.html", next_path=sign_in.next_path(back), refusal="", is_refused=False
        )

    async def act(self, action: str, visitor: Visitor) -> Response:
        """Carry out an action, and redirect to the page with its result.

        Show a new token in this response, because the server stores only the token's hash.
        """
        visitor, done = await act(visitor, action)
        if done.issued is None:
            return Response(status_code=303, headers={**PAGE_HEADERS, "Location": done.path})
        view = await tokens_of(visitor)
        return await self._render(visitor, "tokens.html", **{**view, "issued": done.issued})

    async def reference(self, _: Visitor) -> dict[str, Any]:
        """Return the API reference, rendered once for all visitors."""
        async with self._rendering:
            if self._reference is None:
                view = await asyncio.to_thread(reference_of, await self._document())
                self._reference = await self._renderer.fragment("reference_body.html", **view)
        return {"body": self._reference}

    async def _refuse(self, visitor: Visitor, error: ServerError) -> Response:
        request = visitor.request
        visitor.context.accounting.count_refusal(error.code)
        state = request.scope["state"]
        log_refusal(error, method=request.method, path=request.url.path, state=state)
        if error.code is ErrorCode.UNAUTHENTICATED:
            is_form = request.method == "POST"
            return await self._render(
                visitor,
                "sign_in.html",
                status_code=STATUS[error.code],
                headers=_CHALLENGE,
                next_path=visitor.next_path if is_form else sign_in.next_path(_target(request)),
                refusal=error.detail,
                is_refused=is_form,
            )
        return await self._render(
            visitor,
            "refusal.html",
            status_code=STATUS[error.code],
            refusal=error.detail,
            code=error.code.value,
            request_id=state["request_id"],
        )

    async def _render(
        self,
        visitor: Visitor,
        template: str,
        *,
        status_code: int = 200,
        headers: dict[str, str] | None = None,
        **view: Any,
    ) -> Response:
        return await self._renderer.page(
            template,
            now=visitor.now,
            status_code=status_code,
            headers=headers,
            visitor=visitor,
            path=visitor.request.url.path,
            **view,
        )


def _target(request: Request) -> str:
    """Return the path of a request with its query."""
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")


async def _unknown(visitor: Visitor) -> Response:
    path = visitor.request.url.path
    raise ServerError(ErrorCode.UNKNOWN_PATH, f"there is no page {path}")


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _ASSETS:
        raise ServerError(ErrorCode.UNKNOWN_PATH, f"unknown path {request.url.path}; see /docs")
    return Response(asset(name)[0], media_type=_ASSETS[name], headers=_ASSET_HEADERS)
