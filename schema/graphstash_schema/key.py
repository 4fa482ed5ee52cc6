r"""What an artifact is found by: its kind, its device type and its fingerprint.

A fingerprint is the SHA-256 over named, length-prefixed parts, separated by artifact kind.

The bytes that are hashed, so that every implementation agrees (golden values in tests/unit):

    "graphstash-fingerprint-v1\0"  u64(len(kind)) kind  u64(number of parts)
    then for every part, sorted by name:  u64(len(name)) name  u64(len(value)) value

u64 is big-endian; text is UTF-8, with surrogates passed through because environment variables may
hold them. Lengths come before contents, so two different sets of parts never hash the same bytes.
"""

import hashlib
import re
import struct
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Final, Self

from pydantic import BeforeValidator

from graphstash_schema.errors import ErrorCode, InvalidValueError
from graphstash_schema.model import RequestModel
from graphstash_schema.names import Namespace, Word
from graphstash_schema.protocol import API_PREFIX

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
"""Most parts in one fingerprint."""

_DOMAIN: Final = b"graphstash-fingerprint-v1\0"
_PART_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHOWN_CHARACTERS: Final = 160
_NOT_ALLOWED: Final = re.compile(r"[^a-z0-9._]+")


class ArtifactKind(StrEnum):
    """Which compiler reads an artifact; the list grows."""

    TORCH_XLA = "torch_xla"
    """A file of torch_xla's persistent cache: a serialized PJRT executable."""
    JAX = "jax"
    """An entry of JAX's persistent cache."""
    PJRT = "pjrt"
    """An executable serialized through the PJRT C interface."""
    INDUCTOR = "inductor"
    """An entry of Inductor's FX graph cache, or an object file it built."""
    AOT_AUTOGRAD = "aot_autograd"
    """An entry of the AOTAutograd cache."""
    TRITON = "triton"
    """A group of files that make up one Triton kernel."""
    AUTOTUNE = "autotune"
    """An autotuning result."""
    SCHEDULE = "schedule"
    """What tuning has found: measurements of a kernel, and its best schedules."""

    @classmethod
    def parse(cls, text: str) -> "ArtifactKind":
        """Reads a kind from a path or a body.

        Raises:
            InvalidValueError: when the list above has no such kind.
        """
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
    """What an executable runs on: platform, device kind and topology, joined by hyphens; 1 to 128
    characters.

    Examples: `cpu-x86_64-91a3e0b4c5d6f708` (platform, machine, digest of the CPU feature set),
    `cuda-sm_90` (platform, compute capability), `tpu-v5e-2x4` (platform, chip, topology). Every
    host of a device type may load an executable made for it, so whatever makes hosts incompatible
    (instruction sets, chip generation, topology) is part of the name.
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
        """Joins what a runtime reports ("TPU v5 lite", "2x4") into a device type.

        Upper case is lowered and everything outside `[a-z0-9._]` becomes `_`.

        Raises:
            InvalidValueError: when nothing usable is left, or more than 128 characters are.
        """
        parts = (_NOT_ALLOWED.sub("_", part.lower()).strip("_.") for part in (platform, *details))
        return cls("-".join(part for part in parts if part))

    @classmethod
    def cpu(cls, machine: str, features: Iterable[str]) -> Self:
        """The device type of a host CPU.

        Args:
            machine: e.g. `x86_64`, as `platform.machine()` says.
            features: instruction-set features, e.g. the `flags` of /proc/cpuinfo; order and
                repetition do not matter.
        """
        listed = " ".join(sorted(set(features)))
        return cls.of("cpu", machine, hashlib.sha256(listed.encode()).hexdigest()[:16])


class Fingerprint(Word):
    """64 lower-case hex digits."""

    __slots__ = ()
    form = re.compile(r"[0-9a-f]{64}")
    what = "fingerprint"
    code = ErrorCode.INVALID_FINGERPRINT


class ArtifactKey(RequestModel):
    """Names an artifact inside a namespace; the URL or the client supplies the namespace."""

    kind: Annotated[ArtifactKind, BeforeValidator(ArtifactKind.parse)]
    device_type: DeviceType
    fingerprint: Fingerprint

    @classmethod
    def parse(cls, kind: str, device_type: str, fingerprint: str) -> "ArtifactKey":
        """Reads the three path segments.

        Raises:
            InvalidValueError: for the first part that is out of form.
        """
        return ArtifactKey.model_construct(
            kind=ArtifactKind.parse(kind),
            device_type=DeviceType(device_type),
            fingerprint=Fingerprint(fingerprint),
        )

    def __str__(self) -> str:
        return f"{self.kind}/{self.device_type}/{self.fingerprint}"

    def artifact_path(self, namespace: Namespace) -> str:
        """The URL path of the artifact."""
        return f"{API_PREFIX}/{namespace}/artifacts/{self}"

    def lease_path(self, namespace: Namespace) -> str:
        """The URL path of the right to compile the artifact."""
        return f"{API_PREFIX}/{namespace}/leases/{self}"


def fingerprint_of(kind: ArtifactKind, parts: Mapping[str, str]) -> Fingerprint:
    """Hashes named parts; the order in which they were added does not matter.

    Args:
        kind: keeps the fingerprints of different compilers apart.
        parts: the compiler's own key and everything that key leaves out; 1 to `MAX_PARTS`.

    Raises:
        InvalidValueError: when there are no parts, too many, or a part's name is out of form.
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
    """Shortens parts for the metadata that travels with an artifact.

    A value of up to 160 printable characters stays as it is; a longer or unprintable one becomes
    `sha256:<hex>`, which still tells whether two hosts differ in it.
    """
    return {name: _shown(value) for name, value in sorted(parts.items())}


def _prefixed(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack(">Q", len(raw)) + raw


def _shown(value: str) -> str:
    if len(value) <= _SHOWN_CHARACTERS and value.isprintable():
        return value
    return "sha256:" + hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
