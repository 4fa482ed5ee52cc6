"""Manifest: the artifacts that a job used, so that the next run can fetch them beforehand."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from graphstash_schema.key import ArtifactKey

__all__ = ["Manifest", "ManifestEntry", "ManifestUpdate"]


class ManifestEntry(BaseModel):
    """One artifact that a job used."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    key: ArtifactKey
    used_at: datetime = Field(description="the last run that used it, UTC")
    runs: int = Field(ge=1, description="how many runs used it")


class Manifest(BaseModel):
    """Most recently used first, at most `MAX_MANIFEST_ENTRIES`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    entries: tuple[ManifestEntry, ...]


class ManifestUpdate(BaseModel):
    """What one run used; merged into the manifest, never replacing it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[ArtifactKey, ...] = Field(description="1 to MAX_MANIFEST_ENTRIES keys")
