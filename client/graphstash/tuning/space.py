"""Search spaces: the configurations of a kernel, and the moves between neighbours.

A configuration is a tuple of values in the order of the space's parameters, so it is hashable and
short in JSON. A move changes a configuration into a neighbour. The moves are numbered from 0, and
every configuration has the same numbers, because a policy network has one output per move. A move
may be illegal for some configurations.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from graphstash.errors import GraphstashError

__all__ = ["MAX_COST", "Configuration", "EmptySpaceError", "SearchSpace", "SpaceError", "Value"]

MAX_COST: Final = 1e18
"""Maximum cost, in seconds or a target's own unit such as cycles. Sums of costs stay finite."""

Value: TypeAlias = int | float | str | bool
"""Value of one parameter."""

Configuration: TypeAlias = tuple[Value, ...]
"""A value for every parameter, in the order of `SearchSpace.names`."""


class SpaceError(GraphstashError, ValueError):
    """A search space is invalid, or a given configuration is not in it."""


class EmptySpaceError(SpaceError):
    """A search space has no configuration: a parameter has no values, or constraints conflict."""


class SearchSpace(ABC):
    """The configurations of a kernel.

    Attributes:
        names: names of the parameters.
        moves: number of moves. A move is a number from 0 to `moves` - 1.
    """

    names: tuple[str, ...]
    moves: int

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of configurations, 1 or more."""

    @property
    @abstractmethod
    def start(self) -> Configuration:
        """Starting configuration of a search that has no results yet."""

    @abstractmethod
    def __contains__(self, configuration: object) -> bool:
        """Return whether the space contains the configuration."""

    @abstractmethod
    def __iter__(self) -> Iterator[Configuration]:
        """Yield all configurations lazily, always in the same order."""

    @abstractmethod
    def draw(self, random: random.Random) -> Configuration:
        """Draw a configuration. All configurations have the same probability."""

    @abstractmethod
    def moved(self, configuration: Configuration, move: int) -> Configuration | None:
        """Return the neighbour that a move leads to, or None if the move is illegal."""

    @abstractmethod
    def features(self, configuration: Configuration) -> Sequence[float]:
        """Return input for a model: numbers from about -1 to 1, equally many for all
        configurations.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return JSON that identifies the space; a part of the keys of stored measurements."""

    def neighbours(self, configuration: Configuration) -> list[Configuration]:
        """Return the configurations one legal move away, each once, in the order of moves."""
        found = (self.moved(configuration, move) for move in range(self.moves))
        return list(dict.fromkeys(each for each in found if each is not None))

    def has_types(self, configuration: Configuration) -> bool:
        """Return whether the values of a configuration of the space have the space's types.

        `in` does not check this, because 1, 1.0 and True are equal. Default: the types in `start`.
        """
        return all(type(a) is type(b) for a, b in zip(configuration, self.start, strict=True))

    def named(self, configuration: Configuration) -> dict[str, Value]:
        """Return the values by the names of their parameters."""
        return dict(zip(self.names, configuration, strict=True))

    def configuration(self, values: Mapping[str, Value]) -> Configuration:
        """Return the configuration with these values; the inverse of `named`.

        Raises:
            SpaceError: a parameter is missing or unknown, or the space lacks the configuration.
        """
        if set(values) != set(self.names):
            raise SpaceError(
                f"the parameters {sorted(values)} are not those of the space: {sorted(self.names)}"
            )
        found = tuple(values[name] for name in self.names)
        if found not in self:
            raise SpaceError(f"{dict(values)} is not in the space: see its constraints")
        return found
