"""Signing in and out: two forms, and the cookie.

Pages of other sites must not sign a browser in or out. A form must therefore have this server's
Origin, which browsers send and pages cannot choose. The cookie is SameSite=Strict: browsers omit it
from requests that other sites start.
"""

import re
from typing import Final
from urllib.parse import parse_qs

from fastapi import Request, Response

from graphstash_schema import ErrorCode
from graphstash_server.api.bodies import body_chunks
from graphstash_server.errors import ServerError
from graphstash_server.pages.rendering import PAGE_HEADERS
from graphstash_server.pages.visitor import (
    COOKIES,
    HOST_COOKIE,
    PLAIN_COOKIE,
    Visitor,
    is_over_tls,
    proxied_scheme,
)
from graphstash_server.services.identity.sessions import Session

__all__ = ["begin", "check_origin", "end", "next_path", "read_form"]

_MAX_FORM_BYTES: Final = 8 * 1024
"""A token has 64 characters, and a path up to 2,001, which the form encodes."""

_NEXT_PATH: Final = re.compile(r"/(?![/\\])[A-Za-z0-9._~/?=&%:+*-]{0,2000}")
"""A path of this server. Two slashes at its beginning would name another server."""


async def begin(visitor: Visitor) -> Response:
    """Sign in with the form's token, and redirect to the form's `next`.

    Raises:
        ServerError: 401 for a wrong token, 403 for a form of another site or if the server has no
            authentication, 408, 413, 503.
    """
    check_origin(visitor.request)
    form = await read_form(visitor)
    visitor.next_path = next_path(form.get("next", ""))
    session = await visitor.context.sessions.begin(form.get("token", "").strip())
    if visitor.session is not None:
        await visitor.context.sessions.end(visitor.session.id)
    headers = {**PAGE_HEADERS, "Location": visitor.next_path}
    answer = Response(status_code=303, headers=headers)
    _set_cookie(answer, session, visitor, is_secure=is_over_tls(visitor.request))
    return answer


async def end(visitor: Visitor) -> Response:
    """End the session, also for copies of its cookie.

    Raises:
        ServerError: 403 for a form of another site, 503.
    """
    check_origin(visitor.request)
    for name in COOKIES:
        if value := visitor.request.cookies.get(name):
            await visitor.context.sessions.end(value)
    answer = Response(status_code=303, headers={**PAGE_HEADERS, "Location": "/"})
    for name in COOKIES:
        answer.delete_cookie(name, secure=name == HOST_COOKIE, httponly=True, samesite="strict")
    return answer


def check_origin(request: Request) -> None:
    """Refuse a form whose Origin has another scheme, host or port than this server.

    Without X-Forwarded-Proto, accept https too, because a proxy may terminate TLS.

    Raises:
        ServerError: 403 for another Origin or none, or another Sec-Fetch-Site than `same-origin`.
    """
    origin, host = (request.headers.get(name, "").lower() for name in ("origin", "host"))
    proxied = proxied_scheme(request)
    own = {
        _origin(scheme, host)
        for scheme in ([proxied] if proxied else [request.url.scheme, "https"])
    }
    site = request.headers.get("sec-fetch-site", "same-origin")
    if origin not in own or site != "same-origin":
        raise ServerError(
            ErrorCode.FORBIDDEN,
            f"the form was not sent by a page of this server ({min(own)}): open its sign-in page "
            "and try again. A proxy in between has to pass on Host with its port, and the scheme "
            "as X-Forwarded-Proto",
        )


def _origin(scheme: str, host: str) -> str:
    """Return an origin as browsers write it, without the default port."""
    return f"{scheme}://{host.removesuffix({'http': ':80', 'https': ':443'}.get(scheme, ''))}"


def next_path(path: str) -> str:
    """Return a path of this server to open after signing in. Any other path becomes `/`."""
    return path if _NEXT_PATH.fullmatch(path) else "/"


def _set_cookie(answer: Response, session: Session, visitor: Visitor, *, is_secure: bool) -> None:
    answer.set_cookie(
        HOST_COOKIE if is_secure else PLAIN_COOKIE,
        session.id,
        max_age=int((session.expires_at - visitor.now).total_seconds()),
        path="/",
        secure=is_secure,
        httponly=True,
        samesite="strict",
    )


async def read_form(visitor: Visitor) -> dict[str, str]:
    """Parse a form of at most 8 KiB and eight fields. The last value of a repeated field counts."""
    raw = b""
    idle_seconds = visitor.context.settings.upload_idle_seconds
    async for chunk in body_chunks(visitor.request, idle_seconds=idle_seconds):
        raw += chunk
        if len(raw) > _MAX_FORM_BYTES:
            raise ServerError(
                ErrorCode.TOO_LARGE,
                f"the form has more than {_MAX_FORM_BYTES} bytes",
                limit=_MAX_FORM_BYTES,
            )
    try:
        fields = parse_qs(raw.decode(), max_num_fields=8)
    except ValueError:
        raise ServerError(
            ErrorCode.INVALID_REQUEST, "the body is not a form: open the page in a browser"
        ) from None
    return {name: values[-1] for name, values in fields.items()}
