"""Spaces whose configurations are chosen value by value.

Such a space counts the configurations that start with given values. The counts suffice to list the
space, to draw from it uniformly without a list, and to let a controller choose value by value.
"""

import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeGuard

from graphstash.tuning.space import Configuration, SearchSpace, Value

__all__ = ["TreeSpace"]


class TreeSpace(SearchSpace):
    """A space that counts the configurations with a prefix.

    Attributes:
        values: possible values of each parameter, with neighbours side by side. Some combinations
            are not configurations.
    """

    values: tuple[tuple[Value, ...], ...]

    @abstractmethod
    def continuations(self, prefix: Configuration) -> Mapping[Value, int]:
        """Return the values that may follow a prefix, with their numbers of configurations."""

    @cached_property
    def size(self) -> int:
        """Number of configurations."""
        return sum(self.continuations(()).values())

    @property
    def start(self) -> Configuration:
        """The configuration that takes each value as near to the middle of its list as possible."""
        chosen: Configuration = ()
        for values in self.values:
            there = self.continuations(chosen)
            middle = (len(values) - 1) / 2
            near = sorted(range(len(values)), key=lambda place: abs(place - middle))
            chosen += (next(values[place] for place in near if values[place] in there),)
        return chosen

    def __iter__(self) -> Iterator[Configuration]:
        return self._below(())

    def _below(self, prefix: Configuration) -> Iterator[Configuration]:
        if len(prefix) == len(self.names):
            yield prefix
            return
        for value in self.continuations(prefix):
            yield from self._below((*prefix, value))

    def draw(self, random: random.Random) -> Configuration:
        """Draw one configuration, each with the same probability."""
        index = random.randrange(self.size)
        chosen: Configuration = ()
        while len(chosen) < len(self.names):
            for value, count in self.continuations(chosen).items():
                if index < count:
                    chosen += (value,)
                    break
                index -= count
        return chosen

    def features(self, configuration: Configuration) -> Sequence[float]:
        """Return the place of each value in its list, scaled to -1 to 1."""
        return [
            scaled[value] for scaled, value in zip(self._scaled_places, configuration, strict=True)
        ]

    @cached_property
    def _scaled_places(self) -> list[dict[Value, float]]:
        return [
            {value: 2 * place / max(1, len(each) - 1) - 1 for place, value in enumerate(each)}
            for each in self.values
        ]

    def _fits(self, configuration: object) -> TypeGuard[Configuration]:
        """Return whether this is a tuple of listed values. True is not 1, but 1.0 is."""
        return (
            isinstance(configuration, tuple)
            and len(configuration) == len(self.names)
            and all(
                isinstance(value, int | float | str)
                and value in listed
                and (listed[value] is bool) is isinstance(value, bool)
                for value, listed in zip(configuration, self._types, strict=True)
            )
        )

    def has_types(self, configuration: Configuration) -> bool:
        """Return whether each value has the type of the listed value."""
        return all(
            listed[value] is type(value)
            for value, listed in zip(configuration, self._types, strict=True)
        )

    @cached_property
    def _types(self) -> list[dict[Value, type]]:
        return [{value: type(value) for value in each} for each in self.values]
