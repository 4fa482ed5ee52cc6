"""CompileRequest: one artifact that a hook looks up, compiles and uploads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import graphstash_schema as schema
from graphstash.config import holder_name
from graphstash_schema import (
    ArtifactKey,
    ArtifactKind,
    DeviceType,
    fingerprint_of,
    parts_for_display,
)
from graphstash_schema.names import line_of

if TYPE_CHECKING:
    from graphstash_schema import ArtifactMetadata

__all__ = ["CompileRequest"]


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """A request for one artifact.

    Attributes:
        key: Key of the artifact.
        parts: Parts of the fingerprint.
        toolchain: Versions of the compiler, for display and retention rules.
        label: The user's name for the program, e.g. `jit(train_step)`.
        details: Returns further facts that explain a miss, such as the inputs of the compiler's own
            key. Called when `MissLog` records the request. Must be fast compared to a compilation.
        max_bytes: Maximum size of a payload that is fetched into memory, or None if only
            `max_artifact` limits it.
        is_compiled: Whether the compiler runs after a miss. False if it first looks up artifacts
            that this one contains. `CompileLimit` counts only requests with True.
        is_optional: Whether the compiler may have nothing to store after a miss. Such a miss is
            counted when the compiler stores the artifact.
    """

    key: ArtifactKey
    parts: Mapping[str, str] = field(default_factory=dict)
    toolchain: str = ""
    label: str = ""
    details: Callable[[], Mapping[str, str]] = dict
    max_bytes: int | None = None
    is_compiled: bool = True
    is_optional: bool = False

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
        """Return a request whose key is computed from the parts.

        Raises:
            InvalidValueError: See `fingerprint_of`.
        """
        key = ArtifactKey(
            kind=kind, device_type=device_type, fingerprint=fingerprint_of(kind, parts)
        )
        return cls(key, parts, toolchain, label, details, max_bytes)

    def metadata(self, *, compile_seconds: float, raw_size_bytes: int) -> "ArtifactMetadata":
        """Return the metadata to publish with the artifact."""
        return schema.ArtifactMetadata(
            compile_seconds=compile_seconds,
            raw_size_bytes=raw_size_bytes,
            toolchain=line_of(self.toolchain, most=256),
            producer=holder_name(),
            parts=parts_for_display(self.parts),
        )
