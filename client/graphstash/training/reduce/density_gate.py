"""Decides when a tensor is sent whole.

The gate uses only values that all ranks share, so all ranks decide alike.
"""

__all__ = ["DensityGate"]


class DensityGate:
    """Switches between sparse and dense sending, with hysteresis.

    Call `skips` before each send, and `record` after a look at the blocks. While dense, the gate
    skips 1, 2, 4, ... and at most `longest` sends between two looks. A tensor that stays dense
    therefore costs almost nothing. The gate needs the density of the union, which is the same on
    every rank.

    Attributes:
        is_dense: Result of the last look.
    """

    def __init__(self, *, dense_above: float, sparse_below: float, longest: int = 64) -> None:
        """Take the limits as shares of the blocks.

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
        """Density of the union above which the next look makes the tensor dense."""
        return self._sparse_below if self.is_dense else self._dense_above

    def skips(self) -> bool:
        """Whether to send the tensor whole without a look this time. Call it once for each send."""
        if self.is_dense and self._left > 0:
            self._left -= 1
            return True
        return False

    def record(self, union_density: float) -> None:
        """Record the density that a look has found."""
        was_dense, self.is_dense = self.is_dense, union_density > self.limit
        if self.is_dense:
            self._pause = min(self._pause * 2, self._longest) if was_dense else 1
            self._left = self._pause
