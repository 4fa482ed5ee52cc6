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
        key: complete key.
        digest: digest of the blob.
        metadata_header: metadata as uploaded, or empty.
        compile_seconds: seconds that a hit saves, as reported by the publisher.
        toolchain: compiler and version, as reported by the publisher.
        hits: number of hits. Lags by the flush interval.
        created_at: when the artifact was stored.
        last_used_at: when the artifact was last used. Lags by the flush interval.
        pinned_until: time before which the artifact is not evicted.
        withheld_at: time since which the artifact is not served.
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
        """Parsed metadata. None if there is none, or if a release with other rules stored it."""
        try:
            return (
                ArtifactMetadata.from_header(self.metadata_header) if self.metadata_header else None
            )
        except InvalidValueError:
            return None


class FoundArtifact(NamedTuple):
    """An artifact in the response to a look-up. The values are plain, because a `Digest` would
    validate each of a thousand artifacts again.
    """

    sha256: str
    size_bytes: int
    compile_seconds: float


@dataclass(frozen=True)
class DescribedArtifact:
    """An artifact with its publisher's description.

    Attributes:
        artifact: the artifact.
        label: the user's name for the program. Empty if there is no description.
        program: key parts that the program determines. None without a description, and in lists
            that omit parts.
        environment: key parts that the environment determines, or None like `program`.
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
        """The job or user that published the artifact, as reported by the publisher."""
        return "" if self.metadata is None else self.metadata.producer

    @property
    def is_described(self) -> bool:
        """Whether a publisher has described the artifact."""
        return self.program is not None and self.environment is not None

    @property
    def shown_environment(self) -> Mapping[str, str]:
        """The environment. Without a description, the shortened parts from the metadata."""
        if self.environment is not None:
            return self.environment
        return {} if self.metadata is None else self.metadata.parts

    @property
    def parts(self) -> dict[str, str]:
        """All known parts of the key."""
        return {**self.shown_environment, **(self.program or {})}
