"""Lease: a time-limited right to compile one artifact.

Leases are advisory: they keep jobs from compiling the same graph at once, and correctness never
depends on them. An upload needs no lease. When a lease expires, the next waiter compiles.
"""

from datetime import datetime
from enum import StrEnum
from typing import Final

from pydantic import Field

from graphstash_schema.key import ArtifactKey
from graphstash_schema.model import Items, RequestModel, WireModel
from graphstash_schema.names import LINE
from graphstash_schema.protocol import (
    DEFAULT_LEASE_SECONDS,
    MAX_LEASE_SECONDS,
    MIN_LEASE_SECONDS,
)

__all__ = [
    "MAX_LISTED_LEASES",
    "HeldLease",
    "HeldLeases",
    "LeaseOutcome",
    "LeaseReply",
    "LeaseRequest",
    "LeaseState",
]

MAX_LISTED_LEASES: Final = 200


class LeaseState(StrEnum):
    """Result of requesting or renewing a lease."""

    GRANTED = "granted"
    """201, or 200 for a renewal: the caller compiles."""
    READY = "ready"
    """200: the artifact is stored. The caller fetches it."""
    HELD = "held"
    """202: another job compiles. The caller retries."""


class LeaseOutcome(StrEnum):
    """How the holder's compilation ended. The server ignores it, and looks for the artifact."""

    PUBLISHED = "published"
    FAILED = "failed"


class LeaseRequest(RequestModel):
    """Body of POST, which acquires a lease, and of PUT, which renews it."""

    holder: str = Field(
        default="",
        max_length=128,
        pattern=LINE,
        description="who asks, e.g. user@host:pid; shown to waiters",
    )
    ttl_seconds: float = Field(
        default=DEFAULT_LEASE_SECONDS,
        ge=MIN_LEASE_SECONDS,
        le=MAX_LEASE_SECONDS,
        description="how long the lease lives without a renewal",
    )


class LeaseReply(WireModel):
    """Response to POST and PUT of a lease."""

    state: LeaseState
    token: str | None = Field(
        default=None,
        max_length=256,
        pattern=r"^[\x21-\x7e]*$",
        description="granted: needed to renew and release it",
    )
    fencing: int | None = Field(
        default=None, description="granted: grows with every grant of this key"
    )
    ttl_seconds: float | None = Field(default=None, description="granted: renew within this time")
    holder: str | None = Field(default=None, description="held: who compiles")
    expires_in_seconds: float | None = Field(default=None, description="held: without a renewal")
    digest: str | None = Field(default=None, description="ready: `sha256:<hex>`")
    size_bytes: int | None = Field(default=None, description="ready: size of the blob")


class HeldLease(WireModel):
    """A running compilation."""

    key: ArtifactKey
    holder: str = Field(description="who compiles, as the client reports it")
    expires_at: datetime = Field(description="without a renewal")
    waiters: int = Field(ge=0, description="requests waiting in the process that answered")


class HeldLeases(WireModel):
    """Running compilations of a namespace, latest expiry first."""

    leases: Items[HeldLease] = ()
