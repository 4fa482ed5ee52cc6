"""Visitor: who looks at a page, and what they may see.

The way in is that of the API's calls, and one more: the cookie of a session. It counts for pages
alone, so that no page of somebody else can use it for a call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from fastapi import Request

from graphstash_schema import AccessKind, ErrorCode, Namespace, NamespaceStats, Scope, ServerStats
from graphstash_server.api.calls import nothing_there, principal_of
from graphstash_server.context import ProcessContext
from graphstash_server.errors import ServerError
from graphstash_server.services.identity.principals import ANONYMOUS, Principal
from graphstash_server.services.identity.sessions import Session

__all__ = ["COOKIES", "HOST_COOKIE", "PLAIN_COOKIE", "Visitor", "is_over_tls", "visitor_of"]

HOST_COOKIE: Final = "__Host-graphstash"
"""Over TLS: browsers take it only with Secure, from this host, for all its paths (RFC 6265bis)."""

PLAIN_COOKIE: Final = "graphstash"
"""Without TLS, where no browser takes the other one. It does not count over TLS: whoever can answer
for the host without TLS can set it, and sign a browser in as somebody else.
"""

COOKIES: Final = (HOST_COOKIE, PLAIN_COOKIE)

_MAX_LISTED: Final = 32
"""Namespaces of which artifacts are listed: each costs a short walk along an index."""


@dataclass(slots=True)
class Visitor:
    """Whoever asked for a page.

    Attributes:
        request: what they asked.
        context: what the process has opened.
        principal: who they are.
        session: how they signed in; None for those who show a token, or nothing.
        now: when they asked.
    """

    request: Request
    context: ProcessContext
    principal: Principal
    session: Session | None
    now: datetime
    _statistics: ServerStats | None = None

    @property
    def is_anonymous(self) -> bool:
        """Whether signing in would help."""
        return self.principal.kind is AccessKind.ANONYMOUS

    @property
    def sees_server(self) -> bool:
        """Whether they may see what concerns the server as a whole."""
        return self.principal.may_see_totals

    async def may_read(self, namespace: Namespace) -> bool:
        """Whether a GET there would be answered."""
        policy = await self.context.policies.of(namespace)
        return self.principal.may_read(namespace, policy)

    async def may(self, scope: Scope, namespace: Namespace) -> bool:
        """Whether a call of that scope would be allowed."""
        policy = await self.context.policies.of(namespace)
        return self.principal.may(scope, namespace, policy)

    async def enter(self, name: str) -> Namespace:
        """A namespace that they may read; the visit counts against its rate.

        Raises:
            InvalidValueError: when it is malformed.
            ServerError: 401, 404, 429: as for a call.
        """
        if self.is_anonymous and Namespace.form.fullmatch(name) is None:
            raise unauthenticated()
        where = Namespace(name)
        if not await self.may_read(where):
            raise unauthenticated() if self.is_anonymous else nothing_there(where)
        self.context.policies.admit(where, await self.context.policies.of(where))
        return where

    async def statistics(self) -> ServerStats:
        """The counters of what they may read; they are read once for a page."""
        if self._statistics is None:
            self._statistics = await self.context.statistics.read(may_read=self.may_read)
        return self._statistics

    async def namespaces(self) -> Sequence[NamespaceStats]:
        """The counters of each namespace that they may read. Nothing is counted for a stranger to a
        server that shows strangers nothing.
        """
        if self.is_anonymous and not await self.context.policies.is_anything_public():
            return ()
        return (await self.statistics()).namespaces

    def listed(self, stats: Sequence[NamespaceStats]) -> Sequence[Namespace]:
        """The namespaces of which artifacts are listed: those with most artifacts."""
        largest = sorted(stats, key=lambda each: -each.artifacts)
        return [Namespace(each.namespace) for each in largest[:_MAX_LISTED] if each.artifacts]


async def visitor_of(request: Request, now: datetime) -> Visitor:
    """Whoever makes a request.

    Raises:
        ServerError: 401 for a token in the request that is not valid; a session that has ended only
            makes the visitor anonymous.
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
    return Visitor(request, context, principal, session, now)


def is_over_tls(request: Request) -> bool:
    """Whether a browser's connection has TLS, which a proxy may end: it says so in
    X-Forwarded-Proto, and a form in its Origin. A caller who makes it up is only refused more.
    """
    named = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    return "https" in (request.url.scheme, named) or request.headers.get("origin", "").startswith(
        "https://"
    )


def unauthenticated() -> ServerError:
    """The answer to somebody whom nobody knows."""
    return ServerError(
        ErrorCode.UNAUTHENTICATED,
        "sign in to see this: paste a token, which an administrator creates with "
        "`graphstash token create`",
    )
