"""CheckedOutput: an output array that detects missing writes and writes out of bounds."""

from typing import Any, Final

__all__ = ["CheckedOutput"]

_GUARD_BYTES: Final = 4096
"""Size of a guard band, and alignment of the array. Compilers assume no larger alignment."""


class CheckedOutput:
    """An array between two guard bands; needs numpy.

        output = CheckedOutput((512, 512), "float32")
        output.fill_with_garbage()
        kernel(a, b, output.array)
        return output.holds(a @ b, tolerance=1e-3)

    Args:
        shape: shape of the array.
        dtype: numpy data type of the elements, or its name.

    Attributes:
        array: the output, row-major, at an address that is a multiple of 4096.
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
        """Overwrite the array with random values and the guard bands with random bytes.

        The values are 64 to 99, or random bools. A kernel that adds to them, or leaves some, gives
        a wrong result.
        """
        garbage = self._random.integers(64, 100, self.array.shape)
        if self.array.dtype == bool:
            garbage %= 2
        self.array[...] = garbage.astype(self.array.dtype)
        for guard in self._guards:
            guard[:] = self._random.integers(0, 256, guard.shape)
        self._patterns = tuple(guard.copy() for guard in self._guards)

    def holds(self, expected: Any, tolerance: Any = 0) -> bool:
        """Return whether the array has the expected values and the guard bands are intact.

        Args:
            expected: an array of the same shape. NaN equals NaN, and infinity equals only itself.
            tolerance: maximum absolute difference, a number or an array. Default: 0. It may be
                infinite if the expected value is, as in `1e-3 * abs(expected)`.
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
        is_near = np.isfinite(difference) & (difference <= tolerance)
        agrees = (self.array == expected) | is_near
        agrees |= np.isnan(self.array) & np.isnan(expected)
        pairs = zip(self._guards, self._patterns, strict=True)
        return bool(np.all(agrees)) and all(np.array_equal(*pair) for pair in pairs)
