"""Quarantine: artifacts that a client found wrong are withheld until an admin decides."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from graphstash_schema.key import ArtifactKey
from graphstash_schema.model import RequestModel, WireModel
from graphstash_schema.names import Namespace

__all__ = ["ReportReason", "ReportRequest", "ReportResponse", "Withheld", "WithheldList"]


class ReportReason(StrEnum):
    """What a client found."""

    BAD_SIGNATURE = "bad_signature"
    """The signature does not fit the artifact, its key or its namespace."""
    UNKNOWN_KEY = "unknown_key"
    """Signed by a key that the client does not trust, or for another namespace."""
    REVOKED_KEY = "revoked_key"
    """Signed by a key that was revoked."""
    UNSIGNED = "unsigned"
    """Not signed where the client needs a signature."""
    WRONG_KEY = "wrong_key"
    """A sound artifact of another key."""
    CORRUPT = "corrupt"
    """The digest is right, the envelope is not."""

    @property
    def is_about_artifact(self) -> bool:
        """Whether the artifact is wrong for every client, whatever keys it trusts."""
        return self not in {ReportReason.UNKNOWN_KEY, ReportReason.UNSIGNED}


class ReportRequest(RequestModel):
    """Says that an artifact is wrong."""

    key: ArtifactKey
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] = Field(
        description="of the blob that was found wrong: a report of another one changes nothing"
    )
    reason: ReportReason


class ReportResponse(WireModel):
    """What became of a report."""

    found: bool = Field(description="whether that blob is stored under the key")
    withheld: bool = Field(description="whether the artifact is withheld now")


class Withheld(WireModel):
    """An artifact that is withheld."""

    namespace: Namespace
    key: ArtifactKey
    digest: str = Field(description="`sha256:<hex>` of the blob")
    size_bytes: int = Field(ge=0)
    producer: str = Field(description="as its publisher said")
    reason: ReportReason
    reported_by: str
    reported_at: datetime


class WithheldList(WireModel):
    """All of them, newest first."""

    artifacts: tuple[Withheld, ...]
