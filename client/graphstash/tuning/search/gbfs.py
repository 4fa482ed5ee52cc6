"""Greedy best-first search (G-BFS).

    Q = {start}
    while Q and there is budget:
        remove the cheapest state s from Q
        draw up to rho random neighbours of s; measure the unvisited ones, and put them into Q

(Zhang et al., "Compiler-Level Matrix Multiplication Optimization for Deep Learning", arXiv
1909.10616, 2019.) A state is expanded once, so its other neighbours are reached from other states
or not at all. The paper does not say what follows an empty queue; this search continues from a
random unvisited configuration.

The queue starts with a few random configurations. The paper's queue starts with the untiled one,
which is slow, like its neighbours; on most spaces, a short search then loses to random search.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from graphstash.tuning.search.base import Searcher, Trial
from graphstash.tuning.space import Configuration, SearchSpace

__all__ = ["GBFS"]


class GBFS(Searcher):
    """Greedy best-first search: measures neighbours of the cheapest configuration found.

    Args:
        space: the space to search.
        seed: seed of every choice.
        first: configurations to measure before all others, instead of `starts`.
        starts: number of random configurations in the initial queue; 0 for the start of the space,
            as in the paper.
        rho: maximum neighbours drawn per configuration.
        width: maximum configurations expanded per round; 1 in the paper. Up to rho * width can be
            measured in parallel.

    Raises:
        SpaceError: a configuration of `first` is not in the space.
        ValueError: rho or width is below 1.
    """

    def __init__(
        self,
        space: SearchSpace,
        *,
        seed: int = 0,
        first: Sequence[Configuration] = (),
        starts: int = 8,
        rho: int = 5,
        width: int = 1,
    ) -> None:
        if rho < 1 or width < 1:
            raise ValueError(f"rho is {rho}, width is {width}: both must be at least 1")
        super().__init__(space, seed=seed, first=first)
        self._begin(starts)
        self._rho = rho
        self._width = width
        self._queue: list[tuple[float, int, Configuration]] = []
        self._pushed = 0

    def _learn(self, trials: list[Trial]) -> None:
        for trial in trials:
            heappush(self._queue, (trial.cost, self._pushed, trial.configuration))
            self._pushed += 1  # of equal costs, the first is expanded first

    def _propose(self) -> list[Configuration]:
        chosen: dict[Configuration, None] = {}
        expanded = 0
        while self._queue and expanded < self._width:
            neighbours = self.space.neighbours(heappop(self._queue)[-1])
            drawn = self._random.sample(neighbours, min(self._rho, len(neighbours)))
            new = [each for each in drawn if each not in self._visited and each not in chosen]
            chosen.update(dict.fromkeys(new))
            expanded += bool(new)
        return list(chosen) or self._unvisited(1)
