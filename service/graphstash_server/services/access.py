"""AccessService: who a caller is, from the Authorization header.

No token is ever kept: tokens are known by their id, which is no secret, and JWTs by their SHA-256.
What is known about one counts for two seconds (`MAX_DECISION_AGE`), so a revocation is seen within
them on every server; whether it has expired is looked at on every use.
"""

import hashlib
import hmac
from collections import OrderedDict
from datetime import datetime, timedelta
from typing import NamedTuple

from graphstash_schema import TOKEN_FORM, ErrorCode
from graphstash_server.clock import Clock
from graphstash_server.errors import ServerError
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.known_tokens import MAX_DECISION_AGE, KnownTokens
from graphstash_server.services.oidc import OidcVerifier
from graphstash_server.services.principals import ANONYMOUS, EVERYBODY, Principal
from graphstash_server.services.tokens import sha256_of_secret

__all__ = ["AccessService"]

_MAX_VERIFIED = 1024
"""JWTs that are remembered; a CI job has one."""


class _Verified(NamedTuple):
    """A JWT that was found good at a time."""

    at: datetime
    principal: Principal


class AccessService:
    """Used from the event loop only.

    Attributes:
        is_open: nobody is asked who they are.
    """

    def __init__(
        self,
        *,
        is_open: bool,
        tokens: KnownTokens,
        oidc: OidcVerifier | None,
        accounting: Accounting,
        clock: Clock,
    ) -> None:
        """Asks for nothing yet.

        Args:
            is_open: nobody is asked who they are.
            tokens: of this server.
            oidc: who verifies JWTs; None when none are taken.
            accounting: is told which tokens are used.
            clock: the time.
        """
        self.is_open = is_open
        self._tokens = tokens
        self._oidc = oidc
        self._accounting = accounting
        self._clock = clock
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()

    async def principal_of(self, authorization: str | None) -> Principal:
        """Who the caller is.

        Args:
            authorization: the header of that name; None when there is none.

        Raises:
            ServerError: 401 for whatever is not good now, one and the same; 503 when that cannot be
                found out.
        """
        if self.is_open:
            return EVERYBODY
        if authorization is None:
            return ANONYMOUS
        scheme, _, credentials = authorization.partition(" ")
        principal = None
        if scheme.lower() == "bearer":
            principal = await self._of_bearer(credentials.strip(" "))
        if principal is None or self._is_expired(principal):
            raise ServerError(
                ErrorCode.UNAUTHENTICATED,
                "what the request shows is malformed, unknown, expired or revoked: set "
                "GRAPHSTASH_TOKEN to a good token, an administrator of the server makes one",
            )
        return principal

    def forget_token(self, token_id: str) -> None:
        """A token was revoked: its next use asks the database."""
        self._tokens.forget(token_id)

    def _is_expired(self, principal: Principal) -> bool:
        return principal.expires_at is not None and principal.expires_at <= self._clock()

    async def _of_bearer(self, credentials: str) -> Principal | None:
        token = TOKEN_FORM.fullmatch(credentials)
        if token is not None:
            return await self._of_token(token["id"], token["secret"])
        return await self._of_jwt(credentials, self._oidc) if self._oidc is not None else None

    async def _of_token(self, token_id: str, secret: str) -> Principal | None:
        token = await self._tokens.find(token_id)
        if token is None:
            return None
        if not hmac.compare_digest(sha256_of_secret(secret), token.secret_sha256):
            return None
        if not self._is_expired(token.principal):
            self._accounting.count_token_use(token_id)
        return token.principal

    async def _of_jwt(self, token: str, oidc: OidcVerifier) -> Principal | None:
        name = hashlib.sha256(token.encode()).digest()
        now = self._clock()
        verified = self._verified.get(name)
        if verified is not None and timedelta(0) <= now - verified.at < MAX_DECISION_AGE:
            return verified.principal
        self._verified.pop(name, None)
        principal = await oidc.verify(token)
        if principal is not None:
            self._verified[name] = _Verified(now, principal)
            if len(self._verified) > _MAX_VERIFIED:
                self._verified.popitem(last=False)
        return principal
