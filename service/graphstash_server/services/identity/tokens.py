"""TokenService: creates, exchanges, lists and revokes tokens.

The database stores the id of a token and the SHA-256 of its secret. The secret is 256 random bits,
so a fast hash is enough: no search finds the secret from it.
"""

import hashlib
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import (
    AccessKind,
    AuditAction,
    ErrorCode,
    Grant,
    TokenExchange,
    TokenInfo,
    TokenIssued,
    TokenList,
    TokenRequest,
)
from graphstash_server.actor import Actor
from graphstash_server.clock import Ago, Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.notifications import notify
from graphstash_server.db.queries.audit import AuditRecord, add_audit
from graphstash_server.db.queries.locks import lock_name
from graphstash_server.db.queries.tokens import (
    TokenRow,
    count_exchanged_tokens,
    count_live_tokens,
    delete_ended_tokens,
    find_tokens,
    insert_token,
    list_tokens,
    revoke_token,
)
from graphstash_server.errors import ServerError
from graphstash_server.services.identity.principals import Principal

__all__ = [
    "MAX_EXCHANGED_PER_SUBJECT",
    "MAX_EXCHANGED_TOKENS",
    "MAX_LIVE_TOKENS",
    "TokenService",
    "new_token_id",
    "revoked_token_in",
    "sha256_of_secret",
]

MAX_LIVE_TOKENS: Final = 10_000
"""Maximum number of tokens that are neither revoked nor expired. One response lists them all."""

MAX_EXCHANGED_TOKENS: Final = 5_000
"""Maximum number of these tokens that were exchanged for JWTs. Administrators keep the rest."""

MAX_EXCHANGED_PER_SUBJECT: Final = 1_000
"""Maximum number of exchanged tokens of one JWT subject. All hosts of a job may share a subject."""

_EXCHANGED_COUNTS_FOR = timedelta(hours=1)
"""An exchanged token counts for at least this time after its creation, even if it has ended, and is
deleted this time after its end. Otherwise short lifetimes could fill the table and the audit log.
"""

_MIN_KEPT = timedelta(days=30)
"""An ended token stays in the list at least this long, so that its owner finds out why it ended."""

_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_ID_CHARACTERS = 16
_ID = re.compile(rf"[{_ID_ALPHABET}]{{{_ID_CHARACTERS}}}")
_SECRET_BYTES = 32

_LATEST = datetime(9999, 1, 1, tzinfo=UTC)
"""Every expiry lies before this time. In some time zones, a later one cannot be represented."""

_REVOKED = "revoked"
"""A revocation's notification is this word, a space, and the token's id."""


@dataclass(kw_only=True, eq=False)
class TokenService:
    """Safe for concurrent calls. The transaction of a change also writes the audit log."""

    database: Database
    clock: Clock

    async def create(
        self, request: TokenRequest, *, actor: Actor, token_id: str | None = None
    ) -> TokenIssued:
        """Create a token. Only this response ever contains the secret.

        With the `new_token_id` of a form, a form that is sent twice creates one token.

        Raises:
            ServerError: 400 if the expiry is past or after the year 9998, or the ID malformed, 409
                if there are too many tokens, or a token has this ID.
        """
        if token_id is not None and _ID.fullmatch(token_id) is None:
            raise ServerError(ErrorCode.INVALID_REQUEST, "the new token's ID is malformed")
        now = self.clock()
        info = TokenInfo(
            id=token_id or new_token_id(),
            description=request.description,
            grants=request.grants,
            created_at=now,
            created_by=actor.name,
            expires_at=_check_expiry(request.expires_at, now=now),
        )
        return await self._issue(info, actor=actor)

    async def exchange(
        self,
        request: TokenExchange,
        *,
        caller: Principal,
        max_lifetime_seconds: int,
        actor: Actor,
    ) -> TokenIssued:
        """Create a token that outlives the caller's JWT and has the same rights or fewer.

        Raises:
            ServerError: 403 if the caller has no JWT or lacks the requested rights, 400 if the
                lifetime is too long, 409 if there are too many tokens.
        """
        if caller.kind is not AccessKind.OIDC or caller.issuer is None:
            raise ServerError(
                ErrorCode.FORBIDDEN,
                f"{caller.name} has no JWT of an identity provider, and nothing else can be "
                "exchanged: send a JWT in the Authorization header",
            )
        lifetime = request.lifetime_seconds or max_lifetime_seconds
        if lifetime > max_lifetime_seconds:
            raise ServerError(
                ErrorCode.INVALID_REQUEST,
                f"lifetime_seconds: {lifetime} is above this server's limit of "
                f"{max_lifetime_seconds}: ask for less, and exchange a new JWT before the end",
                limit=max_lifetime_seconds,
            )
        for grant in request.grants:
            _check_included(grant, caller)
        now = self.clock()
        info = TokenInfo(
            id=new_token_id(),
            description=caller.name,
            grants=request.grants or caller.grants,
            created_at=now,
            created_by=caller.name,
            expires_at=now + timedelta(seconds=lifetime),
            issuer=caller.issuer,
        )
        return await self._issue(info, actor=actor)

    async def _issue(self, info: TokenInfo, *, actor: Actor) -> TokenIssued:
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        now = info.created_at
        async with self.database.writing() as connection:
            await lock_name(connection, "tokens")  # two calls must not both take the last place
            if info.issuer is not None:
                await _check_room(connection, (info.issuer, info.created_by), now=now)
            if await count_live_tokens(connection, now=now) >= MAX_LIVE_TOKENS:
                raise ServerError(
                    ErrorCode.CONFLICT,
                    f"there are {MAX_LIVE_TOKENS} live tokens already: revoke some unused ones "
                    "(`graphstash token list`), or give new ones an expiry",
                    limit=MAX_LIVE_TOKENS,
                )
            if await find_tokens(connection, [info.id]):
                raise ServerError(
                    ErrorCode.CONFLICT,
                    f"the token {info.id} has been created already, and its secret is not shown "
                    "again: if you did not copy it, revoke the token and create another",
                )
            await insert_token(connection, TokenRow(info, sha256_of_secret(secret)))
            detail = " ".join(map(str, info.grants))
            await add_audit(
                connection,
                [AuditRecord(now, actor, AuditAction.TOKEN_CREATE, None, info.id, detail)],
            )
        return TokenIssued(token=f"gst_{info.id}_{secret}", info=info)

    async def list_all(self) -> TokenList:
        """Return all tokens, newest first, including revoked and expired ones."""
        async with self.database.reading() as connection:
            return TokenList(tokens=tuple(await list_tokens(connection)))

    async def revoke(self, token_id: str, *, actor: Actor) -> TokenInfo | None:
        """Revoke a token for good and return it, or None if no token has this id. Idempotent."""
        if _ID.fullmatch(token_id) is None:
            return None  # the id may contain NUL, which PostgreSQL rejects with an error
        now = self.clock()
        async with self.database.writing() as connection:
            if await revoke_token(connection, token_id, now=now):
                await add_audit(
                    connection, [AuditRecord(now, actor, AuditAction.TOKEN_REVOKE, None, token_id)]
                )
                await notify(connection, [f"{_REVOKED} {token_id}"])
            row = (await find_tokens(connection, [token_id])).get(token_id)
        return row.info if row is not None else None

    async def forget_ended(self, *, ago: Ago, kept_for: timedelta) -> int:
        """Delete tokens that were revoked or expired more than `kept_for` (at least `_MIN_KEPT`)
        ago. For exchanged tokens the limit is an hour. Return the number deleted.
        """
        async with self.database.writing() as connection:
            return await delete_ended_tokens(
                connection,
                before=ago(max(kept_for, _MIN_KEPT)),
                exchanged_before=ago(_EXCHANGED_COUNTS_FOR),
            )


def sha256_of_secret(secret: str) -> str:
    """Return the hash of a secret as the database stores it, in hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


def revoked_token_in(payload: str) -> str | None:
    """Return the id of the token whose revocation a notification reports, else None."""
    word, _, token_id = payload.partition(" ")
    return token_id if word == _REVOKED else None


def new_token_id() -> str:
    """Return a random ID for a new token."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_CHARACTERS))


def _check_included(grant: Grant, caller: Principal) -> None:
    if any(own.includes(grant) for own in caller.grants):
        return
    refusal = f"{caller.name} has no grant that includes {grant}"
    if any(own.allows(grant.scope, grant.namespaces) for own in caller.grants):
        refusal += (
            ", which allows more than a pattern that matches it (an exact name also counts in a "
            "trusted namespace, and * for the whole server): ask for a pattern, or let a rule of "
            "the server grant exactly this"
        )
    held = ", ".join(map(str, caller.grants))
    raise ServerError(ErrorCode.FORBIDDEN, f"{refusal}; it has {held}")


async def _check_room(
    connection: AsyncConnection, caller: tuple[str, str], *, now: datetime
) -> None:
    for of, limit, holder in (
        (caller, MAX_EXCHANGED_PER_SUBJECT, f"{caller[1]} has"),
        (None, MAX_EXCHANGED_TOKENS, "all callers together have"),
    ):
        count = await count_exchanged_tokens(
            connection, now=now, since=now - _EXCHANGED_COUNTS_FOR, of=of
        )
        if count >= limit:
            raise ServerError(
                ErrorCode.CONFLICT,
                f"{holder} {limit} tokens in exchange for JWTs that are live or not yet an hour "
                "old: use one token for all processes of a job, or ask for shorter lives",
                limit=limit,
            )


def _check_expiry(expires_at: datetime | None, *, now: datetime) -> datetime | None:
    if expires_at is None:
        return None
    if not now < expires_at < _LATEST:
        raise ServerError(
            ErrorCode.INVALID_REQUEST,
            f"expires_at: {expires_at.isoformat()} is not between now and the year 9999: leave it "
            "out for a token that does not expire",
        )
    return expires_at.astimezone(UTC)
