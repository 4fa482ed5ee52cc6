"""Listing: a page of the artifacts of a namespace, as `GET /v1/{namespace}/artifacts` gives it."""

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
"""Most artifacts of a page."""

MAX_DETAILED_ARTIFACTS: Final = 3
"""Most artifacts of a page with details: all parts of one take up to 28 KiB, and a client reads at
most 100,000 values of any answer, which it counts by commas and brackets."""


class ListOrder(StrEnum):
    """What a page begins with."""

    FINGERPRINT = "fingerprint"
    """The least fingerprint. An artifact that is stored while somebody reads the pages is missed,
    or comes in its place."""
    NEWEST = "newest"
    """What was stored last."""


class ArtifactQuery(RequestModel):
    """Which artifacts, and which page of them."""

    order: ListOrder = Field(default=ListOrder.FINGERPRINT, description="what comes first")
    after: str = Field(
        default="", max_length=512, description="`next` of the page before; empty for the first"
    )
    limit: int = Field(
        default=100,
        ge=1,
        le=MAX_LISTED_ARTIFACTS,
        description=f"most artifacts; at most {MAX_DETAILED_ARTIFACTS} with details",
    )
    kind: ArtifactKind | None = Field(default=None, description="only of this kind")
    device_type: DeviceType | None = Field(default=None, description="only for this device type")
    fingerprint: str = Field(
        default="",
        pattern=r"^[0-9a-f]{0,64}$",
        description="only those whose fingerprint begins so",
    )
    label: str = Field(
        default="",
        max_length=MAX_LABEL_CHARACTERS,
        pattern=LINE,
        description="only those whose label has this text, in any case",
    )
    details: bool = Field(default=False, description="also tell all parts of each")


class ListedArtifact(WireModel):
    """What a server knows about an artifact."""

    key: ArtifactKey
    digest: str = Field(description="`sha256:<hex>` of the blob")
    size_bytes: Count = Field(description="of the blob, as uploaded (compressed)")
    created_at: AwareDatetime
    last_used_at: AwareDatetime = Field(description="lags by the accounting interval")
    hits: Count = Field(description="lag by the accounting interval")
    label: str = Field(default="", description="what its user calls it; shown, never trusted")
    metadata: ArtifactMetadata | None = Field(
        default=None, description="of the publisher; its parts only with details"
    )
    description: Description | None = Field(
        default=None, description="what it was made of; only with details"
    )


class ArtifactList(WireModel):
    """One page. It can be short, or even empty, although there are more: a server looks through a
    bounded number of artifacts for those that are wanted.
    """

    artifacts: Items[ListedArtifact]
    next: str | None = Field(default=None, description="where the next page begins; null: it ends")
