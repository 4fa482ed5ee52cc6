"""TokenService: makes, lists and revokes tokens.

What is stored of a token is its id and the SHA-256 of its secret. The secret has 256 random bits,
so nobody finds it from a plain hash of it, however fast hashing is.
"""

import hashlib
import re
import secrets
from datetime import UTC, datetime
from typing import Final

from graphstash_schema import (
    AuditAction,
    ErrorCode,
    TokenInfo,
    TokenIssued,
    TokenList,
    TokenRequest,
)
from graphstash_server.actor import Actor
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.notifications import notify
from graphstash_server.db.queries.audit import AuditRecord, add_audit
from graphstash_server.db.queries.locks import lock_name
from graphstash_server.db.queries.tokens import (
    TokenRow,
    count_live_tokens,
    delete_ended_tokens,
    find_tokens,
    insert_token,
    list_tokens,
    revoke_token,
)
from graphstash_server.errors import ServerError

__all__ = ["MAX_LIVE_TOKENS", "TokenService", "revoked_in", "sha256_of_secret"]

MAX_LIVE_TOKENS: Final = 10_000
"""Most tokens that are neither revoked nor expired: a list of them is one answer."""

_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_ID_CHARACTERS = 16
_ID = re.compile(rf"[{_ID_ALPHABET}]{{{_ID_CHARACTERS}}}")
_SECRET_BYTES = 32

_LATEST = datetime(9999, 1, 1, tzinfo=UTC)
"""A later time is none in some time zone."""

_REVOKED = "revoked"
"""First word of the notification of a revocation; the id follows."""


class TokenService:
    """Safe for concurrent calls; every change is in the audit log, in the same transaction."""

    def __init__(self, *, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def create(self, request: TokenRequest, *, actor: Actor) -> TokenIssued:
        """Makes a token.

        Returns:
            The only answer that ever holds the secret.

        Raises:
            ServerError: 400 when it would be expired, 409 when there are too many, 503.
        """
        now = self._clock()
        expires_at = _checked_expiry(request.expires_at, now=now)
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        info = TokenInfo(
            id="".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_CHARACTERS)),
            description=request.description,
            grants=request.grants,
            created_at=now,
            created_by=actor.name,
            expires_at=expires_at,
        )
        async with self._database.writing() as connection:
            await lock_name(connection, "tokens")  # so that two cannot both be the last one
            if await count_live_tokens(connection, now=now) >= MAX_LIVE_TOKENS:
                raise ServerError(
                    ErrorCode.CONFLICT,
                    f"there are {MAX_LIVE_TOKENS} live tokens already: revoke some that nobody "
                    "uses (`graphstash token list`), or give new ones an expiry",
                    limit=MAX_LIVE_TOKENS,
                )
            await insert_token(connection, TokenRow(info, sha256_of_secret(secret)))
            detail = " ".join(map(str, info.grants))
            await add_audit(
                connection,
                [AuditRecord(now, actor, AuditAction.TOKEN_CREATE, None, info.id, detail)],
            )
        return TokenIssued(token=f"gst_{info.id}_{secret}", info=info)

    async def list_all(self) -> TokenList:
        """All tokens, newest first, revoked and expired ones included.

        Raises:
            ServerError: 503.
        """
        async with self._database.reading() as connection:
            return TokenList(tokens=tuple(await list_tokens(connection)))

    async def revoke(self, token_id: str, *, actor: Actor) -> TokenInfo | None:
        """Revokes a token for good; None when there is none. A second time changes nothing.

        Raises:
            ServerError: 503.
        """
        if _ID.fullmatch(token_id) is None:
            return None  # PostgreSQL does not even compare with a NUL
        now = self._clock()
        async with self._database.writing() as connection:
            if await revoke_token(connection, token_id, now=now):
                await add_audit(
                    connection, [AuditRecord(now, actor, AuditAction.TOKEN_REVOKE, None, token_id)]
                )
                await notify(connection, [f"{_REVOKED} {token_id}"])
            row = (await find_tokens(connection, [token_id])).get(token_id)
        return row.info if row is not None else None

    async def forget_ended(self, *, before: datetime) -> int:
        """Forgets tokens that were revoked or expired before a time; says how many.

        Raises:
            ServerError: 503.
        """
        async with self._database.writing() as connection:
            return await delete_ended_tokens(connection, before=before)

    async def has_live(self) -> bool:
        """Whether anybody can be let in by a token.

        Raises:
            ServerError: 503.
        """
        async with self._database.reading() as connection:
            return await count_live_tokens(connection, now=self._clock()) > 0


def sha256_of_secret(secret: str) -> str:
    """What is stored of a secret, in hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


def revoked_in(payload: str) -> str | None:
    """The id of the token whose revocation a notification tells; None for other ones."""
    word, _, token_id = payload.partition(" ")
    return token_id if word == _REVOKED else None


def _checked_expiry(expires_at: datetime | None, *, now: datetime) -> datetime | None:
    if expires_at is None:
        return None
    if not now < expires_at < _LATEST:
        raise ServerError(
            ErrorCode.INVALID_REQUEST,
            f"expires_at: {expires_at.isoformat()} is not between now and the year 9999: leave it "
            "out for a token that does not expire",
        )
    return expires_at.astimezone(UTC)
