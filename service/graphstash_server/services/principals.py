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

__all__ = ["ANONYMOUS", "EVERYBODY", "Principal"]


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a caller is.

    Attributes:
        kind: how the server knows them.
        name: in the audit log; printable, at most `MAX_ACTOR_CHARACTERS`.
        grants: what they may do where.
        expires_at: until when; None for ever.
    """

    kind: AccessKind
    name: str
    grants: tuple[Grant, ...]
    expires_at: datetime | None = None

    @classmethod
    def of(
        cls,
        *,
        kind: AccessKind,
        name: str,
        grants: Iterable[Grant],
        expires_at: datetime | None = None,
    ) -> Self:
        """A caller whose name comes from outside: it is made fit for logs and terminals."""
        printable = "".join(each if each.isprintable() else "?" for each in name)
        return cls(kind, printable[:MAX_ACTOR_CHARACTERS], tuple(grants), expires_at)

    @property
    def access(self) -> Access:
        """What the caller is told about themselves."""
        return Access(
            kind=self.kind, name=self.name, grants=self.grants, expires_at=self.expires_at
        )

    @property
    def is_administrator(self) -> bool:
        """Whether they administer the server: `admin` on the pattern `*`."""
        return any(grant.scope is Scope.ADMIN and grant.namespaces == "*" for grant in self.grants)

    def allows(self, scope: Scope, namespace: Namespace) -> bool:
        """Whether a grant lets them do what `scope` allows in a namespace."""
        return any(grant.allows(scope, namespace) for grant in self.grants)

    def may_read(self, namespace: Namespace, policy: NamespacePolicy) -> bool:
        """Whether they may read there: everybody may where the policy says so."""
        return policy.anonymous_read or self.allows(Scope.READ, namespace)

    def may_write(self, namespace: Namespace, policy: NamespacePolicy) -> bool:
        """Whether they may write there. A trusted namespace is written by those whose grant names
        it and by those who administer it: a token for many namespaces was not made for this one.
        """
        return any(
            grant.allows(Scope.WRITE, namespace)
            and (not policy.trusted or grant.namespaces.is_exact or grant.scope is Scope.ADMIN)
            for grant in self.grants
        )

    def may(self, scope: Scope, namespace: Namespace, policy: NamespacePolicy) -> bool:
        """Whether they may do what `scope` allows there."""
        if scope is Scope.READ:
            return self.may_read(namespace, policy)
        if scope is Scope.WRITE:
            return self.may_write(namespace, policy)
        return self.allows(scope, namespace)


EVERYBODY: Final = Principal(
    AccessKind.OPEN,
    "everybody",
    (Grant(scope=Scope.ADMIN, namespaces=NamespacePattern("*")),),
)
"""Whoever reaches a server that asks nobody who they are."""

ANONYMOUS: Final = Principal(AccessKind.ANONYMOUS, "anonymous", ())
"""Who showed nothing to a server that asks."""
