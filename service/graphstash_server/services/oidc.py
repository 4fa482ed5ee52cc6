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
            key_id = header.get("kid")
            if header.get("alg") is None or "crit" in header:
                return None
            key = await self._keys.find(key_id)
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
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, OSError) as error:
            _LOGGER.debug("a token of %s is refused: %s", self._issuer, type(error).__name__)
            return None
        except RecursionError:  # a header of nothing but brackets
            return None
        return Principal.of(
            kind=AccessKind.OIDC,
            name=f"oidc:{claims['sub']}",
            grants=self._grants(claims),
            expires_at=expires_at,
        )

    def _grants(self, claims: Mapping[str, Any]) -> Sequence[Any]:
        fitting = [rule for rule in self._rules if rule.fits(claims)]
        return list(dict.fromkeys(grant for rule in fitting for grant in rule.grants))
