"""Statistics of a server. Totals are stored in the database after one accounting interval."""

from typing import Annotated, Final

from pydantic import Field

from graphstash_schema.model import Items, WireModel

__all__ = ["MAX_COUNT", "NamespaceStats", "ServerStats"]

MAX_COUNT: Final = 2**63 - 1

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A count within the range of the database's integers."""


class NamespaceStats(WireModel):
    """Statistics of one namespace."""

    namespace: str
    artifacts: Count = Field(description="stored now")
    size_bytes: Count = Field(description="stored now, as uploaded (compressed)")
    hits: Count = Field(description="artifacts served since the beginning")
    misses: Count = Field(description="GETs of absent artifacts since the beginning")
    served_bytes: Count = Field(description="blob bytes sent since the beginning")
    puts: Count = Field(description="artifacts stored since the beginning")
    conflicts: Count = Field(
        description="PUTs refused because other bytes were stored: compiler is not reproducible",
    )
    saved_seconds: float = Field(ge=0, description="compile seconds that hits avoided")
    evictions: Count = Field(default=0, description="artifacts evicted since the beginning")
    evicted_bytes: Count = Field(default=0, description="bytes evicted since the beginning")
    metadata_bytes: Count = Field(
        default=0, description="metadata of the stored artifacts, which counts against limits"
    )
    manifest_bytes: Count = Field(
        default=0, description="size of the stored manifests, which counts against limits"
    )
    withheld: Count = Field(
        default=0,
        description="artifacts that are stored but not served until an administrator decides",
    )

    @property
    def stored_bytes(self) -> int:
        """Bytes that count against limits."""
        return self.size_bytes + self.metadata_bytes + self.manifest_bytes


class ServerStats(WireModel):
    """Statistics of one server. The numbers from `leases_held` to `reads` are 0 or empty for
    callers without a grant on the pattern `*`.
    """

    version: str
    uptime_seconds: float = Field(ge=0)
    leases_held: Count = Field(description="unexpired leases in the database")
    waiters: Count = Field(description="requests that wait for a lease in this process")
    healed: Count = Field(
        description="artifacts that this process dropped because their blob was lost or damaged"
    )
    reported: Count = Field(
        default=0, description="reports of wrong artifacts that this process received"
    )
    refused: dict[str, int] = Field(
        default_factory=dict, description="requests that this process refused, by error code"
    )
    reads: dict[str, int] = Field(
        default_factory=dict,
        description="GETs and HEADs of artifacts that this process received: `fast`, or why the "
        "fast path could not answer them (`caller`, `headers`, `redirect`)",
    )
    store_limit_bytes: Count | None = Field(
        default=None,
        description="limit for all that is stored; null if there is none, or for callers without a "
        "grant on the pattern `*`",
    )
    namespaces: Items[NamespaceStats]
