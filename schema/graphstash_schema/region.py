"""What a region asks its upstream for: who it is, and what changed in its namespaces.

A region is a server with an upstream. The upstream owns the namespaces: it grants leases, keeps the
first artifact of a key, and decides on withdrawals, policies and tokens.
"""

from typing import Any

from pydantic import Field

from graphstash_schema.model import WireModel
from graphstash_schema.names import LIST_START, ListPosition, Namespace
from graphstash_schema.policy import NamespacePolicy

__all__ = ["OwnedNamespace", "UpstreamState"]


class OwnedNamespace(WireModel):
    """A namespace as its owner reports it."""

    newest_withdrawal: ListPosition = Field(
        default=LIST_START, description="end of the namespace's list of withdrawals"
    )
    policy: dict[str, Any] | None = Field(
        default=None, description="fields of the policy; none: the defaults apply"
    )

    @property
    def known_policy(self) -> NamespacePolicy | None:
        """The policy, without fields of later releases."""
        if self.policy is None:
            return None
        fields = NamespacePolicy.model_fields
        return NamespacePolicy.model_validate(
            {name: value for name, value in self.policy.items() if name in fields}
        )


class UpstreamState(WireModel):
    """Answer to `GET /v1/-/upstream`."""

    server: str = Field(max_length=64, description="random identifier of the server's database")
    is_region: bool = Field(description="whether the server itself has an upstream")
    namespaces: dict[Namespace, OwnedNamespace] = Field(
        description="namespaces that the caller may read, with a withdrawal or a policy"
    )
