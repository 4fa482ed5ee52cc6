"""OidcVerifier: callers that an identity provider vouches for, such as the jobs of a CI system.

A job shows a JWT that its provider signed for this server. The provider's public keys say whether
it did, and rules over the claims say what the job may do. The key decides about the algorithm,
never the token.
"""

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import jwt

from graphstash_schema import AccessKind
from graphstash_server.claims import ClaimRule
from graphstash_server.services.issuer_keys import IssuerKeys
from graphstash_server.services.principals import Principal

__all__ = ["OidcVerifier"]

_LOGGER = logging.getLogger(__name__)

_LEEWAY: Final = timedelta(seconds=30)
"""By which the provider's clock may differ from ours."""

_MAX_CHARACTERS = 16 * 1024
"""Longest JWT that is read; those of CI systems have about 2,000."""

_REQUIRED: Final = ["iss", "aud", "sub", "iat", "exp"]


_BAD: Final = (jwt.PyJWTError, ValueError, TypeError, OverflowError, OSError, RecursionError)
"""What a token raises that is none; nothing but brackets is a RecursionError."""


class OidcVerifier:
    """Used from the event loop only."""

    def __init__(
        self, *, issuer: str, audience: str, keys: IssuerKeys, rules: Sequence[ClaimRule]
    ) -> None:
        """Asks for nothing yet.

        Args:
            issuer: what the claim `iss` must be.
            audience: what the claim `aud` must be, or have in it.
            keys: of the issuer.
            rules: all that fit add up.
        """
        self._issuer = issuer
        self._audience = audience
        self._keys = keys
        self._rules = tuple(rules)

    async def verify(self, token: str) -> Principal | None:
        """Whom a JWT tells of; None when it is not good for this server now.

        Raises:
            ServerError: 503 when the provider does not answer and the key is not known.
        """
        if len(token) > _MAX_CHARACTERS or not token.isascii():
            return None
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") is None or "crit" in header:
                return None
            key = await self._keys.find(header.get("kid"))
            if key is None:
                return None
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY,
                options={"require": _REQUIRED, "enforce_minimum_key_length": True},
            )
            expires_at = datetime.fromtimestamp(int(claims["exp"]), UTC) + _LEEWAY
        except _BAD as error:
            _LOGGER.debug("a token of %s is refused: %s", self._issuer, type(error).__name__)
            return None
        grants = self._grants(claims)
        if not grants:  # the provider signs for others, too, and anybody may name our audience
            _LOGGER.debug("no rule fits a token of %s", self._issuer)
            return None
        return Principal.of(
            kind=AccessKind.OIDC,
            name=f"oidc:{claims['sub']}",
            grants=grants,
            expires_at=expires_at,
        )

    def _grants(self, claims: Mapping[str, Any]) -> Sequence[Any]:
        fitting = [rule for rule in self._rules if rule.fits(claims)]
        return list(dict.fromkeys(grant for rule in fitting for grant in rule.grants))
