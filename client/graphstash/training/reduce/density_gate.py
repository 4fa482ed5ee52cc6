"""Decides when to send a tensor whole.

The gate uses only values that are equal on all ranks, so all ranks decide alike.
"""

__all__ = ["DensityGate"]


class DensityGate:
    """Switches between sparse and dense sending, with hysteresis.

    A look at the blocks finds their density. Call `skips` before each send. If it returns False,
    look, and pass the density to `record`. While looks find the tensor dense, the gate skips 1, 2,
    4, ..., at most `longest` looks, so a dense tensor costs almost nothing.

    Attributes:
        is_dense: Whether the last look found the tensor dense.
    """

    def __init__(self, *, dense_above: float, sparse_below: float, longest: int = 64) -> None:
        """Set the limits, as shares of the blocks.

        Raises:
            ValueError: not 0 <= sparse_below <= dense_above <= 1.
        """
        if not 0 <= sparse_below <= dense_above <= 1:
            raise ValueError(
                f"sparse_below={sparse_below} and dense_above={dense_above}: take shares of the "
                "blocks with 0 <= sparse_below <= dense_above <= 1"
            )
        self._dense_above = dense_above
        self._sparse_below = sparse_below
        self._longest = longest
        self._pause = 1
        self._left = 0
        self.is_dense = False

    @property
    def limit(self) -> float:
        """Density of the union above which the next look counts the tensor as dense."""
        return self._sparse_below if self.is_dense else self._dense_above

    def skips(self) -> bool:
        """Return whether to send the tensor whole, without a look. Call it once for each send."""
        if self.is_dense and self._left > 0:
            self._left -= 1
            return True
        return False

    def record(self, union_density: float) -> None:
        """Record the density of the union, which is equal on all ranks."""
        was_dense, self.is_dense = self.is_dense, union_density > self.limit
        if self.is_dense:
            self._pause = min(self._pause * 2, self._longest) if was_dense else 1
            self._left = self._pause
