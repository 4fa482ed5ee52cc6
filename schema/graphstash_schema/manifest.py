"""Manifest: the artifacts that a job used, so that the next run can prefetch them."""

from datetime import datetime

from pydantic import Field

from graphstash_schema.key import ArtifactKey
from graphstash_schema.model import Items, RequestModel, WireModel
from graphstash_schema.protocol import MAX_MANIFEST_ENTRIES

__all__ = ["Manifest", "ManifestEntry", "ManifestUpdate"]


class ManifestEntry(WireModel):
    """One artifact that a job used."""

    key: ArtifactKey
    used_at: datetime = Field(description="when a run last used it, UTC")
    runs: int = Field(ge=1, description="how many runs used it")
    writer: int | None = Field(
        default=None,
        ge=0,
        description="number of the only caller who listed it, in this answer; none if several did. "
        "Only with `Graphstash-Writers: 1`",
    )


class Manifest(WireModel):
    """A job's artifacts, most recently used first, at most `MAX_MANIFEST_ENTRIES`."""

    name: str
    entries: Items[ManifestEntry]


class ManifestUpdate(RequestModel):
    """Artifacts that one run used. The server merges them into the manifest."""

    keys: Items[ArtifactKey] = Field(min_length=1, max_length=MAX_MANIFEST_ENTRIES)
