"""Simulated annealing over a model of the costs, as in AutoTVM.

    repeat: measure a plan of 64 configurations; the first plan is random
            train boosted trees to rank all measured configurations
            128 chains walk for at most 500 steps of simulated annealing over the model's score,
            while the temperature falls from 1 to 0; the best unmeasured points are the next plan,
            except for 5 % that are random

(Chen et al., "Learning to optimize tensor programs", arXiv 1805.08166, 2018; the numbers are those
of TVM's XGBTuner.) A chain's step is a random legal move. TVM changes one parameter at a time; if
parameters depend on each other, the result may not be in the space.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from graphstash.tuning.search.base import Searcher, Trial
from graphstash.tuning.space import Configuration, SearchSpace

__all__ = ["XGBoostSearch"]

MODEL: Final = {
    "objective": "rank:pairwise",
    "max_depth": 3,
    "gamma": 0.0001,
    "min_child_weight": 1,
    "subsample": 1.0,
    "eta": 0.3,
    "lambda": 1.0,
    "nthread": 1,  # more threads would disturb measurements and repeatability
    "verbosity": 0,
}


class XGBoostSearch(Searcher):
    """Boosted trees that rank configurations, and simulated annealing over their score.

    Needs numpy and xgboost: the extra `tuning`.

    Args:
        space: the space to search.
        seed: seed of every choice.
        first: configurations to measure first.
        plan_size: number of configurations per round.
        chains: number of chains.
        steps: maximum steps per chain and round.
        early_stop: steps without a change of the plan after which annealing ends.
        epsilon: share of random configurations in a plan, from 0 to 1.
        trees: number of trees in the model.

    Raises:
        SpaceError: a configuration of `first` is not in the space.
        ValueError: `plan_size`, `chains`, `steps` or `trees` is below 1.
    """

    def __init__(
        self,
        space: SearchSpace,
        *,
        seed: int = 0,
        first: Sequence[Configuration] = (),
        plan_size: int = 64,
        chains: int = 128,
        steps: int = 500,
        early_stop: int = 50,
        epsilon: float = 0.05,
        trees: int = 100,
    ) -> None:
        counts = {"plan_size": plan_size, "chains": chains, "steps": steps, "trees": trees}
        if wrong := [name for name, count in counts.items() if count < 1]:
            raise ValueError(f"{' and '.join(wrong)} must be at least 1")
        super().__init__(space, seed=seed, first=first)
        import xgboost

        self._xgboost = xgboost
        self._plan_size = plan_size
        self._chains = chains
        self._steps = steps
        self._early_stop = early_stop
        self._epsilon = epsilon
        self._trees = trees
        self._learned: list[Trial] = []
        self._insertions = 0
        self._ends: list[Configuration] = []  # ends of the chains, which continue in the next round

    def _learn(self, trials: list[Trial]) -> None:
        self._learned += trials

    def _propose(self) -> list[Configuration]:
        if len({trial.cost for trial in self._learned}) < 2:  # nothing to rank
            return self._unvisited(self._plan_size)
        ranked = self._anneal(self._train_model())
        chosen: dict[Configuration, None] = {}
        for each in ranked:
            if len(chosen) == self._plan_size:
                break
            drawn = self._unvisited(1) if self._random.random() < self._epsilon else []
            chosen.update(dict.fromkeys(drawn or [each]))
        missing = self._plan_size - len(chosen)
        more = self._unvisited(self._plan_size) if missing else []
        return list(dict.fromkeys([*chosen, *more]))[: self._plan_size]

    def _train_model(self) -> Any:
        costs = np.array([trial.cost for trial in self._learned])
        data = self._matrix([trial.configuration for trial in self._learned])
        order = np.unique(-costs, return_inverse=True)[1]  # failures rank lowest
        data.set_label(order / max(1, order.max()))
        data.set_group([len(costs)])
        model = MODEL | {"seed": self._random.getrandbits(31)}
        return self._xgboost.train(model, data, num_boost_round=self._trees)

    def _matrix(self, configurations: list[Configuration]) -> Any:
        rows = np.array([self.space.features(each) for each in configurations], dtype=np.float32)
        return self._xgboost.DMatrix(rows, nthread=1)

    def _anneal(self, model: Any) -> list[Configuration]:
        points = self._ends or [self.space.draw(self._random) for _ in range(self._chains)]
        known: dict[Configuration, float] = {}
        scores = self._predict(model, points, known)
        best: list[tuple[float, int, Configuration]] = []
        members: set[Configuration] = set()
        changed = 0
        for step in range(self._steps):
            if step - changed > self._early_stop:
                break
            for point in points:
                if self._offer(point, known[point], best, members):
                    changed = step
            moved = [self._draw_neighbour(point) for point in points]
            new = self._predict(model, moved, known)
            temperature = 1 - step / self._steps
            for i, (neighbour, score) in enumerate(zip(moved, new, strict=True)):
                gain = (score - scores[i]) / (temperature + 1e-5)
                if gain >= 0 or self._random.random() < math.exp(gain):
                    points[i], scores[i] = neighbour, score
        self._ends = points
        return [each for *_, each in sorted(best, reverse=True)]

    def _offer(
        self,
        point: Configuration,
        score: float,
        best: list[tuple[float, int, Configuration]],
        members: set[Configuration],
    ) -> bool:
        """Add a point to the best if its score suffices; return whether it was added."""
        if point in members or point in self._visited:
            return False
        if len(best) < self._plan_size:
            heapq.heappush(best, (score, self._insertions, point))
        elif score > best[0][0]:
            members.remove(heapq.heapreplace(best, (score, self._insertions, point))[-1])
        else:
            return False
        self._insertions += 1  # orders equal scores
        members.add(point)
        return True

    def _draw_neighbour(self, point: Configuration) -> Configuration:
        for _ in range(2 * self.space.moves):
            move = self._random.randrange(self.space.moves)
            if (found := self.space.moved(point, move)) is not None:
                return found
        return self.space.draw(self._random)

    def _predict(
        self, model: Any, points: list[Configuration], known: dict[Configuration, float]
    ) -> list[float]:
        if new := [each for each in dict.fromkeys(points) if each not in known]:
            scores = model.predict(self._matrix(new)).tolist()
            known.update(zip(new, scores, strict=True))
        return [known[each] for each in points]
