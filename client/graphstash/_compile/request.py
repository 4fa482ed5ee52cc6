"""CompileRequest: what a compiler was asked for, from the look-up to the upload."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from graphstash.config import holder_name
from graphstash_schema import (
    ArtifactKey,
    ArtifactKind,
    ArtifactMetadata,
    DeviceType,
    fingerprint_of,
    parts_for_display,
)
from graphstash_schema.names import line_of

__all__ = ["CompileRequest"]


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """One thing to compile.

    Attributes:
        key: how its artifact is found.
        parts: what the fingerprint is made of.
        toolchain: versions, for people and for retention.
        label: what its user calls it, e.g. `jit(train_step)`.
        details: what explains a miss beside the parts, such as what is inside a key that only the
            compiler makes; called after a miss at most, and may cost a little of a compilation.
        max_bytes: largest payload that can be one; None where `max_artifact` is the only limit.
    """

    key: ArtifactKey
    parts: Mapping[str, str] = field(default_factory=dict)
    toolchain: str = ""
    label: str = ""
    details: Callable[[], Mapping[str, str]] = dict
    max_bytes: int | None = None

    @classmethod
    def of(
        cls,
        kind: ArtifactKind,
        device_type: DeviceType,
        parts: Mapping[str, str],
        *,
        toolchain: str = "",
        label: str = "",
        details: Callable[[], Mapping[str, str]] = dict,
        max_bytes: int | None = None,
    ) -> Self:
        """A request whose key follows from its parts.

        Raises:
            InvalidValueError: as `fingerprint_of`.
        """
        key = ArtifactKey(
            kind=kind, device_type=device_type, fingerprint=fingerprint_of(kind, parts)
        )
        return cls(key, parts, toolchain, label, details, max_bytes)

    def metadata(self, *, compile_seconds: float, raw_size_bytes: int) -> ArtifactMetadata:
        """What is said of the artifact when it is published."""
        return ArtifactMetadata(
            compile_seconds=compile_seconds,
            raw_size_bytes=raw_size_bytes,
            toolchain=line_of(self.toolchain, most=256),
            producer=holder_name(),
            parts=parts_for_display(self.parts),
        )
