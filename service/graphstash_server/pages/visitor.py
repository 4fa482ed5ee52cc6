"""Visitor: who views a page, and what the visitor may see.

A visitor authenticates like a caller of the API, or with the cookie of a session. The cookie works
only for pages, so another site's page cannot use it for a call.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from fastapi import Request

from graphstash_schema import AccessKind, ErrorCode, Namespace, NamespaceStats, Scope, ServerStats
from graphstash_server.actor import Actor
from graphstash_server.api.calls import actor_of, hidden_namespace, principal_of
from graphstash_server.context import ProcessContext
from graphstash_server.errors import ServerError
from graphstash_server.services.identity.principals import ANONYMOUS, Principal
from graphstash_server.services.identity.sessions import Session

__all__ = [
    "COOKIES",
    "HOST_COOKIE",
    "PLAIN_COOKIE",
    "Visitor",
    "form_token_of",
    "is_over_tls",
    "proxied_scheme",
    "unauthenticated",
    "visitor_of",
]

HOST_COOKIE: Final = "__Host-graphstash"
"""The cookie over TLS. Browsers accept it only with Secure, from this host and for all its paths
(RFC 6265bis)."""

PLAIN_COOKIE: Final = "graphstash"
"""The cookie without TLS, because browsers then refuse `HOST_COOKIE`. It is ignored over TLS.
Otherwise an attacker who impersonates the host without TLS could set it, and so sign the browser in
as another user."""

COOKIES: Final = (HOST_COOKIE, PLAIN_COOKIE)

_MAX_LISTED: Final = 32
"""Maximum number of namespaces whose artifacts are listed. Each costs a short walk along an
index."""


@dataclass(slots=True)
class Visitor:
    """A person or program that requested a page. `session` is None without a valid session. If the
    request submits the sign-in form, `next_path` is the page to open after signing in.
    """

    request: Request
    context: ProcessContext
    principal: Principal
    session: Session | None
    now: datetime
    next_path: str = "/"
    _statistics: ServerStats | None = None

    @property
    def is_anonymous(self) -> bool:
        """Whether the server requires authentication and this visitor has none."""
        return self.principal.kind is AccessKind.ANONYMOUS

    @property
    def form_token(self) -> str:
        """Value of the hidden field that proves that a page of this session sent a form."""
        return form_token_of("" if self.session is None else self.session.id)

    @property
    def actor(self) -> Actor:
        """The visitor, for the audit log."""
        return actor_of(self.request, self.principal)

    def require_administrator(self) -> None:
        """Refuse a visitor who does not administer the server.

        Raises:
            ServerError: 401 for an anonymous visitor, otherwise 403.
        """
        if self.is_anonymous:
            raise unauthenticated()
        if not self.principal.is_administrator:
            raise ServerError(
                ErrorCode.FORBIDDEN,
                f"{self.principal.name} does not administer this server: sign in with a token with "
                "the grant admin:*",
            )

    @property
    def may_see_server(self) -> bool:
        """Whether the visitor may see data about the server as a whole."""
        return self.principal.may_see_totals

    async def may_read(self, namespace: Namespace) -> bool:
        """Return whether a GET in the namespace would be answered."""
        policy = await self.context.policies.of(namespace)
        return self.principal.may_read(namespace, policy)

    async def may(self, scope: Scope, namespace: Namespace) -> bool:
        """Return whether a call of that scope would be allowed."""
        policy = await self.context.policies.of(namespace)
        return self.principal.may(scope, namespace, policy)

    async def enter(self, name: str) -> Namespace:
        """Return a namespace that the visitor may read. Count the visit against the request rate of
        the namespace.

        Raises:
            InvalidValueError: the name is malformed.
            ServerError: 401, 404, 429, 503, as for a call.
        """
        if self.is_anonymous and Namespace.form.fullmatch(name) is None:
            raise unauthenticated()
        namespace = Namespace(name)
        if not await self.may_read(namespace):
            raise unauthenticated() if self.is_anonymous else hidden_namespace(namespace)
        self.context.policies.admit(namespace, await self.context.policies.of(namespace))
        return namespace

    async def statistics(self) -> ServerStats:
        """Return the counters that the visitor may read. Queries the database once per page."""
        if self._statistics is None:
            self._statistics = await self.context.statistics.read(may_read=self.may_read)
        return self._statistics

    async def namespaces(self) -> Sequence[NamespaceStats]:
        """Return the counters of each namespace that the visitor may read.

        Without public namespaces, an anonymous visitor causes no query.
        """
        if self.is_anonymous and not await self.context.policies.is_anything_public():
            return ()
        return (await self.statistics()).namespaces

    async def searched(self) -> tuple[Namespace | None, Sequence[Namespace], bool]:
        """Return the namespace that the request names, the namespaces to search, and whether these
        omit any with artifacts that the visitor may read.

        Raises:
            InvalidValueError, ServerError: as for `enter`.
        """
        if name := self.request.query_params.get("namespace"):
            chosen = await self.enter(name)
            return chosen, [chosen], False
        stats = [each for each in await self.namespaces() if each.artifacts]
        listed = self.listed(stats)
        return None, listed, len(listed) < len(stats)

    def listed(self, stats: Sequence[NamespaceStats]) -> Sequence[Namespace]:
        """Return the namespaces with the most artifacts, at most `_MAX_LISTED`."""
        largest = sorted(stats, key=lambda each: -each.artifacts)
        return [Namespace(each.namespace) for each in largest[:_MAX_LISTED] if each.artifacts]


def form_token_of(session_id: str) -> str:
    """Return the value of the forms of a session. It does not reveal the session's ID."""
    return hashlib.sha256(f"form of {session_id}".encode()).hexdigest()


async def visitor_of(request: Request) -> Visitor:
    """Identify the visitor who makes a request.

    Raises:
        ServerError: 401 if the request has an invalid token. After a session has ended, the visitor
            is anonymous instead.
    """
    context: ProcessContext = request.app.state.context
    principal = await principal_of(request, context)
    session = None
    if principal is ANONYMOUS:
        for name in (HOST_COOKIE,) if is_over_tls(request) else COOKIES:
            if session is None and (value := request.cookies.get(name)):
                session = await context.sessions.find(value)
        if session is not None:
            principal = session.principal
    return Visitor(request, context, principal, session, context.clock())


def is_over_tls(request: Request) -> bool:
    """Return whether a browser's connection uses TLS, which a proxy may terminate.

    Such a proxy sends X-Forwarded-Proto, and a browser sends Origin with a form. A caller who
    forges them only gets stricter checks.
    """
    schemes = (request.url.scheme, proxied_scheme(request))
    return "https" in schemes or request.headers.get("origin", "").startswith("https://")


def proxied_scheme(request: Request) -> str:
    """Return the scheme of a browser's connection to a proxy, or "" if no proxy names it."""
    return request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()


def unauthenticated() -> ServerError:
    """Return the error for a visitor who is not signed in."""
    return ServerError(
        ErrorCode.UNAUTHENTICATED,
        "sign in to see this: paste a token, which an administrator creates with "
        "`graphstash token create`",
    )
