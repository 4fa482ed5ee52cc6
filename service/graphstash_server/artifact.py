"""Artifact: a stored artifact, declared once for queries, services, calls and pages.

To add a column, add it to the table, write a revision, and add a field here. The statements select
the fields, and templates access them by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import NamedTuple

from graphstash_schema import ArtifactMetadata, Digest, InvalidValueError
from graphstash_server.keys import StoredKey

__all__ = ["Artifact", "DescribedArtifact", "FoundArtifact"]


class Artifact(NamedTuple):
    """A stored artifact.

    Attributes:
        key: the whole key.
        digest: names the blob.
        metadata_header: the metadata as uploaded; empty if there is none.
        compile_seconds: time that a hit saves, as its publisher says.
        toolchain: the compiler and its version, as its publisher says.
        hits: number of hits; lags by the flush interval.
        created_at: when the artifact was stored.
        last_used_at: when the artifact was last used; lags by the flush interval.
        pinned_until: the artifact is not evicted before this time.
        withheld_at: the artifact has not been served since this time.
    """

    key: StoredKey
    digest: Digest
    metadata_header: str
    compile_seconds: float
    toolchain: str
    hits: int
    created_at: datetime
    last_used_at: datetime
    pinned_until: datetime | None = None
    withheld_at: datetime | None = None

    @property
    def metadata(self) -> ArtifactMetadata | None:
        """The metadata; None if there is none, or if a release with other rules stored it."""
        try:
            return (
                ArtifactMetadata.from_header(self.metadata_header) if self.metadata_header else None
            )
        except InvalidValueError:
            return None


class FoundArtifact(NamedTuple):
    """An artifact in the answer to a look-up. The words are as they are stored: a `Digest` would
    check each of a thousand again.
    """

    sha256: str
    size_bytes: int
    compile_seconds: float


@dataclass(frozen=True)
class DescribedArtifact:
    """An artifact with its publisher's description.

    Attributes:
        artifact: the artifact.
        label: the name that a user knows the program by; empty if there is no description.
        program: parts of the key that the program decides; None without a description, and in lists
            that do not show parts.
        environment: parts of the key that the environment decides; None likewise.
    """

    artifact: Artifact
    label: str = ""
    program: Mapping[str, str] | None = None
    environment: Mapping[str, str] | None = None

    @cached_property
    def metadata(self) -> ArtifactMetadata | None:
        """The metadata of the artifact, parsed once."""
        return self.artifact.metadata

    @property
    def producer(self) -> str:
        """The job or user that published the artifact, as it says."""
        return "" if self.metadata is None else self.metadata.producer

    @property
    def is_described(self) -> bool:
        """Whether a publisher has described the artifact."""
        return self.program is not None and self.environment is not None

    @property
    def shown_environment(self) -> Mapping[str, str]:
        """The environment, or the shortened parts in the metadata if there is no description."""
        if self.environment is not None:
            return self.environment
        return {} if self.metadata is None else self.metadata.parts

    @property
    def parts(self) -> dict[str, str]:
        """All parts that are known."""
        return {**self.shown_environment, **(self.program or {})}
