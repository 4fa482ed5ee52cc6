"""Statistics of a server, from `GET /v1/stats`.

The database stores the totals, so they survive a restart. They lag by the accounting interval.
"""

from typing import Annotated, Final

from pydantic import Field

from graphstash_schema.model import Items, WireModel

__all__ = ["MAX_COUNT", "NamespaceStats", "ServerStats"]

MAX_COUNT: Final = 2**63 - 1

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A count up to the database's limit, which a client can print and calculate with."""


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
        description="PUTs refused because other bytes were there: a compiler that is not "
        "reproducible",
    )
    saved_seconds: float = Field(ge=0, description="compile seconds that hits avoided")
    evictions: Count = Field(default=0, description="artifacts evicted since the beginning")
    evicted_bytes: Count = Field(default=0, description="bytes evicted since the beginning")
    metadata_bytes: Count = Field(
        default=0, description="of the stored artifacts; limits count them, too"
    )
    manifest_bytes: Count = Field(
        default=0, description="of the stored manifests; limits count them, too"
    )
    withheld: Count = Field(
        default=0, description="artifacts that wait for an admin: stored, and not served"
    )


class ServerStats(WireModel):
    """Statistics of one server.

    The server-wide numbers, from `leases_held` to `reads`, are 0 or empty for callers who may not
    read every namespace (a grant on the pattern `*`).
    """

    version: str
    uptime_seconds: float = Field(ge=0)
    leases_held: Count = Field(description="unexpired leases in the database")
    waiters: Count = Field(description="requests of this process that wait for a lease")
    healed: Count = Field(
        description="rows of this process dropped because their blob was lost or damaged"
    )
    reported: Count = Field(
        default=0, description="reports of wrong artifacts that this process got"
    )
    refused: dict[str, int] = Field(
        default_factory=dict, description="requests that this process refused, by error code"
    )
    reads: dict[str, int] = Field(
        default_factory=dict,
        description="GETs and HEADs of artifacts that this process got, by the way they took: "
        "`fast`, or why they took the way of all other calls (`caller`, `headers`, `redirect`)",
    )
    namespaces: Items[NamespaceStats]
