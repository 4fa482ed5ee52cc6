"""Artifacts: metadata of one artifact, and look-ups of many.

The client wraps and compresses an artifact's bytes into a blob. The server treats the blob as
opaque.
"""

from datetime import datetime

from pydantic import Field

from graphstash_schema.key import ArtifactKey
from graphstash_schema.metadata import ArtifactMetadata
from graphstash_schema.model import Items, RequestModel, WireModel
from graphstash_schema.protocol import MAX_LOOKUP_KEYS

__all__ = ["ArtifactInfo", "LookupRequest", "LookupResponse", "VerifyResponse"]


class ArtifactInfo(WireModel):
    """What the server knows about a stored artifact."""

    key: ArtifactKey
    digest: str = Field(description="`sha256:<hex>` of the blob")
    size_bytes: int = Field(ge=0)
    compile_seconds: float | None = Field(
        default=None, ge=0, description="what making it took; earlier servers do not say"
    )
    metadata: ArtifactMetadata | None = None
    created_at: datetime | None = None


class LookupRequest(RequestModel):
    """Asks which of these artifacts exist."""

    keys: Items[ArtifactKey] = Field(min_length=1, max_length=MAX_LOOKUP_KEYS)


class LookupResponse(WireModel):
    """Result of a look-up.

    The server does not evict the found artifacts for `LOOKUP_PIN_SECONDS`, unless an upload needs
    their space.
    """

    found: Items[ArtifactInfo]
    missing: Items[ArtifactKey]
    withdrawn: Items[ArtifactInfo] = Field(
        default=(),
        description="those of `missing` that are withheld: no copy with this digest may be used. "
        "Earlier servers do not say",
    )
    newest_withdrawal: str | None = Field(
        default=None,
        description="end of the namespace's list of withdrawals, see `withdrawals`. Everything up "
        "to it shows in this answer. Earlier servers do not say",
    )


class VerifyResponse(WireModel):
    """Result of reading an artifact's blob again."""

    found: bool = Field(description="whether there was an artifact")
    healed: bool = Field(description="whether it was dropped, because its blob was lost or damaged")
