"""When a tensor is sent whole: decided by what all ranks know, so all decide alike."""

__all__ = ["DensityGate"]


class DensityGate:
    """Switches between sparse and dense with hysteresis. While dense, it looks again only after 1,
    2, 4, ... up to `longest` times, so that a tensor that is always dense costs next to nothing.

    Feed it the density of the union, which every rank has.

    Attributes:
        is_dense: what the last look decided.
    """

    def __init__(self, *, dense_above: float, sparse_below: float, longest: int = 64) -> None:
        """Takes shares of the blocks.

        Raises:
            ValueError: when they are not 0 <= sparse_below <= dense_above <= 1.
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
        """Above this density of the union, the look that comes finds the tensor dense."""
        return self._sparse_below if self.is_dense else self._dense_above

    def skips(self) -> bool:
        """Whether this time the tensor is sent whole without a look. Call once each time."""
        if self.is_dense and self._left > 0:
            self._left -= 1
            return True
        return False

    def saw(self, union_density: float) -> None:
        """Takes what a look found."""
        was_dense, self.is_dense = self.is_dense, union_density > self.limit
        if self.is_dense:
            self._pause = min(self._pause * 2, self._longest) if was_dense else 1
            self._left = self._pause
