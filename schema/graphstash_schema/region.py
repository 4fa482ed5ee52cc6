"""What a region asks its upstream for: who it is, and what changed in its namespaces.

A region is a server with an upstream. The upstream owns the namespaces: it grants leases, keeps the
first artifact of a key, and decides on withdrawals, policies and tokens.
"""

from typing import Any, Final

from pydantic import Field

from graphstash_schema.access import Grant
from graphstash_schema.model import WireModel
from graphstash_schema.names import LIST_START, ListPosition, Namespace
from graphstash_schema.policy import NamespacePolicy

__all__ = ["MAX_PUBLISHER_GRANTS", "OwnedNamespace", "Publisher", "UpstreamState"]

MAX_PUBLISHER_GRANTS: Final = 20
"""Maximum grants in a header."""


class Publisher(WireModel):
    """Who published an artifact in a region: `Graphstash-Publisher`, as JSON.

    The upstream stores the artifact only if both the region and the publisher may write. So a token
    that was revoked, or a namespace that became trusted, while the region was alone has its effect.
    """

    token: str | None = Field(
        default=None, max_length=64, description="id of the upstream's token, if there was one"
    )
    grants: tuple[Grant, ...] = Field(
        max_length=MAX_PUBLISHER_GRANTS, description="the publisher's grants on the namespace"
    )

    @property
    def header(self) -> str:
        """The value of the header."""
        return self.model_dump_json(exclude_none=True)


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
    is_complete: bool = Field(
        description="whether the caller may read every namespace with a withdrawal or a policy"
    )
    namespaces: dict[Namespace, OwnedNamespace] = Field(
        description="namespaces that the caller may read, with a withdrawal or a policy"
    )
