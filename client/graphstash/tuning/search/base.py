"""Base class of searchers: `ask` returns configurations, `tell` records their costs.

A search proceeds in rounds. Each round proposes configurations, which depend only on the searcher's
arguments and on the trials recorded before the round began. They do not depend on the `count` of
`ask`, nor on the order in which costs of one round's proposals are told. So the trials suffice to
continue a search in another process.
"""

import math
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, ClassVar, NamedTuple

from graphstash.errors import GraphstashError
from graphstash.tuning.space import Configuration, SearchSpace, SpaceError

__all__ = ["CostError", "Searcher", "Trial"]


class CostError(GraphstashError, ValueError):
    """A cost is neither a number above 0 nor infinity, which marks a failing configuration."""


class Trial(NamedTuple):
    """A measured configuration.

    Attributes:
        configuration: a configuration of the space.
        cost: seconds, or another value to minimize, above 0; infinity if the configuration does not
            compile, gives wrong results, or times out.
    """

    configuration: Configuration
    cost: float


class Searcher(ABC):
    """Chooses what to measure next. Equal seeds and costs give equal searches.

    Ask for as many configurations as can be measured in parallel, and tell the cost of each, in any
    order. To continue a search in another process, create a searcher with the same arguments and
    pass the trials to `resume`.

    Args:
        space: the space to search.
        seed: seed of all random choices.
        first: configurations of the first round, such as the best ones of a similar kernel.

    Attributes:
        space: the space to search.
        trials: all trials, in the order of `tell`.

    Raises:
        SpaceError: a configuration of `first` is not in the space.
    """

    waits: ClassVar[bool] = True
    """Whether a round starts only after `tell` has recorded all costs of the previous round."""

    def __init__(
        self, space: SearchSpace, *, seed: int = 0, first: Sequence[Configuration] = ()
    ) -> None:
        for configuration in first:
            _check(configuration, space)
        self.space = space
        self.trials: list[Trial] = []
        self._random = random.Random(seed)  # noqa: S311 - not used for a secret
        self._first = list(dict.fromkeys(first))
        self._costs: dict[Configuration, float] = {}  # the first cost of each configuration
        self._visited: set[Configuration] = set()  # proposed, or passed to `_learn`
        self._round: list[Configuration] = []
        self._missing: set[Configuration] = set()  # of the round, without a cost
        self._unasked: deque[Configuration] = deque()
        self._unproposed: list[Trial] = []  # recorded in this round, never proposed
        self._rest: list[Configuration] = []  # shuffled; filled when few are unvisited
        self._ended = False

    @property
    def best(self) -> Trial | None:
        """The first trial of the lowest cost so far. None if no configuration has worked."""
        finite = (trial for trial in self.trials if math.isfinite(trial.cost))
        return min(finite, key=lambda trial: trial.cost, default=None)

    def ask(self, count: int = 1) -> list[Configuration]:
        """Return up to `count` configurations that were not returned or told before.

        Returns fewer if the next round needs costs that are still missing, or if the space has no
        more configurations.
        """
        chosen: list[Configuration] = []
        while len(chosen) < count:
            if not self._unasked and not self._next_round():
                break
            if (found := self._unasked.popleft()) not in self._costs:
                chosen.append(found)
        return chosen

    def tell(self, configuration: Configuration, cost: float) -> None:
        """Record the cost of a configuration, which `ask` need not have returned.

        The searcher learns only from the first cost of each configuration. `best` compares all.

        Raises:
            SpaceError: the configuration is not in the space.
            CostError: the cost is not a number above 0.
        """
        _check(configuration, self.space)
        trial = Trial(configuration, _cost(configuration, cost))
        while self.waits and not self._missing and self._next_round():
            pass  # begin the round first, as `ask` did in a search that is resumed
        self.trials.append(trial)
        if configuration in self._costs:
            return
        self._costs[configuration] = trial.cost
        if configuration in self._missing:
            self._missing.remove(configuration)
        elif configuration not in self._visited:
            self._unproposed.append(trial)

    def resume(self, trials: Iterable[Trial]) -> None:
        """Continue a search from its trials, as if it had never stopped.

        `ask` returns configurations without a trial again.

        Raises:
            SpaceError, CostError: as `tell`.
        """
        for trial in trials:
            self.tell(*trial)

    @abstractmethod
    def _propose(self) -> list[Configuration]:
        """Return a round of distinct configurations outside `_visited`. Empty if none is left."""

    def _learn(self, trials: list[Trial]) -> None:  # noqa: B027 - optional
        """Learn from a round, in order of proposal, and then from trials that no round proposed."""

    def _next_round(self) -> bool:
        if self._ended or (self.waits and self._missing):
            return False
        if self.waits:
            trials = [Trial(each, self._costs[each]) for each in self._round]
            trials += self._unproposed
            self._visited.update(trial.configuration for trial in self._unproposed)
            self._unproposed.clear()
            if trials:
                self._learn(trials)
        self._round, self._first = self._first or self._propose(), []
        self._visited.update(self._round)
        self._unasked.extend(self._round)
        self._missing.update(each for each in self._round if each not in self._costs)
        self._ended = not self._round
        return not self._ended

    def _begin(self, starts: int) -> None:
        """Set the first round, unless the caller chose it: `starts` random configurations, or the
        start of the space if `starts` is 0.
        """
        if not self._first:
            self._first = self._unvisited(starts) if starts > 0 else [self.space.start]

    def _unvisited(self, count: int) -> list[Configuration]:
        """Return `count` random unvisited configurations, or fewer if fewer exist.

        The caller must propose all of them, because they may not be returned again.
        """
        found: dict[Configuration, None] = {}
        tries = 0 if self._rest else 20 * count
        for _ in range(tries):
            drawn = self.space.draw(self._random)
            if drawn not in self._visited:
                found[drawn] = None
                if len(found) == count:
                    return list(found)
        if not self._rest:  # draws rarely find an unvisited configuration
            self._rest = [each for each in self.space if each not in self._visited]
            self._random.shuffle(self._rest)
        while self._rest and len(found) < count:
            if (left := self._rest.pop()) not in self._visited:
                found[left] = None
        return list(found)


def _check(configuration: object, space: SearchSpace) -> None:
    if configuration not in space:
        raise SpaceError(f"{configuration!r} is not in the space of {', '.join(space.names)}")


def _cost(configuration: Configuration, cost: Any) -> float:
    try:
        is_number = isinstance(cost, Real) and not isinstance(cost, bool)
        found = float(cost) if is_number else math.nan
        if found > 0:  # excludes NaN
            return found
    except OverflowError:
        pass
    raise CostError(
        f"the cost of {configuration} is {cost!r}: it must be a number above 0, or infinity for a "
        "configuration that does not work"
    )
