"""DeviceType: what an executable runs on, in one word.

Examples: `cpu-x86_64-91a3e0b4c5d6f708` (platform, machine, digest of the CPU feature set),
`cuda-sm_90` (platform, compute capability), `tpu-v5e-2x4` (platform, chip, topology).
An executable made for one device type may be handed to every host of that device type; so whatever
makes hosts incompatible (instruction sets, chip generation, topology) is in the word.
"""

import hashlib
import re
from collections.abc import Iterable
from typing import Self

from graphstash_schema.errors import ErrorCode
from graphstash_schema.names import Word

__all__ = ["DeviceType"]

_NOT_ALLOWED = re.compile(r"[^a-z0-9._]+")


class DeviceType(Word):
    """Platform, device kind and topology, joined by hyphens: 1 to 128 characters."""

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
