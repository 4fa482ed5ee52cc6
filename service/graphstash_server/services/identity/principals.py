"""Principal: a caller, and what the grants let them do."""

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
    """A caller. The name is for the audit log: printable, at most `MAX_ACTOR_CHARACTERS`. `issuer`
    is the identity provider that vouches for them; None for those that an administrator made.
    `subject` is for whom it did, by the name of a caller with the JWT; empty without an exchange.
    """

    kind: AccessKind
    name: str
    grants: tuple[Grant, ...]
    expires_at: datetime | None = None
    issuer: str | None = None
    subject: str = ""

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
    ) -> Self:
        """A caller whose name comes from outside: it is made fit for logs and terminals."""
        printable = "".join(each if each.isprintable() else "?" for each in name)
        short = printable[:MAX_ACTOR_CHARACTERS]
        return cls(kind, short, tuple(grants), expires_at, issuer, subject)

    @property
    def party(self) -> str:
        """Who counts as one where callers are counted. A subject gets many tokens for its
        JWTs, so all of them are one; each token that an administrator made is one.
        """
        return self.subject or self.name

    @property
    def access(self) -> Access:
        """What the server tells the caller about themselves."""
        return Access(
            kind=self.kind,
            name=self.name,
            grants=self.grants,
            expires_at=self.expires_at,
            issuer=self.issuer,
        )

    @property
    def is_administrator(self) -> bool:
        """Whether they administer the server: `admin` on the pattern `*`."""
        return any(grant.is_server_administration for grant in self.grants)

    @property
    def may_see_totals(self) -> bool:
        """Whether they may read every namespace: a grant on the pattern `*`."""
        return any(grant.namespaces == "*" for grant in self.grants)

    def allows(self, scope: Scope, namespace: Namespace) -> bool:
        """Whether a grant lets them do what `scope` allows in a namespace."""
        return any(grant.allows(scope, namespace) for grant in self.grants)

    def may_read(self, namespace: Namespace, policy: NamespacePolicy) -> bool:
        """Whether they may read there; a policy can allow that to everybody."""
        return policy.anonymous_read or self.allows(Scope.READ, namespace)

    def may(self, scope: Scope, namespace: Namespace, policy: NamespacePolicy) -> bool:
        """Whether they may do what `scope` allows there.

        In a trusted namespace, all but reading takes a grant that names it, or the server's
        administrator: a token for many namespaces was not made for this one.
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
"""The user who runs the server, by the socket that nobody else can reach."""

ANONYMOUS: Final = Principal(AccessKind.ANONYMOUS, "anonymous", ())
"""A caller without a token, on a server with authentication."""
