"""Principal: a caller and the rights in its grants."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Self

from graphstash_schema import (
    Access,
    AccessKind,
    Grant,
    Namespace,
    NamespacePattern,
    NamespacePolicy,
    Scope,
)
from graphstash_server.actor import MAX_ACTOR_CHARACTERS

__all__ = ["ANONYMOUS", "OPEN_ACCESS", "OWNER", "Principal"]


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller.

    Attributes:
        name: name in the audit log: printable, at most `MAX_ACTOR_CHARACTERS`.
        issuer: identity provider that vouches for the caller, or None.
        subject: identity in the JWT that was exchanged for this token. Empty without an exchange.
        token: id of the caller's token. None for other callers.
    """

    kind: AccessKind
    name: str
    grants: tuple[Grant, ...]
    expires_at: datetime | None = None
    issuer: str | None = None
    subject: str = ""
    token: str | None = None

    @classmethod
    def of(
        cls,
        *,
        kind: AccessKind,
        name: str,
        grants: Iterable[Grant],
        expires_at: datetime | None = None,
        issuer: str | None = None,
        subject: str = "",
        token: str | None = None,
    ) -> Self:
        """Return a caller with a name from outside, made safe for logs and terminals."""
        printable = "".join(each if each.isprintable() else "?" for each in name)
        short = printable[:MAX_ACTOR_CHARACTERS]
        return cls(kind, short, tuple(grants), expires_at, issuer, subject, token)

    @property
    def party(self) -> str:
        """Identity under which a caller is counted.

        All tokens that a subject exchanged its JWTs for are one party. Each token that an
        administrator created is a party.
        """
        return self.subject or self.name

    @property
    def access(self) -> Access:
        """The caller's rights, as the server reports them to the caller."""
        return Access(
            kind=self.kind,
            name=self.name,
            grants=self.grants,
            expires_at=self.expires_at,
            issuer=self.issuer,
            subject=self.subject or None,
            token=self.token,
        )

    @property
    def is_administrator(self) -> bool:
        """Whether the caller administers the server: `admin` on the pattern `*`."""
        return any(grant.is_server_administration for grant in self.grants)

    @property
    def may_see_totals(self) -> bool:
        """Whether the caller may read every namespace: a grant on the pattern `*`."""
        return any(grant.namespaces == "*" for grant in self.grants)

    def allows(self, scope: Scope, namespace: Namespace) -> bool:
        """Whether a grant allows `scope` in a namespace."""
        return any(grant.allows(scope, namespace) for grant in self.grants)

    def may_read(self, namespace: Namespace, policy: NamespacePolicy) -> bool:
        """Whether the caller may read a namespace. Its policy may allow anonymous reads."""
        return policy.anonymous_read or self.allows(Scope.READ, namespace)

    def may(self, scope: Scope, namespace: Namespace, policy: NamespacePolicy) -> bool:
        """Whether the caller has `scope` in a namespace, given its policy.

        In a trusted namespace, any scope but `read` requires a grant that names the namespace
        exactly, or the administrator of the server.
        """
        if scope is Scope.READ:
            return self.may_read(namespace, policy)
        return any(
            grant.allows(scope, namespace)
            and (not policy.trusted or grant.namespaces.is_exact or grant.is_server_administration)
            for grant in self.grants
        )


OPEN_ACCESS: Final = Principal(
    AccessKind.OPEN,
    "everybody",
    (Grant(scope=Scope.ADMIN, namespaces=NamespacePattern("*")),),
)
"""Every caller of a server without authentication."""

OWNER: Final = Principal(AccessKind.OWNER, "owner", OPEN_ACCESS.grants)
"""The user who runs the server. Only this user can reach the server's own socket."""

ANONYMOUS: Final = Principal(AccessKind.ANONYMOUS, "anonymous", ())
"""A caller without a token, on a server with authentication."""
