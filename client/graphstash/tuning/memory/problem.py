"""Problem: identifies what is tuned, and measures the distance between two problems.

The server lists a problem's answers under its label, such as `tuned matmul float32 nn 512x512x512`.
A search reads labels to find answers of similar problems. It does not trust labels: it verifies
such an answer like any artifact, and uses it only as a starting point.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2
from numbers import Integral
from typing import Any, Final

from graphstash._compile.request import CompileRequest
from graphstash.tuning.space import SearchSpace
from graphstash_schema import ArtifactKind, DeviceType

__all__ = ["HELION_LABEL", "Problem", "parse_label", "shape_bucket", "word"]

HELION_LABEL: Final = "Helion kernel"
"""Prefix of the labels of Helion's own entries, which name no problem."""

_WORD_CHARACTERS: Final = 64
_WORD: Final = re.compile(rf"[\x21-\x7e]{{1,{_WORD_CHARACTERS}}}")
_LABEL: Final = re.compile(r"tuned (\S+) (\S+) (\S+) (\d{1,19}(?:x\d{1,19}){0,15}|-)")
_MAX_SIZES: Final = 16
_MAX_SIZE: Final = 2**63 - 1

_CHECKS: Final = "after the last sample"
"""How results were checked. It is part of the key, so that no search finds measurements that were
made with fewer checks."""

_ANOTHER_DEVICE: Final = 2.0
"""Distance of another device type, as much as a size that is four times as large."""


def shape_bucket(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Round each size up to a power of two: one schedule serves all shapes of a bucket.

    Use it for kernels whose sizes change with every batch. It does not fit a search space that
    depends on the exact sizes.
    """
    return tuple(1 << (size - 1).bit_length() if size > 0 else 0 for size in shape)


def word(text: str) -> str:
    """Convert a text to the form of a `Problem`'s names, with a digest if it does not fit."""
    plain = "".join(each if "\x21" <= each <= "\x7e" else "_" for each in text)
    if plain == text and len(plain) <= _WORD_CHARACTERS:
        return plain or "-"
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
    return f"{plain[: _WORD_CHARACTERS - 17]}.{digest}"


def parse_label(label: str) -> dict[str, Any] | None:
    """Return `kernel`, `dtype`, `layout` and `shape`, or None if the label is not an answer's."""
    named = _LABEL.fullmatch(label)
    if named is None:
        return None
    kernel, dtype, layout, sizes = named.groups()
    shape = [] if sizes == "-" else [int(size) for size in sizes.split("x")]
    return {"kernel": kernel, "dtype": dtype, "layout": layout, "shape": shape}


@dataclass(frozen=True, slots=True)
class Problem:
    """What a schedule is for: equal problems share one schedule.

    Attributes:
        kernel: the kernel's name for its users, 1 to 64 printable ASCII characters without a space.
        shape: the sizes that determine the fastest schedule, or their bucket; at most 16.
        dtype: data type of the operands, in the form of `kernel`.
        device_type: type of the device that the kernel runs on.
        compiler: name and version, e.g. `triton 3.3.0`.
        layout: memory order of the operands, in the form of `kernel`; `-` if there is only one.
        parts: anything else that distinguishes problems, such as the digest of the kernel's source.

    Raises:
        ValueError: on construction, if a field is not in its form.
    """

    kernel: str
    shape: tuple[int, ...]
    dtype: str
    device_type: DeviceType
    compiler: str
    layout: str = "-"
    parts: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("kernel", "dtype", "layout"):
            if _WORD.fullmatch(value := getattr(self, name)) is None:
                raise ValueError(
                    f"the {name} {value!r} cannot be used: write 1 to 64 printable ASCII "
                    "characters without a space"
                )
        if not _is_text(self.compiler):
            raise ValueError(f"the compiler {self.compiler!r} cannot be used: write a text")
        for name, value in self.parts.items():
            if not (_is_text(name) and _is_text(value)):
                raise ValueError(
                    f"the part {name!r} of the problem is {value!r}: parts must be texts, with "
                    "texts as names"
                )
        if len(self.shape) > _MAX_SIZES or not all(map(_is_size, self.shape)):
            raise ValueError(
                f"the shape {self.shape} cannot be used: it has at most {_MAX_SIZES} sizes, whole "
                "numbers from 0 to 2**63 - 1"
            )

    @property
    def family(self) -> str:
        """Prefix of the labels of the same kernel in all shapes."""
        return f"tuned {self.kernel} {self.dtype} {self.layout} "

    @property
    def label(self) -> str:
        """The label that the server shows and searches."""
        return self.family + ("x".join(map(str, self.shape)) or "-")

    def distance(self, label: str, device_type: DeviceType) -> float | None:
        """Return the distance to a listed problem.

        It is the number of doublings between the sizes, plus a constant for another device type.
        None for another kernel, dtype, layout, number of sizes or platform.
        """
        named = parse_label(label)
        if named is None or not label.startswith(self.family):
            return None
        sizes = named["shape"]
        if len(sizes) != len(self.shape) or device_type.platform != self.device_type.platform:
            return None
        doublings = sum(
            abs(log2((here + 1) / (there + 1)))
            for here, there in zip(self.shape, sizes, strict=True)
        )
        return doublings + (0.0 if device_type == self.device_type else _ANOTHER_DEVICE)

    def request(
        self, space: SearchSpace, role: str, number: int, *, max_bytes: int
    ) -> CompileRequest:
        """Return the cache request for an artifact of the problem.

        `role` is `answer` or `measurements`. `number` counts the artifacts of a role from 0, see
        `TeamMemory`. The key contains the space, because results of other spaces do not apply.
        """
        # A search for answers must not find measurements.
        label = self.label if role == "answer" else self.label.replace("tuned", "measured", 1)
        return CompileRequest.of(
            ArtifactKind.SCHEDULE,
            self.device_type,
            {
                **{f"problem.{name}": value for name, value in self.parts.items()},
                "kernel": self.kernel,
                "shape": "x".join(map(str, self.shape)),
                "dtype": self.dtype,
                "layout": self.layout,
                "compiler": self.compiler,
                "space": json.dumps(space.describe(), sort_keys=True),
                "checks": _CHECKS,
                "role": role,
                "number": str(number),
            },
            toolchain=self.compiler,
            label=label,
            max_bytes=max_bytes,
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_size(size: Any) -> bool:
    is_whole = isinstance(size, Integral) and not isinstance(size, bool)
    return is_whole and bool(0 <= size <= _MAX_SIZE)
