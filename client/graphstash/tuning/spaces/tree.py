"""Spaces whose configurations are chosen one value after the other.

Such a space knows how many configurations begin with given values. That is enough to list it, to
draw from it uniformly without a list, and to let a controller choose value by value.
"""

import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeGuard

from graphstash.tuning.space import Configuration, SearchSpace, Value

__all__ = ["TreeSpace"]


class TreeSpace(SearchSpace):
    """A space that counts what follows a prefix.

    Attributes:
        values: what each parameter may be, in order, neighbours next to each other; not every
            combination is a configuration.
    """

    values: tuple[tuple[Value, ...], ...]

    @abstractmethod
    def continuations(self, prefix: Configuration) -> Mapping[Value, int]:
        """What the next parameter can be after these values, and how many configurations begin
        with each. Values without any are left out.
        """

    @cached_property
    def size(self) -> int:
        """How many configurations there are."""
        return sum(self.continuations(()).values())

    @property
    def start(self) -> Configuration:
        """Next to the middle of every list, from the first parameter on."""
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
        """One configuration, each with the same probability."""
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
        """The place of each value in its list, from -1 to 1."""
        return [scaled[value] for scaled, value in zip(self._scaled, configuration, strict=True)]

    @cached_property
    def _scaled(self) -> list[dict[Value, float]]:
        return [
            {value: 2 * place / max(1, len(each) - 1) - 1 for place, value in enumerate(each)}
            for each in self.values
        ]

    def _fits(self, configuration: object) -> TypeGuard[Configuration]:
        """Whether this is a tuple of listed values; True is not 1."""
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
        """Whether each value is one of its parameter's list also by its type."""
        return all(
            listed[value] is type(value)
            for value, listed in zip(configuration, self._types, strict=True)
        )

    @cached_property
    def _types(self) -> list[dict[Value, type]]:
        return [{value: type(value) for value in each} for each in self.values]
