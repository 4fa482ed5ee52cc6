"""OidcVerifier: authenticates callers of an identity provider, such as the jobs of a CI system.

A job presents a JWT that its provider signed for this server. The issuer in the JWT selects the
provider, whose public keys (`IssuerKeys`) verify the JWT, and whose rules over claims grant rights.
A key of one provider never verifies a JWT of another. The key determines the algorithms, never the
JWT: the algorithm that the key names, or else those of its type.

Providers rotate keys. So the server fetches keys again after five minutes, and for an unknown key
ID. Fetches are at least fifteen seconds apart, so that JWTs with invented key IDs do not flood the
provider. If fetches fail, known keys stay valid for an hour.
"""

import asyncio
import hashlib
import ipaddress
import json
import logging
import re
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpx
import jwt
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from graphstash_schema import AccessKind, ErrorCode, Grant
from graphstash_server import __version__
from graphstash_server.actor import MAX_ACTOR_CHARACTERS
from graphstash_server.claims import TrustedIssuer
from graphstash_server.errors import ServerError
from graphstash_server.services.identity.principals import Principal

__all__ = ["ALGORITHMS", "IssuerKeys", "OidcVerifier", "VerifyingKey"]

_LOGGER = logging.getLogger(__name__)

ALGORITHMS: Final = frozenset(
    ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
)
"""Signatures that need the private key. `none` needs no key, and HS256 would need only our copy of
the public key."""

_RSA_ALGORITHMS: Final = frozenset(each for each in ALGORITHMS if each[:2] in ("RS", "PS"))


class VerifyingKey(NamedTuple):
    """A public key of a provider, and the names of the algorithms that it verifies."""

    key: Any
    algorithms: frozenset[str]


_FRESH_SECONDS = 300.0
_KEPT_SECONDS = 3600.0
_PAUSE_SECONDS = 15.0
"""Minimum seconds between two fetches."""

_FETCH_SECONDS = 5.0
_MAX_BYTES = 1024**2
_MAX_KEYS = 100


class IssuerKeys:
    """The public keys of an identity provider, fetched on demand."""

    def __init__(
        self,
        issuer: str,
        *,
        jwks_url: str | None,
        ca_file: Path | None = None,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Fetch nothing yet. Default of `jwks_url`: from the issuer's discovery document."""
        self._issuer = issuer
        self._jwks_url = jwks_url
        self._ca_file = ca_file
        self._seconds = seconds
        self._keys: dict[str | None, VerifyingKey] = {}
        self._read_at: float | None = None
        self._tried_at: float | None = None
        self._has_failed = False
        self._fetching = asyncio.Lock()

    async def find(self, key_id: str | None) -> VerifyingKey | None:
        """Return a key by its id, or None if the provider has no such key.

        Raises:
            ServerError: 503 if the last fetch failed and no valid key with this ID is in memory.
        """
        # A caller with a known key does not wait for a fetch that will probably fail again.
        is_retrying = self._has_failed and self._fetching.locked()
        if not self._is_fresh(key_id) and not (is_retrying and self._is_known(key_id)):
            async with self._fetching:
                if not self._is_fresh(key_id) and not self._is_younger(
                    self._tried_at, _PAUSE_SECONDS
                ):
                    await self._refresh()
        key = self._keys.get(key_id) if self._is_known(key_id) else None
        if key is None and self._has_failed:
            raise ServerError(
                ErrorCode.UNAVAILABLE,
                f"the identity provider {self._issuer} does not answer, so its tokens cannot be "
                "verified now; retry later",
                retry_after_seconds=_PAUSE_SECONDS,
            )
        return key

    @property
    def fresh(self) -> Mapping[str | None, VerifyingKey] | None:
        """The keys of the last fetch, or None if they have to be fetched again."""
        return self._keys if self._is_younger(self._read_at, _FRESH_SECONDS) else None

    def _is_known(self, key_id: str | None) -> bool:
        return key_id in self._keys and self._is_younger(self._read_at, _KEPT_SECONDS)

    def _is_fresh(self, key_id: str | None) -> bool:
        return key_id in self._keys and self._is_younger(self._read_at, _FRESH_SECONDS)

    def _is_younger(self, at: float | None, seconds: float) -> bool:
        return at is not None and self._seconds() - at < seconds

    async def _refresh(self) -> None:
        asked_at = self._seconds()
        try:
            async with asyncio.timeout(_FETCH_SECONDS):
                self._keys = await self._fetch()
            self._read_at = asked_at
            self._has_failed = False
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError, ValueError) as error:
            _LOGGER.warning("could not fetch the keys of %s: %r", self._issuer, error)
            self._has_failed = True
        finally:
            self._tried_at = self._seconds()

    async def _fetch(self) -> dict[str | None, VerifyingKey]:
        headers = {"User-Agent": f"graphstash/{__version__}", "Accept": "application/json"}
        async with httpx.AsyncClient(
            timeout=_FETCH_SECONDS, headers=headers, verify=_tls(self._ca_file)
        ) as http:
            jwks_url = self._jwks_url or await self._discover(http)
            entries = (await _json(http, jwks_url)).get("keys")
        if not isinstance(entries, list):
            raise ValueError(f"{jwks_url} has no list of keys")  # noqa: TRY004 - provider's data
        keys: dict[str | None, VerifyingKey] = {}
        for jwk in entries[:_MAX_KEYS]:
            key = _usable(jwk)
            if key is not None:
                keys.setdefault(jwk.get("kid"), key)
        return keys

    async def _discover(self, http: httpx.AsyncClient) -> str:
        url = self._issuer.rstrip("/") + "/.well-known/openid-configuration"
        document = await _json(http, url)
        if document.get("issuer") != self._issuer:
            raise ValueError(f"{url} is about {document.get('issuer')!r}, not {self._issuer}")
        jwks_url = document.get("jwks_uri")
        if not isinstance(jwks_url, str):
            raise ValueError(f"{url} names no jwks_uri")  # noqa: TRY004 - provider's data
        return jwks_url


def _tls(ca_file: Path | None) -> ssl.SSLContext | bool:
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # its text does not name the file
        raise ValueError(f"the CAs in {ca_file} cannot be used: {error}") from None


async def _json(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """Fetch a JSON object of bounded size.

    Raises:
        httpx.HTTPError: the fetch fails.
        ValueError: the URL is not https, or the response is too long or not a JSON object.
    """
    if not _is_protected(url):
        raise ValueError(f"{url}: keys are fetched by https only")
    raw = bytearray()
    async with http.stream("GET", url) as answer:
        answer.raise_for_status()
        async for chunk in answer.aiter_bytes():
            raw += chunk
            if len(raw) > _MAX_BYTES:
                raise ValueError(f"{url} has more than {_MAX_BYTES} bytes")
    try:
        document = json.loads(bytes(raw))
    except RecursionError:
        raise ValueError(f"{url} is nested too deep") from None
    if not isinstance(document, dict):
        raise ValueError(f"{url} is not a JSON object")  # noqa: TRY004 - provider's data
    return document


def _is_protected(url: str) -> bool:
    """Return whether no third party can change the response: https, or a server on this host."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        return True
    host = parts.hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _usable(jwk: Any) -> VerifyingKey | None:
    """Parse a JWK. Return None if it is invalid, or not for signatures of `ALGORITHMS`."""
    if not isinstance(jwk, dict) or jwk.get("use", "sig") != "sig":
        return None
    if "d" in jwk:  # a private key, with which now anyone can sign
        return None
    key_id = jwk.get("kid")
    if key_id is not None and not isinstance(key_id, str):
        return None
    try:
        key = PyJWK.from_dict(jwk)
    except (PyJWTError, ValueError, TypeError, AttributeError):
        return None
    algorithms = frozenset((key.algorithm_name,))
    if jwk.get("alg") is None and key.key_type == "RSA":  # an RSA key signs with any of these
        algorithms = _RSA_ALGORITHMS
    return VerifyingKey(key.key, algorithms) if algorithms <= ALGORITHMS else None


_LEEWAY: Final = timedelta(seconds=30)
"""Maximum difference between the provider's clock and ours."""

_MAX_CHARACTERS = 16 * 1024
"""Maximum length of a JWT. CI systems issue about 2,000 characters."""

_ALGORITHM_NAME: Final = re.compile(r"[A-Za-z0-9-]{1,16}")

_REQUIRED: Final = ["iss", "aud", "sub", "iat", "exp"]


_INVALID: Final = (
    *(jwt.PyJWTError, LookupError, ValueError, TypeError),
    *(OverflowError, OSError, RecursionError),
)
"""Errors of a JWT that is malformed or not valid. Thousands of brackets cause a RecursionError."""


def _check_algorithm(algorithm: str, key: VerifyingKey) -> None:
    """Raise 401 if the key does not verify the algorithm."""
    if algorithm in key.algorithms:
        return
    named = algorithm if _ALGORITHM_NAME.fullmatch(algorithm) else "an unknown algorithm"
    raise ServerError(
        ErrorCode.UNAUTHENTICATED,
        f"the JWT is signed with {named}, but its key verifies only "
        f"{', '.join(sorted(key.algorithms))}: let the provider sign with one of these",
    )


class OidcVerifier:
    """Verify JWTs of trusted issuers. The grants of all matching rules of an issuer add up."""

    def __init__(
        self, issuers: Iterable[TrustedIssuer], *, seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._issuers = {each.issuer: each for each in issuers}
        self._keys = {
            each.issuer: IssuerKeys(
                each.issuer, jwks_url=each.jwks_url, ca_file=each.ca_file, seconds=seconds
            )
            for each in self._issuers.values()
        }

    def trusts(self, issuer: str) -> bool:
        """Return whether this server accepts JWTs of an issuer."""
        return issuer in self._issuers

    def fresh_keys(self, issuer: str) -> object | None:
        """Return the keys of an issuer, which are another object after each fetch. None if they
        have to be fetched again.
        """
        return self._keys[issuer].fresh

    async def verify(self, token: str) -> Principal | None:
        """Return the caller that a JWT names, or None if the JWT is not valid or grants nothing.

        Raises:
            ServerError: 401 if the key does not verify the algorithm of the JWT, 503 as from
                `IssuerKeys.find`.
        """
        if len(token) > _MAX_CHARACTERS or not token.isascii():
            return None
        try:
            unverified = jwt.decode_complete(token, options={"verify_signature": False})
            header, issuer = unverified["header"], self._issuers.get(unverified["payload"]["iss"])
            algorithm = header.get("alg")
            if issuer is None or not isinstance(algorithm, str) or "crit" in header:
                return None
            key = await self._keys[issuer.issuer].find(header.get("kid"))
            if key is None:
                return None
            _check_algorithm(algorithm, key)
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=issuer.audience,
                issuer=issuer.issuer,
                leeway=_LEEWAY,
                options={"require": _REQUIRED, "enforce_minimum_key_length": True},
            )
            expires_at = datetime.fromtimestamp(int(claims["exp"]), UTC) + _LEEWAY
        except _INVALID as error:
            _LOGGER.debug("refused a JWT: %s", type(error).__name__)
            return None
        grants = _grants(issuer, claims)
        # The provider also signs for other users, and any of them can request our audience.
        if not grants:
            _LOGGER.debug("no rule matches a token of %s", issuer.issuer)
            return None
        return Principal(
            kind=AccessKind.OIDC,
            name=_name_of(issuer, claims["sub"]),
            grants=grants,
            expires_at=expires_at,
            issuer=issuer.issuer,
        )


_SUFFIX = re.compile("~[0-9a-f]{16}")


def _name_of(issuer: TrustedIssuer, subject: str) -> str:
    """Return a name for the audit log that no other subject has.

    Ends with a digest if the plain name is not printable, is too long, or ends like such a name.
    """
    name = f"oidc{'/' if issuer.name else ''}{issuer.name}:{subject}"
    end = name[-17:]
    if len(name) <= MAX_ACTOR_CHARACTERS and name.isprintable() and not _SUFFIX.fullmatch(end):
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{name[: MAX_ACTOR_CHARACTERS - len(end)]}~{digest[:16]}"


def _grants(issuer: TrustedIssuer, claims: Mapping[str, Any]) -> tuple[Grant, ...]:
    matching = [rule for rule in issuer.rules if rule.fits(claims)]
    return tuple(dict.fromkeys(grant for rule in matching for grant in rule.grants))
