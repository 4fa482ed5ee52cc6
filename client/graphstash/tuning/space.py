"""Search spaces: which configurations a kernel can have, and which lie next to each other.

A configuration is a tuple of values in the order of the space's parameters, so it is a key of
dictionaries and short in JSON. A *move* changes one into a neighbour. Each space numbers its moves,
the same for all of its configurations: a policy network needs that.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from graphstash.errors import GraphstashError

__all__ = ["MAX_COST", "Configuration", "EmptySpaceError", "SearchSpace", "SpaceError", "Value"]

MAX_COST: Final = 1e18
"""Of a configuration, in seconds or a target's own unit: room for whoever counts cycles or bytes,
and little enough to be added."""

Value: TypeAlias = int | float | str | bool
"""Of one parameter."""

Configuration: TypeAlias = tuple[Value, ...]
"""A value for every parameter, in the order of `SearchSpace.names`."""


class SpaceError(GraphstashError, ValueError):
    """A search space cannot be used as it is written, or has no such configuration."""


class EmptySpaceError(SpaceError):
    """A search space has no configuration: a parameter without values, or a contradiction."""


class SearchSpace(ABC):
    """The configurations of a kernel.

    Attributes:
        names: of the parameters.
        moves: how many there are; a move is a number below it.
    """

    names: tuple[str, ...]
    moves: int

    @property
    @abstractmethod
    def size(self) -> int:
        """How many configurations there are, 1 or more."""

    @property
    @abstractmethod
    def start(self) -> Configuration:
        """Where a search begins that knows nothing."""

    @abstractmethod
    def __contains__(self, configuration: object) -> bool:
        """Whether this is one of them."""

    @abstractmethod
    def __iter__(self) -> Iterator[Configuration]:
        """All of them, lazily, always in the same order."""

    @abstractmethod
    def draw(self, random: random.Random) -> Configuration:
        """One of them, each with the same probability."""

    @abstractmethod
    def moved(self, configuration: Configuration, move: int) -> Configuration | None:
        """The neighbour that a move leads to; None where the move is illegal."""

    @abstractmethod
    def features(self, configuration: Configuration) -> Sequence[float]:
        """What a model learns from: numbers of about -1 to 1, as many for each configuration."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The space as JSON: equal for equal spaces, part of what a measurement is stored under."""

    def neighbours(self, configuration: Configuration) -> list[Configuration]:
        """Where one legal move leads to, in the order of the moves and each once."""
        found = (self.moved(configuration, move) for move in range(self.moves))
        return list(dict.fromkeys(each for each in found if each is not None))

    def has_types(self, configuration: Configuration) -> bool:
        """Whether the values of a configuration of the space have also the types in which the space
        writes them, by default those of `start`: 1, 1.0 and True are equal.
        """
        return all(type(a) is type(b) for a, b in zip(configuration, self.start, strict=True))

    def named(self, configuration: Configuration) -> dict[str, Value]:
        """The values under the names of their parameters."""
        return dict(zip(self.names, configuration, strict=True))

    def configuration(self, values: Mapping[str, Value]) -> Configuration:
        """The opposite of `named`.

        Raises:
            SpaceError: when a parameter is missing or unknown, or the space has no such
                configuration.
        """
        if set(values) != set(self.names):
            raise SpaceError(
                f"the parameters {sorted(values)} are not those of the space: {sorted(self.names)}"
            )
        found = tuple(values[name] for name in self.names)
        if found not in self:
            raise SpaceError(f"{dict(values)} is not in the space: see its constraints")
        return found
