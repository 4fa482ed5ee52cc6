"""SessionService: signs a browser in with a token, so that the browser need not keep the token.

A session is 256 random bits in a cookie. The database has their SHA-256, so every worker and server
recognizes the session, and neither side stores the token. A session has the current rights of its
token: it ends when the token is revoked or expires, and after `SESSION_LIFETIME` at the latest.
"""

import hashlib
import re
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from graphstash_schema import TOKEN_FORM, ErrorCode
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.sessions import (
    SessionRow,
    add_session,
    delete_session,
    drop_sessions,
    find_session,
)
from graphstash_server.errors import ServerError
from graphstash_server.services.identity.authentication import AccessService
from graphstash_server.services.identity.principals import OPEN_ACCESS, Principal

__all__ = ["MAX_SESSIONS_OF_TOKEN", "SESSION_LIFETIME", "Session", "SessionService"]

SESSION_LIFETIME: Final = timedelta(hours=1)
"""Time after which a browser is signed out, in case its user left it open."""

MAX_SESSIONS_OF_TOKEN: Final = 32
"""Maximum browsers that one token signs in. A further sign-in signs out the oldest."""

_ID: Final = re.compile(r"[A-Za-z0-9_-]{43}")


class Session(NamedTuple):
    """A browser that is signed in now. `id` is the secret in its cookie."""

    id: str
    expires_at: datetime
    principal: Principal


@dataclass(kw_only=True, eq=False)
class SessionService:
    """Sign browsers in and out. Safe for concurrent calls."""

    database: Database
    access: AccessService
    clock: Clock

    async def begin(self, token: str) -> Session:
        """Sign in with a token of `graphstash token create` or of an exchange.

        Raises:
            ServerError: 401 if the token is not valid now, 403 if the server has no authentication.
        """
        form = TOKEN_FORM.fullmatch(token)
        if form is None:
            raise ServerError(
                ErrorCode.UNAUTHENTICATED,
                "this is not a token of graphstash, which begins with gst_: paste the whole token; "
                "an administrator creates one with `graphstash token create`",
            )
        principal = await self.access.principal_of(f"Bearer {token}")
        # Nothing proved this token, but a server with authentication would accept the session.
        if principal is OPEN_ACCESS:
            raise ServerError(
                ErrorCode.FORBIDDEN,
                "this server has no authentication, so there is no sign-in",
            )
        now = self.clock()
        ends = [now + SESSION_LIFETIME, *filter(None, [principal.expires_at])]
        session = Session(secrets.token_urlsafe(32), min(ends), principal)
        async with self.database.writing() as connection:
            await drop_sessions(
                connection, expired=now, token_id=form["id"], kept=MAX_SESSIONS_OF_TOKEN - 1
            )
            row = SessionRow(form["id"], session.expires_at)
            await add_session(connection, _sha256(session.id), row)
        return session

    async def find(self, session_id: str) -> Session | None:
        """Return the session of a cookie, or None if it is unknown, ended, or its token is void."""
        if _ID.fullmatch(session_id) is None:
            return None
        async with self.database.reading() as connection:
            row = await find_session(connection, _sha256(session_id))
        now = self.clock()
        # A session that lasts for longer than any new one began while a clock was ahead.
        if row is None or not now < row.expires_at <= now + 2 * SESSION_LIFETIME:
            return None
        principal = await self.access.principal_of_token(row.token_id)
        return None if principal is None else Session(session_id, row.expires_at, principal)

    async def end(self, session_id: str) -> None:
        """Sign out."""
        if await self.find(session_id) is not None:  # a write queues with uploads, so avoid it
            async with self.database.writing() as connection:
                await delete_session(connection, _sha256(session_id))


def _sha256(session_id: str) -> str:
    """Return the stored form of an id. Ids are random, so a plain hash does not reveal them."""
    return hashlib.sha256(session_id.encode()).hexdigest()
