"""TrustedIssuer: an identity provider whose JWTs count, and ClaimRule: which claims of them give
which grants.
"""

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
"""Claim -> pattern of its value; of a claim that is an object, the patterns of its members."""


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
    """Gives grants to every token that has all of some claims.

    Attributes:
        claims: claim -> what its value must be; an object for a claim that is one. `*` stands for
            any characters of an ordinary name (see `_is_ordinary`). One value of a list is enough.
            Not empty: a public provider signs tokens for anyone.
        grants: as `<scope>:<pattern>`.
    """

    claims: Patterns = Field(min_length=1)
    grants: tuple[Annotated[Grant, BeforeValidator(_grant)], ...] = Field(
        min_length=1, max_length=MAX_GRANTS
    )

    @model_validator(mode="after")
    def _say_something(self) -> Self:
        if all(set(pattern) <= {"*"} for pattern in _leaves(self.claims)):
            raise ValueError("a rule needs a claim with a value: `*` alone matches every token")
        return self

    def fits(self, claims: Mapping[str, Any]) -> bool:
        """Whether verified claims are what the rule asks for."""
        return _fit(self.claims, claims)


class TrustedIssuer(RequestModel):
    """An identity provider whose tokens (JWT) are accepted.

    Attributes:
        name: for the audit log, `oidc/<name>:<sub>`; one issuer of a server needs none.
        issuer: as in the claim `iss`.
        audience: what the claim `aud` must be or contain.
        jwks_url: of the public keys; None for what the discovery document says.
        ca_file: PEM file with the CAs of the provider, such as a Kubernetes cluster; None for the
            public ones.
        rules: which claims give which grants; those of all that match are combined.
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
    """Whether a star may stand for parts of a text: not when somebody else who reads the same text
    as a path could mean another place, such as that of `team/x/../../other`, with whatever
    characters it is written. A provider's own names never look like that.
    """
    return (
        _UNUSUAL.search(text) is None
        and text.isprintable()
        and unicodedata.is_normalized("NFKC", text)
    )


def _texts(value: Any) -> list[str]:
    """The values of a claim as texts; an absent claim and an object have none."""
    if isinstance(value, list):
        return [text for each in value if not isinstance(each, list) for text in _texts(each)]
    if isinstance(value, bool):
        return ["true" if value else "false"]
    if isinstance(value, str | int):
        return [str(value)]
    return []
