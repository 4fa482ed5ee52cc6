"""Quarantine: artifacts that a client found wrong are withheld until an admin decides."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from graphstash_schema.key import ArtifactKey
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
        """Whether the artifact is wrong for everybody, whomever the reporter trusts."""
        return self not in {ReportReason.UNKNOWN_KEY, ReportReason.UNSIGNED}


class ReportRequest(BaseModel):
    """Says that an artifact is wrong."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: ArtifactKey
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] = Field(
        description="of the blob that was found wrong: a report of another one changes nothing"
    )
    reason: ReportReason


class ReportResponse(BaseModel):
    """What became of a report."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    found: bool = Field(description="whether that blob is stored under the key")
    withheld: bool = Field(description="whether the artifact is withheld now")


class Withheld(BaseModel):
    """An artifact that is withheld."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    namespace: Namespace
    key: ArtifactKey
    digest: str = Field(description="`sha256:<hex>` of the blob")
    size_bytes: int = Field(ge=0)
    producer: str = Field(description="as its publisher said")
    reason: ReportReason
    reported_by: str
    reported_at: datetime


class WithheldList(BaseModel):
    """All of them, newest first."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    artifacts: tuple[Withheld, ...]
