"""Access: who a caller is, and what a token allows.

A grant is a scope on the namespaces that a pattern matches. `admin` includes `write`, which
includes `read`. The grant `admin:*` also administers the server: tokens, policies and audit log.
"""

import re
from datetime import datetime
from enum import StrEnum
from typing import Final

from pydantic import AwareDatetime, Field

from graphstash_schema.errors import ErrorCode, InvalidValueError
from graphstash_schema.model import Items, RequestModel, WireModel
from graphstash_schema.names import LINE, Namespace, Word, star_matcher

__all__ = [
    "MAX_GRANTS",
    "MIN_EXCHANGED_SECONDS",
    "TOKEN_FORM",
    "Access",
    "AccessKind",
    "Grant",
    "NamespacePattern",
    "Scope",
    "TokenExchange",
    "TokenInfo",
    "TokenIssued",
    "TokenList",
    "TokenRequest",
]

MAX_GRANTS: Final = 64
"""Maximum grants of one token."""

TOKEN_FORM: Final = re.compile(r"gst_(?P<id>[a-z2-7]{16})_(?P<secret>[A-Za-z0-9_-]{43})")
"""A token: a prefix for secret scanners, an id that is not secret, and 256 random bits."""


MIN_EXCHANGED_SECONDS: Final = 60
"""Minimum lifetime in seconds of a token issued for a JWT."""


class Scope(StrEnum):
    """Allowed operations in a namespace. Each scope includes the scopes before it."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    def includes(self, other: "Scope") -> bool:
        """Return whether this scope is `other` or includes it."""
        return _RANK[self] >= _RANK[other]


_RANK: Final = {scope: rank for rank, scope in enumerate(Scope)}


class NamespacePattern(Word):
    """A namespace, or a pattern in which `*` stands for any characters: `team-*`, `*`."""

    __slots__ = ()
    form = re.compile(r"[a-z0-9*][a-z0-9._*-]{0,63}")
    what = "namespace pattern"
    code = ErrorCode.INVALID_PATTERN

    @property
    def is_exact(self) -> bool:
        """Whether the pattern names a single namespace, without `*`."""
        return "*" not in self

    def matches(self, namespace: str) -> bool:
        """Return whether the pattern matches the namespace."""
        return star_matcher(self).fullmatch(namespace) is not None


class Grant(RequestModel):
    """One scope on the namespaces that a pattern matches."""

    scope: Scope
    namespaces: NamespacePattern

    @classmethod
    def parse(cls, text: str) -> "Grant":
        """Parse `<scope>:<pattern>`, such as `write:team-*`.

        Raises:
            InvalidValueError: the text is malformed.
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

    @property
    def is_server_administration(self) -> bool:
        """Whether the grant is `admin:*`, which administers the server."""
        return self.scope is Scope.ADMIN and self.namespaces == "*"

    def allows(self, scope: Scope, namespace: str) -> bool:
        """Return whether the grant covers a scope in a namespace."""
        return self.scope.includes(scope) and self.namespaces.matches(namespace)

    def includes(self, other: "Grant") -> bool:
        """Return whether the other grant allows nothing beyond this grant, under any policy.

        Matching the same namespaces is not enough. In a trusted namespace, a write or admin grant
        counts only if it names the namespace without a star or is `admin:*`. `**` matches every
        namespace, but only `*` covers the server as a whole.
        """
        if self.is_server_administration:
            return True
        is_name = other.namespaces.is_exact and other.scope is not Scope.READ
        if is_name or other.namespaces == "*":
            return self.namespaces == other.namespaces and self.scope.includes(other.scope)
        # The other pattern is matched like a name: a star in it matches only a star in this one.
        return self.allows(other.scope, other.namespaces)


class TokenRequest(RequestModel):
    """Request for a new token."""

    description: str = Field(
        min_length=1,
        max_length=200,
        pattern=LINE,
        description="who or what it is for; without control characters",
    )
    grants: tuple[Grant, ...] = Field(min_length=1, max_length=MAX_GRANTS)
    expires_at: AwareDatetime | None = Field(default=None, description="none: never")


class TokenExchange(RequestModel):
    """Request to exchange the JWT of the request for a token with at most the same rights."""

    grants: tuple[Grant, ...] = Field(
        default=(), max_length=MAX_GRANTS, description="none: all that the JWT has"
    )
    lifetime_seconds: int | None = Field(
        default=None,
        ge=MIN_EXCHANGED_SECONDS,
        description="none: as long as the server allows",
    )


class TokenInfo(WireModel):
    """What the server stores about a token, without its secret."""

    id: str = Field(description="names the token; not a secret")
    description: str
    grants: tuple[Grant, ...]
    created_at: datetime
    created_by: str
    expires_at: datetime | None = None
    last_used_at: datetime | None = Field(default=None, description="lags by the flush interval")
    revoked_at: datetime | None = None
    issuer: str | None = Field(
        default=None,
        description="issuer of the JWT that it was exchanged for; none for other tokens",
    )


class TokenIssued(WireModel):
    """A new token. No other response contains the secret."""

    token: str = Field(description="give it to GRAPHSTASH_TOKEN; it is not shown again")
    info: TokenInfo


class TokenList(WireModel):
    """All tokens, newest first."""

    tokens: tuple[TokenInfo, ...]


class AccessKind(StrEnum):
    """How the server identifies a caller."""

    OPEN = "open"
    """The server has no authentication."""
    OWNER = "owner"
    """The user who runs the server, through a socket that no other user can reach."""
    ANONYMOUS = "anonymous"
    """The caller sent no token and may read public namespaces."""
    TOKEN = "token"  # noqa: S105 - a word
    OIDC = "oidc"


class Access(WireModel):
    """What the server knows about the caller: `GET /v1/-/access`."""

    kind: AccessKind
    name: str = Field(description="in the audit log: a token's id and description, or a subject")
    grants: Items[Grant]
    expires_at: datetime | None = None
    issuer: str | None = Field(
        default=None,
        description="identity provider of the JWT, or of the JWT that was exchanged for the token",
    )
    subject: str | None = Field(
        default=None, description="identity in the JWT that was exchanged for the token"
    )
    token: str | None = Field(default=None, description="id of the token, which is not secret")

    def allows(self, scope: Scope, namespace: Namespace) -> bool:
        """Return whether the caller's grants cover a scope in a namespace."""
        return any(grant.allows(scope, namespace) for grant in self.grants)
