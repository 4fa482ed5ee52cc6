"""Access: who a caller is, and what a token lets its bearer do.

A grant is a scope on the namespaces that a pattern names. `admin` includes `write` includes `read`;
`admin` on the pattern `*` is the server's own administration (tokens, policies, audit log).
"""

import re
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Final

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from graphstash_schema.errors import ErrorCode, InvalidValueError
from graphstash_schema.names import LINE, Namespace, Word

__all__ = [
    "MAX_GRANTS",
    "TOKEN_FORM",
    "Access",
    "AccessKind",
    "Grant",
    "NamespacePattern",
    "Scope",
    "TokenInfo",
    "TokenIssued",
    "TokenList",
    "TokenRequest",
]

MAX_GRANTS: Final = 64
"""Most grants of one token."""

TOKEN_FORM: Final = re.compile(r"gst_(?P<id>[a-z2-7]{16})_(?P<secret>[A-Za-z0-9_-]{43})")
"""A token: a prefix that secret scanners find, an id that is no secret, and 256 random bits."""


class Scope(StrEnum):
    """What may be done in a namespace; each includes those before it."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    def includes(self, other: "Scope") -> bool:
        """Whether who has this one may do what `other` allows."""
        return _RANK[self] >= _RANK[other]


_RANK: Final = {scope: rank for rank, scope in enumerate(Scope)}


class NamespacePattern(Word):
    """A namespace, or several by `*`, which stands for any characters: `team-*`, `*`."""

    __slots__ = ()
    form = re.compile(r"[a-z0-9*][a-z0-9._*-]{0,63}")
    what = "namespace pattern"
    code = ErrorCode.INVALID_PATTERN

    @property
    def is_exact(self) -> bool:
        """Whether it names one namespace."""
        return "*" not in self

    def matches(self, namespace: str) -> bool:
        """Whether it names the namespace."""
        return _matcher(self).fullmatch(namespace) is not None


@lru_cache(maxsize=1024)
def _matcher(pattern: str) -> re.Pattern[str]:
    # Neighbouring stars mean the same as one. What stands between two stars is looked for once,
    # where it comes first: going back to later places finds nothing more, and takes for ever.
    first, *others = map(re.escape, re.split(r"\*+", pattern))
    if not others:
        return re.compile(first)
    *between, last = others
    return re.compile(first + "".join(f"(?>.*?{each})" for each in between) + ".*" + last)


class Grant(BaseModel):
    """One scope on the namespaces of one pattern."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scope: Scope
    namespaces: NamespacePattern

    @classmethod
    def parse(cls, text: str) -> "Grant":
        """Reads `<scope>:<pattern>`, e.g. `write:team-*`.

        Raises:
            InvalidValueError: when it is out of form.
        """
        scope, colon, pattern = text.partition(":")
        if not colon or scope not in set(Scope):
            raise InvalidValueError(
                code=ErrorCode.INVALID_PATTERN,
                what="grant",
                value=text,
                expected="read:<pattern>, write:<pattern> or admin:<pattern>",
            )
        return cls(scope=Scope(scope), namespaces=NamespacePattern(pattern))

    def __str__(self) -> str:
        return f"{self.scope}:{self.namespaces}"

    def allows(self, scope: Scope, namespace: str) -> bool:
        """Whether it lets its bearer do what `scope` allows, in a namespace."""
        return self.scope.includes(scope) and self.namespaces.matches(namespace)


class TokenRequest(BaseModel):
    """Asks for a new token."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    description: str = Field(
        min_length=1,
        max_length=200,
        pattern=LINE,
        description="who or what it is for; without control characters",
    )
    grants: tuple[Grant, ...] = Field(min_length=1, max_length=MAX_GRANTS)
    expires_at: AwareDatetime | None = Field(default=None, description="none: never")


class TokenInfo(BaseModel):
    """What the server knows about a token; the secret is not part of it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str = Field(description="names the token; not a secret")
    description: str
    grants: tuple[Grant, ...]
    created_at: datetime
    created_by: str
    expires_at: datetime | None = None
    last_used_at: datetime | None = Field(default=None, description="lags by the flush interval")
    revoked_at: datetime | None = None


class TokenIssued(BaseModel):
    """A new token: the only answer that ever holds the secret."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    token: str = Field(description="give it to GRAPHSTASH_TOKEN; it is not shown again")
    info: TokenInfo


class TokenList(BaseModel):
    """All tokens, newest first."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    tokens: tuple[TokenInfo, ...]


class AccessKind(StrEnum):
    """How the server knows a caller."""

    OPEN = "open"
    """It asks nobody who they are."""
    ANONYMOUS = "anonymous"
    """The caller showed nothing and reads what is open to everybody."""
    TOKEN = "token"  # noqa: S105 - a word
    OIDC = "oidc"


class Access(BaseModel):
    """Who the caller is to the server: `GET /v1/-/access`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: AccessKind
    name: str = Field(description="in the audit log: a token's id and description, or a subject")
    grants: tuple[Grant, ...]
    expires_at: datetime | None = None

    def allows(self, scope: Scope, namespace: Namespace) -> bool:
        """Whether the caller may do what `scope` allows, as far as grants decide."""
        return any(grant.allows(scope, namespace) for grant in self.grants)
