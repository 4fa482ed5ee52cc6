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
"""Value of a parameter that only other entries of the list have."""


class ListedSpace(SearchSpace):
    """A compiler's candidates, and the parameters that distinguish them; without neighbours.

    Args:
        kind: kind of the listed things, for hosts that share measurements.
        things: one or more things, each with its parameters by name. A value that is not plain is
            identified by its `repr`. Of equal entries, the first is used.
    """

    moves = 0

    def __init__(self, kind: str, things: Iterable[tuple[Mapping[str, object], Any]]) -> None:
        entries = list(things)
        self.names = tuple(sorted({name for parameters, _ in entries for name in parameters}))
        self._kind = kind
        self._things: dict[Configuration, Any] = {}
        self._types: dict[Configuration, list[type]] = {}
        for parameters, thing in entries:
            row = tuple(_plain(parameters.get(name, _ABSENT)) for name in self.names)
            self._things.setdefault(row, thing)
            self._types.setdefault(row, [*map(type, row)])

    @property
    def size(self) -> int:
        """Number of things."""
        return len(self._things)

    @property
    def start(self) -> Configuration:
        """The first thing of the list."""
        return next(iter(self))

    def __contains__(self, configuration: object) -> bool:
        return configuration in self._things

    def __iter__(self) -> Iterator[Configuration]:
        return iter(self._things)

    def thing(self, configuration: Configuration) -> Any:
        """Return the thing of a configuration."""
        return self._things[configuration]

    def draw(self, random: Random) -> Configuration:
        """Draw a configuration."""
        return random.choice(list(self))

    def moved(self, configuration: Configuration, move: int) -> None:
        """Return None: there are no moves."""

    def has_types(self, configuration: Configuration) -> bool:
        """Return whether the list has the configuration with values of these types."""
        return [*map(type, configuration)] == self._types[configuration]

    def features(self, configuration: Configuration) -> Sequence[float]:
        """Return logarithms of the numbers, relative to 2**16; 0 for texts."""
        return [
            0.0 if isinstance(each, str) else math.log2(abs(each) + 1) / 16
            for each in configuration
        ]

    def describe(self) -> dict[str, Any]:
        """Return the list as JSON, independent of its order."""
        rows = sorted(json.dumps(row) for row in self)
        listed = hashlib.sha256("\n".join(rows).encode()).hexdigest()
        return {"space": self._kind, "names": list(self.names), "rows": listed}


def _plain(value: object) -> Value:
    return value if isinstance(value, int | float | str | bool) else repr(value)
