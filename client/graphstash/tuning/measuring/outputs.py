"""CheckedOutput: a result array that reveals what a kernel left out or overran."""

from typing import Any, Final

__all__ = ["CheckedOutput"]

_GUARD_BYTES: Final = 4096
"""Bytes on each side of the array; a multiple of all alignments that compilers assume."""


class CheckedOutput:
    """An array between two guard bands; needs numpy.

        output = CheckedOutput((512, 512), "float32")
        output.fill_with_garbage()
        kernel(a, b, output.array)
        return output.holds(a @ b, tolerance=1e-3)

    Args:
        shape: shape of the array.
        dtype: numpy data type of its elements, or its name.

    Attributes:
        array: row-major, at an address that is a multiple of 4096.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        import numpy as np

        self._random = np.random.default_rng(0)
        empty = np.empty(shape, dtype)
        memory = np.empty(empty.nbytes + 3 * _GUARD_BYTES, np.uint8)
        skipped = -memory.ctypes.data % _GUARD_BYTES
        first = skipped + _GUARD_BYTES
        end = first + empty.nbytes
        self._guards = (memory[skipped:first], memory[end : end + _GUARD_BYTES])
        self._patterns: tuple[Any, ...] = ()
        self.array = memory[first:end].view(empty.dtype).reshape(shape)
        self.fill_with_garbage()

    def fill_with_garbage(self) -> None:
        """Fill the array with new garbage, and the guard bands with a new pattern.

        The garbage is far from 0, so that a kernel that adds to it gives a wrong result.
        """
        garbage = self._random.integers(64, 100, self.array.shape)
        self.array[...] = garbage.astype(self.array.dtype)
        for guard in self._guards:
            guard[:] = self._random.integers(0, 256, guard.shape)
        self._patterns = tuple(guard.copy() for guard in self._guards)

    def holds(self, expected: Any, tolerance: Any = 0) -> bool:
        """Return whether the array is as expected, and the guard bands are intact.

        Args:
            expected: an array of the same shape. NaN agrees with NaN, and infinity with itself.
            tolerance: largest difference of an element, a number or an array. Default: 0.
        """
        import numpy as np

        if np.shape(expected) != self.array.shape:
            raise ValueError(
                f"the expected shape is {np.shape(expected)}, but that of the output is "
                f"{self.array.shape}"
            )
        wide = np.result_type(self.array, expected, np.longdouble)  # integers would wrap around
        with np.errstate(invalid="ignore"):
            difference = abs(self.array.astype(wide) - expected)
        agrees = (self.array == expected) | (difference <= tolerance)
        agrees |= np.isnan(self.array) & np.isnan(expected)
        pairs = zip(self._guards, self._patterns, strict=True)
        return bool(np.all(agrees)) and all(np.array_equal(*pair) for pair in pairs)
