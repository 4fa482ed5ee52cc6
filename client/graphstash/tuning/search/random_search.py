"""Random search: the baseline that other searchers must beat."""

from graphstash.tuning.search.base import Searcher
from graphstash.tuning.space import Configuration

__all__ = ["RandomSearch"]


class RandomSearch(Searcher):
    """Draws configurations uniformly, without repetition."""

    waits = False

    def _propose(self) -> list[Configuration]:
        return self._unvisited(1)
