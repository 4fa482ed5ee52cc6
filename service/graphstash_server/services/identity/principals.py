"""Principal: a caller and the rights in its grants."""

from typing import Final

from pydantic import field_validator

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


class Principal(Access):
    """A caller, whose rights depend on policies. Its name is safe for logs and terminals."""

    @field_validator("name")
    @classmethod
    def _make_safe(cls, name: str) -> str:
        printable = "".join(each if each.isprintable() else "?" for each in name)
        return printable[:MAX_ACTOR_CHARACTERS]

    @property
    def party(self) -> str:
        """Identity under which a caller is counted.

        All tokens that a subject exchanged its JWTs for are one party. Each token that an
        administrator created is a party.
        """
        return self.subject or self.name

    @property
    def is_administrator(self) -> bool:
        """Whether the caller administers the server: `admin` on the pattern `*`."""
        return any(grant.is_server_administration for grant in self.grants)

    @property
    def may_see_totals(self) -> bool:
        """Whether the caller may read every namespace: a grant on the pattern `*`."""
        return any(grant.namespaces == "*" for grant in self.grants)

    def may_read(self, namespace: Namespace, policy: NamespacePolicy) -> bool:
        """Return whether the caller may read a namespace. Its policy may allow anonymous reads."""
        return policy.anonymous_read or self.allows(Scope.READ, namespace)

    def may(self, scope: Scope, namespace: Namespace, policy: NamespacePolicy) -> bool:
        """Return whether the caller has `scope` in a namespace, given its policy.

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
    kind=AccessKind.OPEN,
    name="everybody",
    grants=(Grant(scope=Scope.ADMIN, namespaces=NamespacePattern("*")),),
)
"""Every caller of a server without authentication."""

OWNER: Final = Principal(kind=AccessKind.OWNER, name="owner", grants=OPEN_ACCESS.grants)
"""The user who runs the server. Only this user can reach the server's own socket."""

ANONYMOUS: Final = Principal(kind=AccessKind.ANONYMOUS, name="anonymous", grants=())
"""A caller without a token, on a server with authentication."""
