"""Blocks of fp32 as int32, as SwitchML adds them up.

A switch adds integers alone. The ranks agree on an exponent e for each block, with all of its
elements below 2**e on every rank; each sends rint(x * 2**(k - e)), and the sums are multiplied with
2**(e - k). Of N ranks, k = 30 - ceil(log2(N)), so that no sum overflows. Each rank rounds by half a
step at most:

    |sum - exact sum| <= N / 2 * 2**(e - k), and half a unit in the last place of fp32

In SwitchML the exponents are agreed on one round ahead; here, for a whole tensor ahead. A block
that is infinite or NaN in any place on any rank becomes NaN in all of its places.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["dequantized", "exponents", "quantized"]

_ZERO: Final = 0
_OFFSET: Final = 126
"""From an exponent, -125 to 128, to a byte, 1 to 254. Smaller blocks have the smallest one."""
_NOT_FINITE: Final = 255


def exponents(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """A byte for each block [blocks, block_size]; the maximum over the ranks is for all of them."""
    largest = np.abs(rows).max(axis=1, initial=0)
    _, found = np.frexp(largest)
    codes: npt.NDArray[np.int32] = np.clip(found + _OFFSET, 1, _NOT_FINITE - 1)
    codes[largest == 0] = _ZERO
    codes[~np.isfinite(largest)] = _NOT_FINITE
    return codes.astype(np.uint8)


def quantized(
    rows: npt.NDArray[np.float32], codes: npt.NDArray[np.uint8], world: int
) -> npt.NDArray[np.int32]:
    """What a rank sends of its blocks, with the codes of all ranks."""
    safe = np.where((codes == _NOT_FINITE)[:, None], np.float32(0), rows)
    steps: npt.NDArray[np.float32] = np.ldexp(safe, -_shifts(codes, world))
    return np.rint(steps).astype(np.int32)


def dequantized(
    sums: npt.NDArray[np.int32], codes: npt.NDArray[np.uint8], world: int
) -> npt.NDArray[np.float32]:
    """The sums of blocks, with the same codes."""
    with np.errstate(over="ignore"):  # as a sum of fp32
        exact: npt.NDArray[np.float64] = np.ldexp(sums.astype(np.float64), _shifts(codes, world))
        found = exact.astype(np.float32)
    found[codes == _NOT_FINITE] = np.nan
    return found


def _shifts(codes: npt.NDArray[np.uint8], world: int) -> npt.NDArray[Any]:
    """As a column, e - k."""
    k = 30 - (world - 1).bit_length()
    return (codes.astype(np.int32) - _OFFSET - k)[:, None]
