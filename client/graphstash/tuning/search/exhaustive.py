"""Exhaustive search: for small spaces, and to find the optimum."""

from collections.abc import Sequence

from graphstash.tuning.search.base import Searcher
from graphstash.tuning.space import Configuration, SearchSpace

__all__ = ["Exhaustive"]


class Exhaustive(Searcher):
    """Proposes every configuration, in the order of the space. The seed has no effect."""

    waits = False

    def __init__(
        self, space: SearchSpace, *, seed: int = 0, first: Sequence[Configuration] = ()
    ) -> None:
        super().__init__(space, seed=seed, first=first)
        self._all = iter(space)

    def _propose(self) -> list[Configuration]:
        new = (each for each in self._all if each not in self._visited)
        return [found] if (found := next(new, None)) is not None else []
