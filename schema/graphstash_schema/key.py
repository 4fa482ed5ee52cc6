r"""Artifact keys: kind, device type and fingerprint.

A fingerprint is the SHA-256 of these bytes (golden values in tests/unit):

    "graphstash-fingerprint-v1\0"  u64(len(kind)) kind  u64(number of parts)
    then for every part, sorted by name:  u64(len(name)) name  u64(len(value)) value

u64 is big-endian. Text is UTF-8, with surrogates, because environment variables may contain them.
The lengths ensure that two different sets of parts never hash the same bytes.
"""

import hashlib
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Self

from graphstash_schema.errors import ErrorCode, InvalidValueError
from graphstash_schema.names import Namespace, Word
from graphstash_schema.protocol import API_PREFIX

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

__all__ = [
    "MAX_PARTS",
    "ArtifactKey",
    "ArtifactKind",
    "DeviceType",
    "Fingerprint",
    "fingerprint_of",
    "parts_for_display",
]

MAX_PARTS: Final = 256

_DOMAIN: Final = b"graphstash-fingerprint-v1\0"
_PART_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHOWN_CHARACTERS: Final = 160
_NOT_ALLOWED: Final = re.compile(r"[^a-z0-9._]+")


class ArtifactKind(StrEnum):
    """The compiler that reads an artifact. Later releases may add kinds."""

    TORCH_XLA = "torch_xla"
    """A file of torch_xla's persistent cache: a serialized PJRT executable."""
    JAX = "jax"
    """An entry of JAX's persistent cache."""
    PJRT = "pjrt"
    """An executable serialized through the PJRT C interface."""
    INDUCTOR = "inductor"
    """An entry of Inductor's FX graph cache, or an object file that Inductor built."""
    AOT_AUTOGRAD = "aot_autograd"
    """An entry of the AOTAutograd cache."""
    TRITON = "triton"
    """The files of one Triton kernel."""
    AUTOTUNE = "autotune"
    """An autotuning result."""
    SCHEDULE = "schedule"
    """Measurements of a kernel, and its best schedules."""
    PLUGIN = "plugin"
    """A result of a compiler whose hook is in another package. Its fingerprint covers that hook."""

    @classmethod
    def parse(cls, text: str) -> "ArtifactKind":
        """Parse a kind, or raise InvalidValueError."""
        try:
            return cls(text)
        except ValueError:
            raise InvalidValueError(
                code=ErrorCode.INVALID_KIND,
                what="artifact kind",
                value=text,
                expected="one of " + ", ".join(cls),
            ) from None


class DeviceType(Word):
    """Hardware that an executable runs on, 1 to 128 characters.

    Examples: `cpu-x86_64-91a3e0b4c5d6f708` (platform, machine, digest of the CPU features),
    `cuda-sm_90` (platform, compute capability), `tpu-v5e-2x4` (platform, chip, topology). Hosts of
    one device type load each other's executables, so it must contain every property that makes
    hosts incompatible.
    """

    __slots__ = ()
    form = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
    what = "device type"
    code = ErrorCode.INVALID_DEVICE_TYPE

    @property
    def platform(self) -> str:
        """The part before the first hyphen: `cpu`, `cuda`, `tpu`, `neuron`."""
        return self.partition("-")[0]

    @classmethod
    def of(cls, platform: str, *details: str) -> Self:
        """Join a runtime's own terms ("TPU v5 lite", "2x4") by hyphens, in lower case and with `_`
        for characters outside `[a-z0-9._]`. Raise InvalidValueError if the result is empty or too
        long.
        """
        parts = (_NOT_ALLOWED.sub("_", part.lower()).strip("_.") for part in (platform, *details))
        return cls("-".join(part for part in parts if part))

    @classmethod
    def cpu(cls, machine: str, features: Iterable[str]) -> Self:
        """Return the device type of a host CPU from `platform.machine()` and its instruction-set
        features, such as the `flags` of /proc/cpuinfo, in any order.
        """
        listed = " ".join(sorted(set(features)))
        return cls.of("cpu", machine, hashlib.sha256(listed.encode()).hexdigest()[:16])


class Fingerprint(Word):
    """64 lower-case hex digits."""

    __slots__ = ()
    form = re.compile(r"[0-9a-f]{64}")
    what = "fingerprint"
    code = ErrorCode.INVALID_FINGERPRINT


class _Parsed:
    """Lets pydantic parse a kind as `ArtifactKind.parse` does."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: "GetCoreSchemaHandler"
    ) -> "CoreSchema":
        from pydantic_core import core_schema  # keys also work without pydantic

        return core_schema.no_info_before_validator_function(ArtifactKind.parse, handler(source))


@dataclass(frozen=True, slots=True)
class ArtifactKey:
    """Identifies an artifact within a namespace."""

    # Not a pydantic model: jobs that compile nothing import this class, but not pydantic.
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    kind: Annotated[ArtifactKind, _Parsed()]
    device_type: DeviceType
    fingerprint: Fingerprint

    def __post_init__(self) -> None:
        """Parse fields that are plain strings."""
        if type(self.kind) is not ArtifactKind:
            object.__setattr__(self, "kind", ArtifactKind.parse(self.kind))
        if type(self.device_type) is not DeviceType:
            object.__setattr__(self, "device_type", DeviceType(self.device_type))
        if type(self.fingerprint) is not Fingerprint:
            object.__setattr__(self, "fingerprint", Fingerprint(self.fingerprint))

    @classmethod
    def parse(cls, kind: str, device_type: str, fingerprint: str) -> "ArtifactKey":
        """Parse the three path segments, or raise InvalidValueError."""
        return ArtifactKey(
            ArtifactKind.parse(kind), DeviceType(device_type), Fingerprint(fingerprint)
        )

    def __str__(self) -> str:
        return f"{self.kind}/{self.device_type}/{self.fingerprint}"

    @property
    def short(self) -> str:
        """Kind and beginning of the fingerprint, for people."""
        return f"{self.kind} {self.fingerprint[:12]}"

    def artifact_path(self, namespace: Namespace) -> str:
        """Return the URL path of the artifact."""
        return f"{API_PREFIX}/{namespace}/artifacts/{self}"

    def lease_path(self, namespace: Namespace) -> str:
        """Return the URL path of the artifact's lease."""
        return f"{API_PREFIX}/{namespace}/leases/{self}"


def fingerprint_of(kind: ArtifactKind, parts: Mapping[str, str]) -> Fingerprint:
    """Return the hash of 1 to `MAX_PARTS` named parts, in any order: the compiler's own key, and
    all inputs that it omits. Raise InvalidValueError for another number, or a malformed name.
    """
    if not 1 <= len(parts) <= MAX_PARTS:
        raise InvalidValueError(
            code=ErrorCode.INVALID_FINGERPRINT,
            what="number of parts",
            value=len(parts),
            expected=f"1 to {MAX_PARTS}",
        )
    hasher = hashlib.sha256(_DOMAIN)
    hasher.update(_prefixed(kind.value))
    hasher.update(struct.pack(">Q", len(parts)))
    for name in sorted(parts):
        if _PART_NAME.fullmatch(name) is None:
            raise InvalidValueError(
                code=ErrorCode.INVALID_FINGERPRINT,
                what="part name",
                value=name,
                expected=_PART_NAME.pattern,
            )
        hasher.update(_prefixed(name))
        hasher.update(_prefixed(parts[name]))
    return Fingerprint(hasher.hexdigest())


def parts_for_display(parts: Mapping[str, str]) -> dict[str, str]:
    """Replace values that are not printable or have more than 160 characters by `sha256:<hex>`,
    which still shows whether two hosts differ.
    """
    return {name: _shown(value) for name, value in sorted(parts.items())}


def _prefixed(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack(">Q", len(raw)) + raw


def _shown(value: str) -> str:
    if len(value) <= _SHOWN_CHARACTERS and value.isprintable():
        return value
    return "sha256:" + hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
