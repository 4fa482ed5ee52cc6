"""A space of a compiler's own candidates, such as `triton.Config`s."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, Final

from graphstash.tuning.space import Configuration, SearchSpace, Value

__all__ = ["ListedSpace"]

_ABSENT: Final = "-"
"""Value of a parameter that an entry lacks."""


class ListedSpace(SearchSpace):
    """A compiler's candidates, identified by their parameters; without moves.

    Args:
        kind: kind of the candidates; part of `describe`.
        things: one or more candidates, each after its parameters by name. The `repr` stands for a
            value that is not plain. Of candidates with equal parameters, only the first is used.
    """

    moves = 0

    def __init__(self, kind: str, things: Iterable[tuple[Mapping[str, object], Any]]) -> None:
        entries = list(things)
        self.names = tuple(sorted({name for parameters, _ in entries for name in parameters}))
        self._kind = kind
        self._things: dict[Configuration, Any] = {}
        self._types: dict[Configuration, list[type]] = {}
        for parameters, thing in entries:
            row = tuple(_to_value(parameters.get(name, _ABSENT)) for name in self.names)
            self._things.setdefault(row, thing)
            self._types.setdefault(row, [*map(type, row)])

    @property
    def size(self) -> int:
        """Number of distinct candidates."""
        return len(self._things)

    @property
    def start(self) -> Configuration:
        """The first candidate."""
        return next(iter(self))

    def __contains__(self, configuration: object) -> bool:
        return configuration in self._things

    def __iter__(self) -> Iterator[Configuration]:
        return iter(self._things)

    def thing(self, configuration: Configuration) -> Any:
        """Return the candidate of a configuration."""
        return self._things[configuration]

    def draw(self, random: Random) -> Configuration:
        """Draw a configuration."""
        return random.choice(list(self))

    def moved(self, configuration: Configuration, move: int) -> None:
        """Return None: there are no moves."""

    def has_types(self, configuration: Configuration) -> bool:
        """Return whether the values have the types of the listed entry."""
        return [*map(type, configuration)] == self._types[configuration]

    def features(self, configuration: Configuration) -> Sequence[float]:
        """Return log2(abs(value) + 1) / 16 of numbers, and 0 for texts."""
        return [
            0.0 if isinstance(each, str) else math.log2(abs(each) + 1) / 16
            for each in configuration
        ]

    def describe(self) -> dict[str, Any]:
        """Return JSON that identifies the candidates in any order."""
        rows = sorted(json.dumps(row) for row in self)
        listed = hashlib.sha256("\n".join(rows).encode()).hexdigest()
        return {"space": self._kind, "names": list(self.names), "rows": listed}


def _to_value(value: object) -> Value:
    return value if isinstance(value, int | float | str | bool) else repr(value)
