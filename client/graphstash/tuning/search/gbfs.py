"""Greedy best-first search (G-BFS).

    Q = {start}
    while Q and there is budget:
        remove the cheapest state s from Q
        draw up to rho random neighbours of s; measure the unvisited ones, and put them into Q

(Zhang et al., "Compiler-Level Matrix Multiplication Optimization for Deep Learning", arXiv
1909.10616, 2019.) A state is expanded once, so its other neighbours are reached from other states
or not at all. The paper does not say what follows an empty queue; this search continues from a
random unvisited configuration.

The paper's queue starts with the untiled configuration, which is slow, like its neighbours; on most
spaces, a short search then loses to random search. This search first measures a few random
configurations. It then measures, one by one, the configurations that a model of all costs so far
prefers. All of them start in the queue. Later rounds have a random configuration beside the
neighbours, because the queue may lead around a local minimum.
"""

import math
from collections.abc import Sequence
from heapq import heappop, heappush, nsmallest
from typing import Final

from graphstash.tuning.search._cost_model import CostModel
from graphstash.tuning.search.base import Searcher, Trial
from graphstash.tuning.space import Configuration, SearchSpace

__all__ = ["GBFS"]

DRAWN: Final = 300
"""Random configurations among which the model chooses."""

EXPANDED: Final = 4
"""Cheapest configurations whose neighbours the model may choose as well."""


class GBFS(Searcher):
    """Greedy best-first search: measures neighbours of the cheapest configuration found.

    Args:
        space: the space to search.
        seed: seed of every choice.
        first: configurations to measure before all others, instead of `starts` and `modelled`.
        starts: number of random configurations to measure first; 0 for the start of the space, as
            in the paper.
        modelled: number of measurements, including known ones, from which on neighbours are drawn
            as in the paper. Before, a model chooses. 0 for no model, as in the paper.
        rho: maximum neighbours drawn per configuration.
        width: maximum configurations expanded per round; 1 in the paper. Up to rho * width can be
            measured in parallel, while the model chooses up to width.
        exploring: number of measurements, including known ones, from which on each round has one
            more configuration, a random one; None for never, as in the paper.

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
        modelled: int = 18,
        rho: int = 5,
        width: int = 1,
        exploring: int | None = 45,
    ) -> None:
        if rho < 1 or width < 1:
            raise ValueError(f"rho is {rho}, width is {width}: both must be at least 1")
        super().__init__(space, seed=seed, first=first)
        self._begin(starts)
        # Neighbours of a similar kernel's best are a better guess than a model of few costs.
        self._modelled = 0 if first else modelled
        self._rho = rho
        self._width = width
        self._exploring = math.inf if exploring is None else exploring
        self._queue: list[tuple[float, int, Configuration]] = []
        self._learned: list[Trial] = []

    def _learn(self, trials: list[Trial]) -> None:
        for trial in trials:
            # Of equal costs, the first is expanded first.
            heappush(self._queue, (trial.cost, len(self._learned), trial.configuration))
            self._learned.append(trial)

    def _propose(self) -> list[Configuration]:
        if len(self._learned) < self._modelled and (found := self._promising()):
            return found
        explores = self._queue and len(self._learned) >= self._exploring
        chosen = dict.fromkeys(self._unvisited(1) if explores else [])
        expanded = 0
        while self._queue and expanded < self._width:
            neighbours = self.space.neighbours(heappop(self._queue)[-1])
            drawn = self._random.sample(neighbours, min(self._rho, len(neighbours)))
            new = [each for each in drawn if each not in self._visited and each not in chosen]
            chosen.update(dict.fromkeys(new))
            expanded += bool(new)
        return list(chosen) or self._unvisited(1)

    def _promising(self) -> list[Configuration]:
        """Return the configurations that the model prefers among random ones and neighbours."""
        costs = [trial.cost for trial in self._learned]
        # The model learns from logarithms, and those of two costs may be equal.
        if len({math.log(cost) for cost in costs if math.isfinite(cost)}) < 2:
            return []
        features = self.space.features
        model = CostModel([features(each.configuration) for each in self._learned], costs)
        drawn = [self.space.draw(self._random) for _ in range(DRAWN)]
        for trial in nsmallest(EXPANDED, self._learned, key=lambda trial: trial.cost):
            drawn += self.space.neighbours(trial.configuration)
        new = [each for each in dict.fromkeys(drawn) if each not in self._visited]
        return nsmallest(self._width, new, key=lambda each: model.score(features(each)))
