"""The common part of searchers: `ask` returns configurations, `tell` takes their costs.

A search proceeds in rounds. A round's proposal depends only on the seed and on the trials told
until the previous round was complete. It does not depend on how many are asked for at once, nor on
the order of costs within a round. Trials alone therefore suffice to continue a search in another
process.
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
    tell it the trials (`resume`).

    Args:
        space: the space to search.
        seed: seed of every choice.
        first: measured before anything else, such as the best configurations of a similar kernel.

    Attributes:
        space: the space to search.
        trials: trials in the order of telling.

    Raises:
        SpaceError: a configuration of `first` is not in the space.
    """

    waits: ClassVar[bool] = True
    """Whether a round starts only after all costs of the previous round were told."""

    def __init__(
        self, space: SearchSpace, *, seed: int = 0, first: Sequence[Configuration] = ()
    ) -> None:
        for configuration in first:
            _check(configuration, space)
        self.space = space
        self.trials: list[Trial] = []
        self._random = random.Random(seed)  # noqa: S311 - of a search, not of a secret
        self._first = list(dict.fromkeys(first))
        self._costs: dict[Configuration, float] = {}  # the first cost told for each configuration
        self._visited: set[Configuration] = set()  # proposed in a round, or learned from
        self._round: list[Configuration] = []
        self._missing: set[Configuration] = set()  # of the round, cost not told yet
        self._unasked: deque[Configuration] = deque()
        self._uninvited: list[Trial] = []  # told during the round, but not proposed in it
        self._rest: list[Configuration] = []  # shuffled; empty until few are left
        self._ended = False

    @property
    def best(self) -> Trial | None:
        """The cheapest trial so far, the first of equals; None if nothing has worked."""
        works = (trial for trial in self.trials if math.isfinite(trial.cost))
        return min(works, key=lambda trial: trial.cost, default=None)

    def ask(self, count: int = 1) -> list[Configuration]:
        """Return up to `count` configurations that were neither asked for nor told before.

        Returns fewer if the searcher needs costs of others first, and none if the space has no
        further configuration.
        """
        chosen: list[Configuration] = []
        while len(chosen) < count:
            if not self._unasked and not self._next_round():
                break
            if (found := self._unasked.popleft()) not in self._costs:
                chosen.append(found)
        return chosen

    def tell(self, configuration: Configuration, cost: float) -> None:
        """Record the cost of a configuration, asked for or not; see `Trial`.

        The searcher learns from the first cost of each configuration; `best` uses all.

        Raises:
            SpaceError: the configuration is not in the space.
            CostError: the cost is not a number above 0.
        """
        _check(configuration, self.space)
        trial = Trial(configuration, _cost(configuration, cost))
        while self.waits and not self._missing and self._next_round():
            pass  # assign the trial to the round that would have asked for it
        self.trials.append(trial)
        if configuration in self._costs:
            return
        self._costs[configuration] = trial.cost
        if configuration in self._missing:
            self._missing.remove(configuration)
        elif configuration not in self._visited:
            self._uninvited.append(trial)

    def resume(self, trials: Iterable[Trial]) -> None:
        """Continue a search from its trials, as if it had never stopped.

        Configurations that were asked for but not told are asked for again.

        Raises:
            SpaceError, CostError: as `tell`.
        """
        for trial in trials:
            self.tell(*trial)

    @abstractmethod
    def _propose(self) -> list[Configuration]:
        """Return a round of distinct configurations outside `_visited`; empty if none is left."""

    def _learn(self, trials: list[Trial]) -> None:  # noqa: B027 - optional
        """Learn from a round, in order of proposal, and from trials that were not proposed."""

    def _next_round(self) -> bool:
        if self._ended or (self.waits and self._missing):
            return False
        if self.waits:
            told = [Trial(each, self._costs[each]) for each in self._round]
            told += self._uninvited
            self._visited.update(trial.configuration for trial in self._uninvited)
            self._uninvited.clear()
            if told:
                self._learn(told)
        self._round, self._first = self._first or self._propose(), []
        self._visited.update(self._round)
        self._unasked.extend(self._round)
        self._missing.update(each for each in self._round if each not in self._costs)
        self._ended = not self._round
        return not self._ended

    def _begin(self, starts: int) -> None:
        """Choose the first round if the caller did not: random configurations, or the start."""
        if not self._first:
            self._first = self._unvisited(starts) if starts > 0 else [self.space.start]

    def _unvisited(self, count: int) -> list[Configuration]:
        """Return `count` random unvisited configurations, or fewer if fewer exist.

        The caller must propose them.
        """
        found: dict[Configuration, None] = {}
        tries = 0 if self._rest else 20 * count
        for _ in range(tries):
            drawn = self.space.draw(self._random)
            if drawn not in self._visited:
                found[drawn] = None
                if len(found) == count:
                    return list(found)
        if not self._rest:  # nearly everything is visited: list the rest
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
