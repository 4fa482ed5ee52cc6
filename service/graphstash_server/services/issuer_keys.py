"""IssuerKeys: the public keys of an identity provider, fetched when they are needed.

They are fetched again after five minutes, and for a key id that nobody has heard of: providers
rotate keys. At most every fifteen seconds, whatever is asked for: tokens with made-up key ids do
not turn into requests to the provider. While the provider does not answer, its known keys go on to
count for an hour.
"""

import asyncio
import ipaddress
import json
import logging
import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from graphstash_schema import ErrorCode
from graphstash_server import __version__
from graphstash_server.errors import ServerError

__all__ = ["ALGORITHMS", "IssuerKeys"]

_LOGGER = logging.getLogger(__name__)

ALGORITHMS: Final = frozenset(
    ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
)
"""Signatures that only the owner of a private key can make. Never `none`, never HS256, whose secret
would be our copy of a public key."""

_FRESH_SECONDS = 300.0
_KEPT_SECONDS = 3600.0
_PAUSE_SECONDS = 15.0
"""Between two tries, whether they went well or not."""

_FETCH_SECONDS = 5.0
_MAX_BYTES = 1024**2
_MAX_KEYS = 100


class IssuerKeys:
    """Used from the event loop only."""

    def __init__(
        self, issuer: str, *, jwks_url: str | None, seconds: Callable[[], float] = time.monotonic
    ) -> None:
        """Fetches nothing yet.

        Args:
            issuer: the provider's address, as in the claim `iss`.
            jwks_url: where its keys are; by default its discovery document says so.
            seconds: a clock that never goes back.
        """
        self._issuer = issuer
        self._jwks_url = jwks_url
        self._seconds = seconds
        self._keys: dict[str | None, PyJWK] = {}
        self._read_at: float | None = None
        self._tried_at: float | None = None
        self._has_failed = False
        self._fetching = asyncio.Lock()

    async def find(self, key_id: str | None) -> PyJWK | None:
        """A key by its id; None when the provider has none of that id.

        Raises:
            ServerError: 503 when the provider does not answer and the key is not known.
        """
        is_being_tried = self._has_failed and self._fetching.locked()
        if not self._is_settled(key_id) and not (is_being_tried and self._is_known(key_id)):
            async with self._fetching:
                if not self._is_settled(key_id) and not self._is_younger(
                    self._tried_at, _PAUSE_SECONDS
                ):
                    await self._refresh()
        key = self._keys.get(key_id) if self._is_known(key_id) else None
        if key is None and self._has_failed:
            raise ServerError(
                ErrorCode.UNAVAILABLE,
                f"the identity provider {self._issuer} does not answer: its tokens cannot be "
                "checked now, ask again later",
                retry_after_seconds=_PAUSE_SECONDS,
            )
        return key

    def _is_known(self, key_id: str | None) -> bool:
        return key_id in self._keys and self._is_younger(self._read_at, _KEPT_SECONDS)

    def _is_settled(self, key_id: str | None) -> bool:
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
            _LOGGER.warning("the keys of %s were not fetched: %r", self._issuer, error)
            self._has_failed = True
        finally:
            self._tried_at = self._seconds()

    async def _fetch(self) -> dict[str | None, PyJWK]:
        headers = {"User-Agent": f"graphstash/{__version__}", "Accept": "application/json"}
        async with httpx.AsyncClient(timeout=_FETCH_SECONDS, headers=headers) as http:
            jwks_url = self._jwks_url or await self._discover(http)
            listed = (await _json(http, jwks_url)).get("keys")
        if not isinstance(listed, list):
            raise ValueError(f"{jwks_url} has no list of keys")  # noqa: TRY004 - of the provider
        keys: dict[str | None, PyJWK] = {}
        for described in listed[:_MAX_KEYS]:
            key = _usable(described)
            if key is not None:
                keys.setdefault(key.key_id, key)
        return keys

    async def _discover(self, http: httpx.AsyncClient) -> str:
        url = self._issuer.rstrip("/") + "/.well-known/openid-configuration"
        document = await _json(http, url)
        if document.get("issuer") != self._issuer:
            raise ValueError(f"{url} is about {document.get('issuer')!r}, not {self._issuer}")
        jwks_url = document.get("jwks_uri")
        if not isinstance(jwks_url, str):
            raise ValueError(f"{url} names no jwks_uri")  # noqa: TRY004 - of the provider
        return jwks_url


async def _json(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """A JSON object of bounded size.

    Raises:
        httpx.HTTPError: when it cannot be had.
        ValueError: when it is something else, too long, or would come without encryption.
    """
    if not _is_private(url):
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
        raise ValueError(f"{url} is no JSON object")  # noqa: TRY004 - of the provider
    return document


def _is_private(url: str) -> bool:
    """Whether nobody on the way can change what comes: https, or this host."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        return True
    host = parts.hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _usable(described: Any) -> PyJWK | None:
    """A key that signs in a way that is accepted; None for other ones."""
    if not isinstance(described, dict) or described.get("use", "sig") != "sig":
        return None
    if "d" in described:  # a private key that the whole world has
        return None
    key_id = described.get("kid")
    if key_id is not None and not isinstance(key_id, str):
        return None
    try:
        key = PyJWK.from_dict(described)
    except (PyJWTError, ValueError, TypeError, AttributeError):
        return None
    return key if key.algorithm_name in ALGORITHMS else None
