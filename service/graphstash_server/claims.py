"""TrustedIssuer: an identity provider whose JWTs are accepted. ClaimRule: grants for claims."""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import TypeAliasType

from graphstash_schema import MAX_GRANTS, Grant
from graphstash_schema.model import RequestModel
from graphstash_schema.names import star_matcher

__all__ = ["ClaimRule", "IssuerUrl", "KeysUrl", "TrustedIssuer"]

Patterns = TypeAliasType("Patterns", "dict[str, str | Patterns]")
"""Maps a claim to a pattern for its value, or an object to patterns for its members."""


IssuerUrl = Annotated[
    str,
    Field(
        pattern=r"^https://[^\s]+$|^http://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?(/[^\s]*)?$"
    ),
]
KeysUrl = Annotated[str, Field(pattern=r"^https?://[^\s]+$")]


def _grant(value: Any) -> Any:
    return Grant.parse(value) if isinstance(value, str) else value


class ClaimRule(RequestModel):
    """Gives grants to every token whose claims match.

    Attributes:
        claims: patterns, which must all match. `*` matches any characters of an ordinary name (see
            `_is_ordinary`). A list matches if one of its elements does. One pattern must contain
            more than `*`, because a public provider signs tokens for any user.
        grants: grants as `<scope>:<pattern>`.
    """

    claims: Patterns = Field(min_length=1)
    grants: tuple[Annotated[Grant, BeforeValidator(_grant)], ...] = Field(
        min_length=1, max_length=MAX_GRANTS
    )

    @model_validator(mode="after")
    def _require_claims(self) -> Self:
        if all(set(pattern) <= {"*"} for pattern in _leaves(self.claims)):
            raise ValueError("a rule needs a claim with a value: `*` alone matches every token")
        return self

    def fits(self, claims: Mapping[str, Any]) -> bool:
        """Return whether verified claims match the rule."""
        return _fit(self.claims, claims)


class TrustedIssuer(RequestModel):
    """An identity provider whose tokens (JWT) the server accepts.

    Attributes:
        name: name in the audit log, `oidc/<name>:<sub>`. At most one issuer may omit it.
        issuer: value of the claim `iss`.
        audience: value that the claim `aud` must equal or contain.
        jwks_url: URL of the public keys. Default: from the discovery document.
        ca_file: PEM file with the CAs of the provider, such as a Kubernetes cluster. Default: the
            public CAs.
        rules: grants for claims. The grants of all matching rules are combined.
    """

    name: str = Field("", pattern=r"^([a-z0-9][a-z0-9-]{0,31})?$")
    issuer: IssuerUrl
    audience: str = Field(min_length=1)
    jwks_url: KeysUrl | None = None
    ca_file: Path | None = None
    rules: tuple[ClaimRule, ...] = Field(min_length=1)


def _leaves(patterns: Patterns) -> Iterator[str]:
    for pattern in patterns.values():
        if isinstance(pattern, str):
            yield pattern
        else:
            yield from _leaves(pattern)


def _fit(patterns: Patterns, claims: Mapping[str, Any]) -> bool:
    for name, pattern in patterns.items():
        claim = claims.get(name)
        if isinstance(pattern, str):
            if not any(_matches(pattern, text) for text in _texts(claim)):
                return False
        elif not isinstance(claim, dict) or not _fit(pattern, claim):
            return False
    return True


def _matches(pattern: str, text: str) -> bool:
    if "*" not in pattern:
        return text == pattern
    return _is_ordinary(text) and star_matcher(pattern).fullmatch(text) is not None


_UNUSUAL: Final = re.compile(r"\.\.|(?:^|/)\.(?:/|$)|[\\%]")


def _is_ordinary(text: str) -> bool:
    """Return whether `*` may match a part of this text. False if a program could resolve it to
    another path, such as `team/x/../../other` in any encoding.
    """
    return (
        _UNUSUAL.search(text) is None
        and text.isprintable()
        and unicodedata.is_normalized("NFKC", text)
    )


def _texts(value: Any) -> list[str]:
    """Return texts, integers and booleans as texts, also from a list. Skip other values."""
    if isinstance(value, list):
        return [text for each in value if not isinstance(each, list) for text in _texts(each)]
    if isinstance(value, bool):
        return ["true" if value else "false"]
    if isinstance(value, str | int):
        return [str(value)]
    return []
