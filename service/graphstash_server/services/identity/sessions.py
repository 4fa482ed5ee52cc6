"""SessionService: signs a browser in with a token, so that the browser need not keep the token.

A session is 256 random bits in a cookie. The database stores only their SHA-256, and every worker
and server can look it up. A session has the current rights of its token. It ends when the token is
revoked or expires, and after `SESSION_LIFETIME` at the latest.
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
"""Maximum duration of a session, in case a user leaves the browser open."""

MAX_SESSIONS_OF_TOKEN: Final = 32
"""Maximum sessions of one token. A further sign-in ends the session that would expire first."""

_ID: Final = re.compile(r"[A-Za-z0-9_-]{43}")


class Session(NamedTuple):
    """A valid session. `id` is the secret in the browser's cookie."""

    id: str
    token_id: str
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
            ServerError: 401 if the token is not valid, 403 if the server has no authentication or
                has not issued the token.
        """
        form = TOKEN_FORM.fullmatch(token)
        if form is None:
            raise ServerError(
                ErrorCode.UNAUTHENTICATED,
                "this is not a token of graphstash, which begins with gst_: paste the whole token; "
                "an administrator creates one with `graphstash token create`",
            )
        principal = await self.access.principal_of(f"Bearer {token}")
        # A server without authentication accepts any token. If authentication is switched on later,
        # a session of an unverified token must not exist.
        if principal is OPEN_ACCESS:
            raise ServerError(
                ErrorCode.FORBIDDEN,
                "this server has no authentication, so there is no sign-in",
            )
        # A session does not contain the token. So a region could not ask its upstream about it.
        is_region = self.access.upstream is not None
        if is_region and await self.access.principal_of_token(form["id"]) is None:
            raise ServerError(
                ErrorCode.FORBIDDEN,
                "the upstream of this region has issued the token: sign in there, or here with a "
                "token that `graphstash token create` creates on this server's host",
            )
        now = self.clock()
        ends = [now + SESSION_LIFETIME, *filter(None, [principal.expires_at])]
        session = Session(secrets.token_urlsafe(32), form["id"], min(ends), principal)
        async with self.database.writing() as connection:
            await drop_sessions(
                connection, expired=now, token_id=form["id"], kept=MAX_SESSIONS_OF_TOKEN - 1
            )
            row = SessionRow(form["id"], session.expires_at)
            await add_session(connection, _sha256(session.id), row)
        return session

    async def find(self, session_id: str) -> Session | None:
        """Return the session of a cookie. Return None if it is unknown or has ended."""
        if _ID.fullmatch(session_id) is None:
            return None
        async with self.database.reading() as connection:
            row = await find_session(connection, _sha256(session_id))
        now = self.clock()
        # A clock that was ahead may have stored an expiry that is too late.
        if row is None or not now < row.expires_at <= now + 2 * SESSION_LIFETIME:
            return None
        principal = await self.access.principal_of_token(row.token_id)
        if principal is None:
            return None
        return Session(session_id, row.token_id, row.expires_at, principal)

    async def is_token_of(self, session: Session, token: str) -> bool:
        """Return whether a session began with this token, which a thief of the cookie lacks."""
        form = TOKEN_FORM.fullmatch(token)
        if form is None or form["id"] != session.token_id:
            return False
        try:
            await self.access.principal_of(f"Bearer {token}")
        except ServerError as error:
            if error.code is not ErrorCode.UNAUTHENTICATED:
                raise
            return False
        return True

    async def end(self, session_id: str) -> None:
        """Sign out."""
        if await self.find(session_id) is not None:  # avoid a write, which queues with uploads
            async with self.database.writing() as connection:
                await delete_session(connection, _sha256(session_id))


def _sha256(session_id: str) -> str:
    """Return the hash of an id for the database. Ids are random, so they need no salt."""
    return hashlib.sha256(session_id.encode()).hexdigest()
