"""Quarantine: a wrong artifact is withheld until an administrator releases or deletes it.

A report withholds an artifact if the server confirms it, a second writer repeats it, or it comes
from an administrator. Other reports change nothing.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from graphstash_schema.key import ArtifactKey
from graphstash_schema.model import RequestModel, WireModel
from graphstash_schema.names import Namespace

__all__ = ["ReportReason", "ReportRequest", "ReportResponse", "Withheld", "WithheldList"]


class ReportReason(StrEnum):
    """What is wrong with an artifact."""

    BAD_SIGNATURE = "bad_signature"
    """The signature does not match the artifact, its key or its namespace."""
    UNKNOWN_KEY = "unknown_key"
    """The client does not trust the signing key in this namespace."""
    REVOKED_KEY = "revoked_key"
    UNSIGNED = "unsigned"
    """The artifact is unsigned, and the client requires a signature."""
    WRONG_KEY = "wrong_key"
    """A valid artifact of another key."""
    CORRUPT = "corrupt"
    """The digest matches, but the envelope is invalid."""
    UNCONFIRMED = "unconfirmed"
    """The upstream of a region lacks the copy, and may have withdrawn it. Regions find this."""

    @property
    def is_about_artifact(self) -> bool:
        """Whether the reason holds for every client, whichever keys it trusts."""
        return self not in {
            ReportReason.UNKNOWN_KEY,
            ReportReason.UNSIGNED,
            ReportReason.UNCONFIRMED,
        }


class ReportRequest(RequestModel):
    """Reports an artifact as wrong."""

    key: ArtifactKey
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] = Field(
        description="of the wrong blob; without effect if another blob is stored under the key"
    )
    reason: ReportReason


class ReportResponse(WireModel):
    """Result of a report."""

    found: bool = Field(description="whether the reported blob was stored under the key")
    withheld: bool = Field(description="whether the artifact is withheld now")


class Withheld(WireModel):
    """A withheld artifact."""

    namespace: Namespace
    key: ArtifactKey
    digest: str = Field(description="`sha256:<hex>` of the blob")
    size_bytes: int = Field(ge=0)
    producer: str = Field(description="as its publisher reported")
    reason: ReportReason
    reported_by: str
    reported_at: datetime


class WithheldList(WireModel):
    """Up to 1,000 withheld artifacts, newest report first."""

    artifacts: tuple[Withheld, ...]
