"""Rendering: templates, and the headers of every page.

Templates escape all values for HTML. They also show invisible characters, and characters that
reorder a line, as escapes, because any client may choose labels, parts and names.
"""

import asyncio
import hashlib
from base64 import b64encode
from datetime import datetime
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

from fastapi import Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from graphstash_schema.names import printable
from graphstash_server import __version__
from graphstash_server.pages import words

__all__ = ["PAGE_HEADERS", "Renderer", "asset"]

_SCRIPT: Final = files("graphstash_server.pages").joinpath("static", "times.js").read_text().strip()
"""The only script of a page. It shows times in the zone of the reader, which only the browser has.

It is a part of each page. A script file would need a policy that names this server as a source.
"""

_HASH: Final = b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()

_POLICY: Final = (
    f"default-src 'none'; script-src 'sha256-{_HASH}'; style-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
    # With no-referrer, browsers would send forms with "Origin: null".
    "Referrer-Policy": "same-origin",
    "Vary": "Accept, Cookie",
}
"""Headers under which a page runs no script but `_SCRIPT`, named by its hash, and loads from and
posts to this server only."""

_MAX_SHOWN: Final = 10_000


class Renderer:
    """Renders templates in a thread, one at a time, while the event loop serves downloads."""

    def __init__(self) -> None:
        self._environment = Environment(
            loader=PackageLoader("graphstash_server.pages"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_shown,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            name: getattr(words, name) for name in words.__all__ if name != "ago"
        }
        self._environment.globals |= {
            "version": __version__,
            "style": asset("style.css")[1],
            "icon": asset("icon.svg")[1],
            "script": Markup(_SCRIPT),  # noqa: S704 - a file of this package
        }
        self._turn = asyncio.Semaphore(1)

    async def page(
        self,
        template: str,
        *,
        now: datetime,
        status_code: int = 200,
        headers: dict[str, str] | None = None,
        **view: Any,
    ) -> Response:
        """Return a response with a page."""
        async with self._turn:
            html = await asyncio.to_thread(self._fill_in, template, now=now, view=view)
        return Response(
            html,
            status_code=status_code,
            headers={**PAGE_HEADERS, **(headers or {})},
            media_type="text/html",
        )

    async def fragment(self, template: str, **view: Any) -> Markup:
        """Render a part of a page that is the same for all visitors, for the caller to cache."""

        def render() -> str:
            return self._environment.get_template(template).render(view)

        async with self._turn:
            return Markup(await asyncio.to_thread(render))  # noqa: S704 - templates escape

    def _fill_in(self, template: str, *, now: datetime, view: dict[str, Any]) -> str:
        def since(at: datetime) -> Markup:
            exact = at.strftime("%Y-%m-%d %H:%M:%S UTC")
            return Markup('<time datetime="{}" title="{}">{}</time>').format(
                at.isoformat(), exact, words.ago(at, now)
            )

        return self._environment.get_template(template).render(view, since=since)


def _shown(value: Any) -> Any:
    """Escape the unprintable characters of a value, unless it is markup."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return printable(value, most=_MAX_SHOWN)


@lru_cache
def asset(name: str) -> tuple[bytes, str]:
    """Return the content and the URL path of a static file. The path changes with the content."""
    content = files("graphstash_server.pages").joinpath("static", name).read_bytes()
    return content, f"/assets/{name}?{hashlib.sha256(content).hexdigest()[:16]}"
