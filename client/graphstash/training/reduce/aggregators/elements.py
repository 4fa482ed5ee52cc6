"""Types of elements: as they are sent, and as they are added up.

fp16 and bf16 are added in fp32 and rounded once; every other type in itself, integers with the
wrap-around of two's complement.
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
        name: torch's, without `torch.`.
        wire: numpy's type of what is sent; bf16, which numpy has not, are bits.
        widen: from what is sent to what is added up.
        narrow: and back.
    """

    name: str
    wire: np.dtype[Any]
    widen: Callable[[_Array], _Array]
    narrow: Callable[[_Array], _Array]

    @property
    def is_added_as_sent(self) -> bool:
        """Whether the sums are of the type that is sent."""
        return self.widen is _same


def _same(values: _Array) -> _Array:
    return values


def _half_to_single(values: _Array) -> _Array:
    return values.astype(np.float32)


def _single_to_half(values: _Array) -> _Array:
    with np.errstate(all="ignore"):  # too large a sum is infinite, as in torch
        return values.astype(np.float16)


def _brain_to_single(bits: _Array) -> _Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _single_to_brain(values: _Array) -> _Array:
    """To the nearest, and of two to the even one; a NaN stays one."""
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))
    return (np.where(np.isnan(values), bits | 0x400000, rounded) >> 16).astype(np.uint16)


def _plain(name: str) -> Element:
    return Element(name, np.dtype(name), _same, _same)


ELEMENTS: Final = {
    1: _plain("float32"),
    2: _plain("float64"),
    3: Element("float16", np.dtype(np.float16), _half_to_single, _single_to_half),
    4: Element("bfloat16", np.dtype(np.uint16), _brain_to_single, _single_to_brain),
    5: _plain("int8"),
    6: _plain("int16"),
    7: _plain("int32"),
    8: _plain("int64"),
    9: _plain("uint8"),
}
"""By their code in a header."""

_CODES: Final = {element.name: code for code, element in ELEMENTS.items()}


def code_of(name: str) -> int | None:
    """The code of a type by its name in torch, `float32`; None for one that is not added up."""
    return _CODES.get(name)
