"""A space given as a table of its configurations."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from graphstash.tuning.space import Configuration, EmptySpaceError, SpaceError, Value
from graphstash.tuning.spaces.parameters import check_names, check_values
from graphstash.tuning.spaces.tree import TreeSpace

__all__ = ["TableSpace"]


class TableSpace(TreeSpace):
    """The configurations in a table.

    A move changes one parameter to its next smaller or larger value in the table. Values that
    include texts are ordered by first appearance. A move that leaves the table is illegal.

    Args:
        names: names of the parameters.
        rows: the configurations, each a tuple with a value for each name.

    Raises:
        EmptySpaceError: there is no row.
        SpaceError: a row has the wrong length, occurs twice, or has an invalid value; or a
            parameter has equal values of different types, such as 1, 1.0 and True.
    """

    def __init__(self, names: Iterable[str], rows: Iterable[Any]) -> None:
        self.names = check_names(names)
        listed = list(rows)
        if not listed:
            raise EmptySpaceError("the table has no rows")
        for number, row in enumerate(listed):
            if not isinstance(row, tuple) or len(row) != len(self.names):
                raise SpaceError(
                    f"row {number} is {row!r}: it must be a tuple of {len(self.names)} values"
                )
            for name, value in zip(self.names, row, strict=True):
                check_values(name, [value])
        self.values = tuple(
            check_values(name, _sort_numbers(_distinct(column)))
            for name, column in zip(self.names, zip(*listed, strict=True), strict=True)
        )
        self._place = [{value: i for i, value in enumerate(each)} for each in self.values]
        self._rows = sorted(self._places(row) for row in listed)
        self._valid = set(self._rows)
        if len(self._valid) < len(self._rows):
            twice = next(a for a, b in zip(self._rows, self._rows[1:], strict=False) if a == b)
            raise SpaceError(f"the row {self._row(twice)} is in the table twice")
        self._known: dict[Configuration, Mapping[Value, int]] = {}  # by prefix
        self.moves = 2 * len(self.names)

    def __contains__(self, configuration: object) -> bool:
        return self._fits(configuration) and self._places(configuration) in self._valid

    def __iter__(self) -> Iterator[Configuration]:
        return map(self._row, self._rows)

    def continuations(self, prefix: Configuration) -> Mapping[Value, int]:
        """Return the values that may follow a prefix, with their numbers of configurations."""
        if (known := self._known.get(prefix)) is not None:
            return known
        places = self._places(prefix)
        values = self.values[len(prefix)]
        edges = [bisect_left(self._rows, (*places, place)) for place in range(len(values) + 1)]
        found = self._known[prefix] = {
            value: end - start
            for value, start, end in zip(values, edges[:-1], edges[1:], strict=True)
            if end > start
        }
        return found

    def moved(self, configuration: Configuration, move: int) -> Configuration | None:
        """Move a parameter to its previous value (even moves) or to its next value (odd moves)."""
        which, up = divmod(move, 2)
        places = list(self._places(configuration))
        places[which] += 1 if up else -1
        found = tuple(places)
        return self._row(found) if found in self._valid else None

    def describe(self) -> dict[str, Any]:
        """Return the space as JSON."""
        return {"space": "table", "names": list(self.names), "rows": [list(row) for row in self]}

    def _places(self, configuration: Configuration) -> tuple[int, ...]:
        return tuple(place[value] for place, value in zip(self._place, configuration, strict=False))

    def _row(self, places: tuple[int, ...]) -> Configuration:
        return tuple(values[place] for values, place in zip(self.values, places, strict=True))


def _distinct(values: Iterable[Value]) -> list[Value]:
    """Return distinct values; 1, 1.0 and True are distinct."""
    return [value for _, value in dict.fromkeys((type(value), value) for value in values)]


def _sort_numbers(values: Iterable[Value]) -> list[Value]:
    """Sort the values if all are numbers; otherwise keep their order."""
    found = list(values)
    numbers = [each for each in found if isinstance(each, int | float)]
    return sorted(numbers) if len(numbers) == len(found) else found
