"""Artifact: a stored artifact, as queries, services, calls and pages use it.

To add a column, change the table, write a revision, and add a field here, which statements then
select.
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
        metadata_header: metadata as uploaded, or "".
        compile_seconds: seconds that a hit saves, as reported by the publisher.
        toolchain: compiler and version, as reported by the publisher.
        hits: number of hits. Lags by the flush interval.
        last_used_at: time of the last use. Lags by the flush interval.
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
    def identity(self) -> tuple[str, int, datetime, datetime | None]:
        """Values that identify this version of the artifact. At least one of them changes when a
        server replaces, withholds or releases the artifact.
        """
        return self.digest.sha256, self.digest.size_bytes, self.created_at, self.withheld_at

    @property
    def metadata(self) -> ArtifactMetadata | None:
        """Parsed metadata. None if absent, or if a release with other rules stored it."""
        try:
            return (
                ArtifactMetadata.from_header(self.metadata_header) if self.metadata_header else None
            )
        except InvalidValueError:
            return None


class FoundArtifact(NamedTuple):
    """An artifact that a look-up found. A field of type `Digest` would validate the hash again, of
    up to a thousand artifacts.
    """

    sha256: str
    size_bytes: int
    compile_seconds: float


@dataclass(frozen=True)
class DescribedArtifact:
    """An artifact with its publisher's description.

    Attributes:
        label: the user's name for the program. "" without a description.
        program: parts of the key that describe the program. None without a description, or if a
            listing did not read it.
        environment: parts of the key that describe the environment. None if `program` is.
    """

    artifact: Artifact
    label: str = ""
    program: Mapping[str, str] | None = None
    environment: Mapping[str, str] | None = None

    @cached_property
    def metadata(self) -> ArtifactMetadata | None:
        """`Artifact.metadata`, parsed once."""
        return self.artifact.metadata

    @property
    def producer(self) -> str:
        """The job or user that published the artifact, as reported by the publisher."""
        return "" if self.metadata is None else self.metadata.producer

    @property
    def is_described(self) -> bool:
        """Whether the description was stored and read. Listings do not read it."""
        return self.program is not None and self.environment is not None

    @property
    def shown_environment(self) -> Mapping[str, str]:
        """The environment, or else the shortened parts in the metadata."""
        if self.environment is not None:
            return self.environment
        return {} if self.metadata is None else self.metadata.parts

    @property
    def parts(self) -> dict[str, str]:
        """All known parts of the key."""
        return {**self.shown_environment, **(self.program or {})}
