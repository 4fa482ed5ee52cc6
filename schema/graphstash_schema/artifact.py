"""Metadata of one artifact, and look-ups of many.

A blob is an artifact's payload that the client has compressed and wrapped (`envelope`). The server
never unpacks it.
"""

from datetime import datetime

from pydantic import Field

from graphstash_schema.key import ArtifactKey
from graphstash_schema.metadata import ArtifactMetadata
from graphstash_schema.model import Items, RequestModel, WireModel
from graphstash_schema.protocol import MAX_LOOKUP_KEYS

__all__ = ["ArtifactInfo", "LookupRequest", "LookupResponse", "VerifyResponse"]


class ArtifactInfo(WireModel):
    """A stored artifact, without its blob."""

    key: ArtifactKey
    digest: str = Field(description="`sha256:<hex>` of the blob")
    size_bytes: int = Field(ge=0)
    compile_seconds: float | None = Field(
        default=None, ge=0, description="as its publisher measured; earlier servers omit it"
    )
    metadata: ArtifactMetadata | None = None
    created_at: datetime | None = None


class LookupRequest(RequestModel):
    """Requests which of these artifacts exist."""

    keys: Items[ArtifactKey] = Field(min_length=1, max_length=MAX_LOOKUP_KEYS)


class LookupResponse(WireModel):
    """Result of a look-up.

    The server protects found artifacts from eviction for `LOOKUP_PIN_SECONDS`, up to a limit per
    caller and per namespace, unless an upload needs their space.
    """

    found: Items[ArtifactInfo]
    missing: Items[ArtifactKey]
    withdrawn: Items[ArtifactInfo] = Field(
        default=(),
        description="the withheld ones of `missing`: no copy with this digest may be used. "
        "Earlier servers omit it",
    )
    newest_withdrawal: str | None = Field(
        default=None,
        description="position of the last entry in the namespace's list of withdrawals. This "
        "answer reflects all entries. Earlier servers omit it",
    )


class VerifyResponse(WireModel):
    """Result of reading an artifact's blob again."""

    found: bool = Field(description="whether the artifact existed")
    healed: bool = Field(description="whether it was dropped, because its blob was lost or damaged")
