"""Listing: a page of a namespace's artifacts, from `GET /v1/{namespace}/artifacts`."""

from enum import StrEnum
from typing import Final

from pydantic import AwareDatetime, Field

from graphstash_schema.explanation import MAX_LABEL_CHARACTERS, Description
from graphstash_schema.key import ArtifactKey, ArtifactKind, DeviceType
from graphstash_schema.metadata import ArtifactMetadata
from graphstash_schema.model import Items, RequestModel, WireModel
from graphstash_schema.names import LINE
from graphstash_schema.stats import Count

__all__ = [
    "MAX_DETAILED_ARTIFACTS",
    "MAX_LISTED_ARTIFACTS",
    "ArtifactList",
    "ArtifactQuery",
    "ListOrder",
    "ListedArtifact",
]

MAX_LISTED_ARTIFACTS: Final = 500
"""Maximum number of artifacts on a page."""

MAX_DETAILED_ARTIFACTS: Final = 3
"""Maximum number of artifacts on a page with details. The parts of one artifact take up to 28 KiB,
and a client refuses a response with more than 100,000 values, counted by commas and brackets."""


class ListOrder(StrEnum):
    """Order of the artifacts in a listing."""

    FINGERPRINT = "fingerprint"
    """Smallest fingerprint first. If an artifact is stored while a caller reads the pages, it is in
    its place or missing."""
    NEWEST = "newest"
    """Newest first."""
    SIZE = "size"
    """Largest first."""


class ArtifactQuery(RequestModel):
    """Selects artifacts, their order and a page."""

    order: ListOrder = Field(default=ListOrder.FINGERPRINT, description="order of the artifacts")
    after: str = Field(
        default="", max_length=512, description="`next` of the page before; empty for the first"
    )
    limit: int = Field(
        default=100,
        ge=1,
        le=MAX_LISTED_ARTIFACTS,
        description=f"maximum number of artifacts; at most {MAX_DETAILED_ARTIFACTS} with details",
    )
    kind: ArtifactKind | None = Field(default=None, description="only of this kind")
    device_type: DeviceType | None = Field(default=None, description="only for this device type")
    fingerprint: str = Field(
        default="",
        pattern=r"^[0-9a-f]{0,64}$",
        description="only artifacts whose fingerprint begins with this",
    )
    label: str = Field(
        default="",
        max_length=MAX_LABEL_CHARACTERS,
        pattern=LINE,
        description="only artifacts whose label contains this text, ignoring case",
    )
    details: bool = Field(default=False, description="include all parts of each artifact")


class ListedArtifact(WireModel):
    """An artifact in a listing."""

    key: ArtifactKey
    digest: str = Field(description="`sha256:<hex>` of the blob")
    size_bytes: Count = Field(description="of the blob, as uploaded (compressed)")
    created_at: AwareDatetime
    last_used_at: AwareDatetime = Field(description="lags by the accounting interval")
    hits: Count = Field(
        description="number of reads; the newest are missing for an accounting interval"
    )
    label: str = Field(default="", description="name that its user gave it; shown, never trusted")
    metadata: ArtifactMetadata | None = Field(
        default=None,
        description="metadata as the publisher sent it; includes `parts` only with `details`",
    )
    description: Description | None = Field(
        default=None, description="inputs that the artifact was compiled from; only with `details`"
    )


class ArtifactList(WireModel):
    """One page of artifacts.

    A page can be short or even empty although more artifacts follow, because a server examines a
    bounded number of artifacts for each page.
    """

    artifacts: Items[ListedArtifact]
    next: str | None = Field(
        default=None, description="`after` of the next page; null on the last page"
    )
