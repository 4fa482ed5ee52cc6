"""The types of elements in datagrams, and the types in which aggregators add them.

fp16 and bf16 are added in fp32, and the sum is rounded once. All other types are added in their
own type. Integers wrap around (two's complement).
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["ELEMENTS", "Element", "code_of"]

_Array = npt.NDArray[Any]


class Element(NamedTuple):
    """A type of elements.

    Attributes:
        name: name in torch, without `torch.`.
        wire: numpy type in datagrams. bf16 is sent as uint16 bits, because numpy has no bf16.
        widen: function that converts the wire type to the type for adding.
        narrow: function that converts back to the wire type.
    """

    name: str
    wire: np.dtype[Any]
    widen: Callable[[_Array], _Array]
    narrow: Callable[[_Array], _Array]

    @property
    def is_added_as_sent(self) -> bool:
        """Whether elements are added in the wire type."""
        return self.widen is _same


def _same(values: _Array) -> _Array:
    return values


def _half_to_single(values: _Array) -> _Array:
    return values.astype(np.float32)


def _single_to_half(values: _Array) -> _Array:
    with np.errstate(all="ignore"):  # sums that are too large become inf, as in torch
        return values.astype(np.float16)


def _bfloat16_to_single(bits: _Array) -> _Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _single_to_bfloat16(values: _Array) -> _Array:
    """Round to nearest, ties to even. NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))
    return (np.where(np.isnan(values), bits | 0x400000, rounded) >> 16).astype(np.uint16)


def _plain(name: str) -> Element:
    return Element(name, np.dtype(name), _same, _same)


ELEMENTS: Final = {
    1: _plain("float32"),
    2: _plain("float64"),
    3: Element("float16", np.dtype(np.float16), _half_to_single, _single_to_half),
    4: Element("bfloat16", np.dtype(np.uint16), _bfloat16_to_single, _single_to_bfloat16),
    5: _plain("int8"),
    6: _plain("int16"),
    7: _plain("int32"),
    8: _plain("int64"),
    9: _plain("uint8"),
}
"""Types by their code in a header."""

_CODES: Final = {element.name: code for code, element in ELEMENTS.items()}


def code_of(name: str) -> int | None:
    """Return the code of a torch type, such as `float32`, or None if aggregators cannot add it."""
    return _CODES.get(name)
