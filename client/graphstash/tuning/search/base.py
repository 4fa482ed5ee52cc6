"""What every searcher does: it is asked for configurations and told what they cost.

A search goes in rounds. What a round proposes depends on the seed and on what was told until all of
the round before was told, and on nothing else: neither on how many are asked for at once nor on the
order in which a round's costs arrive. So a search continues in another process, where it stopped,
from its trials alone.
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
    """A cost is not a number above 0, or infinity for a configuration that does not work."""


class Trial(NamedTuple):
    """A configuration that was measured.

    Attributes:
        configuration: of the space.
        cost: seconds, or whatever else is to be small, above 0; infinity for one that does not
            compile, gives wrong results, or runs out of time.
    """

    configuration: Configuration
    cost: float


class Searcher(ABC):
    """Chooses what to measure next. The same seed and the same costs give the same search.

    Ask for as many as can be measured side by side, and tell each of them, in any order. A search
    continues in another process by telling a new searcher, made with the same arguments, what was
    measured (`resume`).

    Args:
        space: what is searched.
        seed: of every choice.
        first: measured before anything else, such as the best ones of a similar kernel.

    Attributes:
        space: what is searched.
        trials: what was told, in the order of telling.

    Raises:
        SpaceError: when one of `first` is not in the space.
    """

    waits: ClassVar[bool] = True
    """Whether a round begins only when all of the one before was told."""

    def __init__(
        self, space: SearchSpace, *, seed: int = 0, first: Sequence[Configuration] = ()
    ) -> None:
        for configuration in first:
            _check(configuration, space)
        self.space = space
        self.trials: list[Trial] = []
        self._random = random.Random(seed)  # noqa: S311 - of a search, not of a secret
        self._first = list(dict.fromkeys(first))
        self._costs: dict[Configuration, float] = {}  # the first that was told of each
        self._visited: set[Configuration] = set()  # proposed in a round, or learned from
        self._round: list[Configuration] = []
        self._missing: set[Configuration] = set()  # of the round, not told yet
        self._unasked: deque[Configuration] = deque()
        self._uninvited: list[Trial] = []  # told during the round, but not of it
        self._rest: list[Configuration] = []  # shuffled; empty until few are left
        self._ended = False

    @property
    def best(self) -> Trial | None:
        """The cheapest so far, the first of equals; None while nothing worked."""
        works = (trial for trial in self.trials if math.isfinite(trial.cost))
        return min(works, key=lambda trial: trial.cost, default=None)

    def ask(self, count: int = 1) -> list[Configuration]:
        """Up to `count` configurations that were neither asked for nor told before. Fewer come
        while the searcher has to be told of others first, none at all also when the space has no
        further one.
        """
        chosen: list[Configuration] = []
        while len(chosen) < count:
            if not self._unasked and not self._next_round():
                break
            if (found := self._unasked.popleft()) not in self._costs:
                chosen.append(found)
        return chosen

    def tell(self, configuration: Configuration, cost: float) -> None:
        """Takes what a configuration costs, asked for or not; see `Trial`. The searcher learns
        from the first cost of each; `best` looks at all.

        Raises:
            SpaceError: when it is not in the space.
            CostError: when the cost is no number above 0.
        """
        _check(configuration, self.space)
        trial = Trial(configuration, _cost(configuration, cost))
        while self.waits and not self._missing and self._next_round():
            pass  # so that the trial counts as of the round in which it would have been asked for
        self.trials.append(trial)
        if configuration in self._costs:
            return
        self._costs[configuration] = trial.cost
        if configuration in self._missing:
            self._missing.remove(configuration)
        elif configuration not in self._visited:
            self._uninvited.append(trial)

    def resume(self, trials: Iterable[Trial]) -> None:
        """Continues a search that measured these, as if it had never ended. What it had asked for
        and was not told is asked for again.

        Raises:
            SpaceError, CostError: as `tell` does.
        """
        for trial in trials:
            self.tell(*trial)

    @abstractmethod
    def _propose(self) -> list[Configuration]:
        """A round: different ones, none of them in `_visited`; empty where the space has none."""

    def _learn(self, trials: list[Trial]) -> None:  # noqa: B027 - not all do
        """Takes a round, in the order in which it was proposed, and what was told uninvited."""

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
        """Chooses the first round where the caller did not: so many at random, or the start."""
        if not self._first:
            self._first = self._unvisited(starts) if starts > 0 else [self.space.start]

    def _unvisited(self, count: int) -> list[Configuration]:
        """So many at random of those that were not visited; fewer where there are fewer. They have
        to be proposed.
        """
        found: dict[Configuration, None] = {}
        tries = 0 if self._rest else 20 * count
        for _ in range(tries):
            drawn = self.space.draw(self._random)
            if drawn not in self._visited:
                found[drawn] = None
                if len(found) == count:
                    return list(found)
        if not self._rest:  # nearly all of the space was visited: what is left can be listed
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
        if found > 0:  # nor NaN
            return found
    except OverflowError:
        pass
    raise CostError(
        f"the cost of {configuration} is {cost!r}: it must be a number above 0, or infinity for a "
        "configuration that does not work"
    )
