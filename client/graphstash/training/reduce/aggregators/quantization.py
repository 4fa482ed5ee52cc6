"""Blocks of fp32 as int32, as in SwitchML, whose switches can only add integers.

For each block, the ranks agree on an exponent e such that every element on every rank is below 2**e
in absolute value. Each rank sends rint(x * 2**(k - e)), and multiplies the sums by 2**(e - k). For
N ranks, k = 30 - ceil(log2(N)), so that no sum overflows. Each rank rounds by at most half a step:

    |sum - exact sum| <= N / 2 * 2**(e - k), plus half a unit in the last place of fp32

SwitchML agrees on exponents one round ahead. Here the ranks first agree on all exponents of the
tensor. If a block has an infinity or NaN on any rank, its whole sum is NaN.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["dequantized", "exponents", "quantized"]

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
