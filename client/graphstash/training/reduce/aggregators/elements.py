"""The types of elements in datagrams, and the types in which aggregators add them.

fp16 and bf16 are added in fp32, and the sum is rounded once. All other types are added in their
own type. Integers wrap around (two's complement).

Blocks of fp32 can be sent as int32, as in SwitchML, whose switches can only add integers. For each
block, the ranks agree on an exponent e such that every element on every rank is below 2**e in
absolute value. Each rank sends rint(x * 2**(k - e)), and multiplies the sums by 2**(e - k). For N
ranks, k = 30 - ceil(log2(N)), so that no sum overflows. Each rank rounds by at most half a step:

    |sum - exact sum| <= N / 2 * 2**(e - k), plus half a unit in the last place of fp32

SwitchML agrees on exponents one round ahead. Here the ranks first agree on all exponents of the
tensor. If a block has an infinity or NaN on any rank, its whole sum is NaN.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["ELEMENTS", "Element", "code_of", "dequantized", "exponents", "quantized"]

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
    3: Element(
        "float16",
        np.dtype(np.float16),
        lambda values: values.astype(np.float32),
        lambda values: values.astype(np.float16),
    ),
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


_ZERO: Final = 0
_OFFSET: Final = 126
"""A block's byte, 1 to 254, less its exponent, -125 to 128. Smaller exponents become -125."""
_NOT_FINITE: Final = 255


def exponents(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return a byte per block [blocks, block_size]. The caller max-reduces them over the ranks."""
    largest = np.abs(rows).max(axis=1, initial=0)
    _, found = np.frexp(largest)
    codes: npt.NDArray[np.int32] = np.clip(found + _OFFSET, 1, _NOT_FINITE - 1)
    codes[largest == 0] = _ZERO
    codes[~np.isfinite(largest)] = _NOT_FINITE
    return codes.astype(np.uint8)


def quantized(
    rows: npt.NDArray[np.float32], codes: npt.NDArray[np.uint8], world: int
) -> npt.NDArray[np.int32]:
    """Return the integers that a rank sends. `codes` are the maxima over all ranks."""
    safe = np.where((codes == _NOT_FINITE)[:, None], np.float32(0), rows)
    steps: npt.NDArray[np.float32] = np.ldexp(safe, -_shifts(codes, world))
    return np.rint(steps).astype(np.int32)


def dequantized(
    sums: npt.NDArray[np.int32], codes: npt.NDArray[np.uint8], world: int
) -> npt.NDArray[np.float32]:
    """Return the sums as fp32."""
    with np.errstate(over="ignore"):  # large sums become inf, as in fp32
        exact: npt.NDArray[np.float64] = np.ldexp(sums.astype(np.float64), _shifts(codes, world))
        found = exact.astype(np.float32)
    found[codes == _NOT_FINITE] = np.nan
    return found


def _shifts(codes: npt.NDArray[np.uint8], world: int) -> npt.NDArray[Any]:
    k = 30 - (world - 1).bit_length()
    return (codes.astype(np.int32) - _OFFSET - k)[:, None]
