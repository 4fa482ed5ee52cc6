"""AccessService: authenticates a caller by the Authorization header.

The service stores no token: it identifies a token by its id, which is not secret, and a JWT by its
SHA-256. It caches a decision for two seconds (`MAX_DECISION_AGE`) to save queries. Every server
refuses a revoked token within two seconds, and at once with notifications of PostgreSQL. While
tokens are in use, one query per second renews the decisions about all of them. A JWT cannot be
revoked, only the token that it was exchanged for. The decision about a JWT lasts until the keys of
its issuer are fetched again. Expiry is checked on every use.
"""

import asyncio
import hashlib
import hmac
import logging
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Final, NamedTuple, Protocol

from graphstash_schema import TOKEN_FORM, AccessKind, ErrorCode
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.tokens import TokenRow, find_tokens, find_unrevoked
from graphstash_server.errors import ServerError
from graphstash_server.logs import in_background
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.identity.oidc import OidcVerifier
from graphstash_server.services.identity.principals import ANONYMOUS, OPEN_ACCESS, Principal
from graphstash_server.services.identity.tokens import sha256_of_secret

__all__ = [
    "MAX_DECISION_AGE",
    "AccessService",
    "Issuer",
    "KnownToken",
    "KnownTokens",
    "bearer_in",
]

MAX_DECISION_AGE: Final = timedelta(seconds=2)
"""Maximum age of a decision about a caller."""

_LOGGER = logging.getLogger(__name__)

_MAX_KNOWN = 10_000
_MAX_UNKNOWN = 10_000
"""Maximum cached ids of unknown or revoked tokens. An id has 16 characters: about 2 MB."""

_JWT: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")

_AT_ONCE = 500
"""Maximum tokens that one statement reads."""

_RENEWED_AGE = MAX_DECISION_AGE / 2
"""Age at which a use of a token renews the decisions about all tokens in use."""

_IN_USE = timedelta(minutes=1)
"""How long after its last use a token counts as in use."""


class KnownToken(NamedTuple):
    """A token that is not revoked: its owner, and the SHA-256 of its secret in hex."""

    principal: Principal
    secret_sha256: str


@dataclass(slots=True)
class _Seen:
    read_at: datetime
    used_at: datetime
    token: KnownToken | None


@dataclass(kw_only=True, eq=False)
class KnownTokens:
    """Tokens as stored in the database, cached for two seconds.

    Unknown ids are cached separately, and all look-ups of a process share one statement at a time.
    Guessing tokens therefore costs the database almost nothing and evicts no known token. A renewal
    is a task of its own, because a look-up must not wait for it.

    A stored token changes only by revocation and deletion. So a renewal needs no rows: it counts
    how many tokens in use are unrevoked. It finds the revoked ones only if the count differs.
    `clock` is never set back.
    """

    database: Database
    clock: Clock

    def __post_init__(self) -> None:
        self._known: OrderedDict[str, _Seen] = OrderedDict()
        self._unknown: OrderedDict[str, _Seen] = OrderedDict()
        self._pending: dict[str, asyncio.Future[KnownToken | None]] = {}
        self._reading: set[str] = set()  # being queried, except ids forgotten since
        self._reader: asyncio.Task[None] | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._renewed_at: datetime | None = None  # the last attempt

    async def find(self, token_id: str) -> KnownToken | None:
        """Return a token as of at most two seconds ago, or None if it is unknown or revoked."""
        seen = self._seen(token_id)
        if seen is not None:
            return seen.token
        found = self._pending.get(token_id)
        if found is None:
            found = self._pending[token_id] = asyncio.get_running_loop().create_future()
        if self._reader is None:
            self._reader = in_background(self._read())
        return await asyncio.shield(found)

    def find_now(self, token_id: str, *, max_age: timedelta | None = None) -> KnownToken | None:
        """Return the token if it is cached. None otherwise, or if it is unknown or revoked. Default
        of `max_age`: `MAX_DECISION_AGE`.
        """
        seen = self._seen(token_id, max_age)
        return seen.token if seen is not None else None

    def _seen(self, token_id: str, max_age: timedelta | None = None) -> _Seen | None:
        seen = self._known.get(token_id) or self._unknown.get(token_id)
        if seen is None:
            return None
        seen.used_at = now = self.clock()
        age = now - seen.read_at
        if age >= (max_age or MAX_DECISION_AGE):
            return None
        if age >= _RENEWED_AGE and seen.token is not None:
            self._renew_at(now)
        return seen

    def _renew_at(self, now: datetime) -> None:
        if self._renewal is not None and not self._renewal.done():
            return
        if self._renewed_at is None or now - self._renewed_at >= _RENEWED_AGE:
            self._renewed_at = now
            self._renewal = in_background(self._renew())

    def forget(self, token_id: str) -> None:
        """Make the next use of a token query the database. A query in progress may miss the
        change, so its waiters wait for another query.
        """
        self._reading.discard(token_id)
        self._known.pop(token_id, None)
        self._unknown.pop(token_id, None)

    async def _read(self) -> None:
        try:
            while self._pending:
                await self._read_pending()
        finally:
            self._reader = None
            for found in self._pending.values():
                found.cancel()
            self._pending.clear()

    async def _read_pending(self) -> None:
        batch = dict(islice(self._pending.items(), _AT_ONCE))
        read_at = self.clock()
        self._reading = set(batch)
        try:
            rows = await find_tokens(self.database, list(batch))
        except Exception as error:  # noqa: BLE001 - raised to the waiters
            self._settle(batch, error)
        else:
            batch = {name: found for name, found in batch.items() if name in self._reading}
            known = {token_id: _known_token(rows.get(token_id)) for token_id in batch}
            for token_id, token in known.items():
                self._remember(token_id, _Seen(read_at, read_at, token))
            self._settle(batch, known)

    async def _renew(self) -> None:
        """Renew the decisions about all tokens in use, or forget those of revoked tokens."""
        read_at = self.clock()
        used = {
            name: seen for name, seen in self._known.items() if read_at - seen.used_at < _IN_USE
        }
        try:
            unrevoked = await find_unrevoked(self.database, list(used))
        except Exception as error:  # noqa: BLE001 - the next use of each token raises it
            _LOGGER.debug("could not renew the decisions about tokens: %s", error)
            return
        for token_id, seen in used.items():
            if token_id in unrevoked:
                seen.read_at = read_at
            else:
                self.forget(token_id)

    def _settle(
        self,
        batch: Mapping[str, asyncio.Future[KnownToken | None]],
        answer: Mapping[str, KnownToken | None] | Exception,
    ) -> None:
        for token_id, found in batch.items():
            del self._pending[token_id]
            if isinstance(answer, Exception):
                found.set_exception(answer)
                found.exception()  # mark as retrieved, in case all waiters are gone
            else:
                found.set_result(answer[token_id])

    def _remember(self, token_id: str, seen: _Seen) -> None:
        self.forget(token_id)
        kept, most = (
            (self._unknown, _MAX_UNKNOWN) if seen.token is None else (self._known, _MAX_KNOWN)
        )
        kept[token_id] = seen
        if len(kept) > most:
            kept.popitem(last=False)


def _known_token(row: TokenRow | None) -> KnownToken | None:
    if row is None or row.info.revoked_at is not None:
        return None
    principal = Principal(
        kind=AccessKind.TOKEN,
        name=f"token:{row.info.id} {row.info.description}",
        grants=row.info.grants,
        expires_at=row.info.expires_at,
        issuer=row.info.issuer,
        subject=row.info.created_by if row.info.issuer is not None else None,
        token=row.info.id,
    )
    return KnownToken(principal, row.secret_sha256)


_MAX_VERIFIED = 10_000
"""Maximum cached JWTs. A CI job has one, with about 1 KB in here."""


class _Verified(NamedTuple):
    """A JWT that was verified with `keys`, or None if the provider did not answer then."""

    at: datetime
    principal: Principal
    keys: object | None


class Issuer(Protocol):
    """Another server that issues tokens: a region's upstream."""

    async def find(self, credentials: str) -> Principal | None:
        """Return the caller with these credentials, or None if the server refuses them."""

    def find_now(self, credentials: str) -> Principal | None:
        """Return the caller without waiting. None if refused, or if the decision is not cached."""


@dataclass(kw_only=True, eq=False)
class AccessService:
    """Authenticate callers. If `is_open`, callers need no token. `oidc` is None if the
    server accepts no JWTs. `upstream` decides about credentials that this server does not know.
    """

    is_open: bool
    tokens: KnownTokens
    oidc: OidcVerifier | None
    accounting: Accounting
    clock: Clock
    upstream: Issuer | None = None

    def __post_init__(self) -> None:
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()

    async def principal_of(self, authorization: str | None) -> Principal:
        """Return the caller named by the Authorization header; None is an absent header.

        Raises:
            ServerError: 401, with the same message for every token that is not valid now, except a
                JWT with an algorithm that its key does not verify.
        """
        if self.is_open:
            return OPEN_ACCESS
        if authorization is None:
            return ANONYMOUS
        credentials = bearer_in(authorization)
        principal = None if credentials is None else await self._of_bearer(credentials)
        if principal is None or self._is_expired(principal):
            raise ServerError(
                ErrorCode.UNAUTHENTICATED,
                "the bearer token is malformed, unknown, expired or revoked: set GRAPHSTASH_TOKEN "
                "to a valid one; an administrator creates it with `graphstash token create`",
            )
        return principal

    def principal_now(
        self, authorization: str | None, *, max_age: timedelta | None = None
    ) -> Principal | None:
        """Return the caller without waiting. None if refused, or if the decision is not cached. A
        decision about a token may be as old as `max_age`, by default `MAX_DECISION_AGE`.
        """
        if self.is_open:
            return OPEN_ACCESS
        if authorization is None:
            return ANONYMOUS
        credentials = bearer_in(authorization)
        if credentials is None:
            return None
        form = TOKEN_FORM.fullmatch(credentials)
        if form is not None:
            token = self.tokens.find_now(form["id"], max_age=max_age)
            principal = self._accept(token, form["id"], form["secret"])
        else:
            principal = self._verified_now(_name_of(credentials))
        if principal is None and self.upstream is not None:
            principal = self.upstream.find_now(credentials)
        return None if principal is None or self._is_expired(principal) else principal

    async def principal_of_token(self, token_id: str) -> Principal | None:
        """Return a token's owner, for a session begun with its secret. None if it is not valid."""
        token = await self.tokens.find(token_id)
        principal = self._use(token, token_id) if token is not None else None
        return None if principal is None or self._is_expired(principal) else principal

    def forget_token(self, token_id: str) -> None:
        """Make the next use of a revoked token query the database."""
        self.tokens.forget(token_id)

    def _is_expired(self, principal: Principal) -> bool:
        return principal.expires_at is not None and principal.expires_at <= self.clock()

    async def _of_bearer(self, credentials: str) -> Principal | None:
        token = TOKEN_FORM.fullmatch(credentials)
        if token is not None:
            known = await self.tokens.find(token["id"])
            principal = self._accept(known, token["id"], token["secret"])
        else:
            principal = await self._of_jwt(credentials, self.oidc) if self.oidc else None
        if principal is None and self.upstream is not None and _may_be_known(credentials):
            principal = await self.upstream.find(credentials)
        return principal

    def _accept(self, token: KnownToken | None, token_id: str, secret: str) -> Principal | None:
        """Return the owner of a token if the secret is right, and count the use."""
        if token is None:
            return None
        if not hmac.compare_digest(sha256_of_secret(secret), token.secret_sha256):
            return None
        return self._use(token, token_id)

    def _use(self, token: KnownToken, token_id: str) -> Principal | None:
        """Return the owner of a token if its issuer is trusted, and count the use."""
        issuer = token.principal.issuer
        if issuer is not None and (self.oidc is None or not self.oidc.trusts(issuer)):
            return None  # exchanged for a JWT of a provider that is no longer trusted
        if not self._is_expired(token.principal):
            self.accounting.count_token_use(token_id)
        return token.principal

    async def _of_jwt(self, token: str, oidc: OidcVerifier) -> Principal | None:
        name = _name_of(token)
        now = self.tokens.clock()
        verified = self._verified_now(name)
        if verified is not None:
            return verified
        self._verified.pop(name, None)
        principal = await oidc.verify(token)
        if principal is not None:
            assert principal.issuer is not None  # noqa: S101 - its provider vouches for it
            keys = oidc.fresh_keys(principal.issuer)
            self._verified[name] = _Verified(now, principal, keys)
            if len(self._verified) > _MAX_VERIFIED:
                self._verified.popitem(last=False)
        return principal

    def _verified_now(self, name: bytes) -> Principal | None:
        verified = self._verified.get(name)
        if verified is None:
            return None
        age = self.tokens.clock() - verified.at
        if age >= MAX_DECISION_AGE and not self._are_keys_fresh(verified):
            return None
        return verified.principal

    def _are_keys_fresh(self, verified: _Verified) -> bool:
        issuer = verified.principal.issuer
        if self.oidc is None or issuer is None or verified.keys is None:
            return False
        return self.oidc.fresh_keys(issuer) is verified.keys


def bearer_in(authorization: str) -> str | None:
    """Return the bearer token or JWT of an Authorization header, or None for other schemes."""
    scheme, _, credentials = authorization.partition(" ")
    return credentials.strip(" ") if scheme.lower() == "bearer" else None


def _may_be_known(credentials: str) -> bool:
    """Return whether another server may have issued a text: it is a token, or looks like a JWT."""
    return TOKEN_FORM.fullmatch(credentials) is not None or _JWT.fullmatch(credentials) is not None


def _name_of(jwt: str) -> bytes:
    return hashlib.sha256(jwt.encode()).digest()
