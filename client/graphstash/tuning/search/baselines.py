"""Random and exhaustive search: the baselines that other searchers must beat."""

from collections.abc import Sequence

from graphstash.tuning.search.base import Searcher
from graphstash.tuning.space import Configuration, SearchSpace

__all__ = ["Exhaustive", "RandomSearch"]


class RandomSearch(Searcher):
    """Draws configurations uniformly, without repetition."""

    waits = False

    def _propose(self) -> list[Configuration]:
        return self._unvisited(1)


class Exhaustive(Searcher):
    """Proposes all configurations in the order of the space, after `first`. Ignores the seed."""

    waits = False

    def __init__(
        self, space: SearchSpace, *, seed: int = 0, first: Sequence[Configuration] = ()
    ) -> None:
        super().__init__(space, seed=seed, first=first)
        self._all = iter(space)

    def _propose(self) -> list[Configuration]:
        new = (each for each in self._all if each not in self._visited)
        return [found] if (found := next(new, None)) is not None else []
