"""Named parameters with lists of values, and constraints between them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from graphstash.tuning.space import Configuration, EmptySpaceError, SpaceError, Value
from graphstash.tuning.spaces.constraints import Constraint
from graphstash.tuning.spaces.tree import TreeSpace

__all__ = ["ParameterSpace", "check_names", "check_values"]

MAX_PARAMETERS: Final = 100
MAX_VALUES: Final = 10_000
"""Maximum values of one parameter."""

MAX_PREFIXES: Final = 200_000
"""Maximum prefixes of configurations to remember while counting a space; about 100 MB."""

MAX_TRIED: Final = 1_000_000
"""Maximum values to try after all these prefixes together; about 3 seconds."""


class ParameterSpace(TreeSpace):
    """The combinations of parameter values that satisfy the constraints.

    A move takes one parameter to the previous or next value in its list, or swaps the values of two
    parameters with equal lists. A move is illegal if it changes nothing or a constraint excludes
    the result. The space is counted, not listed: 17,956 configurations among billions of
    combinations take a second.

    Args:
        parameters: values by name, ordered so that neighbours are alike.
        constraints: conditions that every configuration satisfies; see `Constraint`.

    Raises:
        EmptySpaceError: no configuration satisfies the constraints; the message names the cause.
        SpaceError: a name, value or constraint is invalid, or the constraints connect too many
            parameters to count the space.
    """

    def __init__(
        self, parameters: Mapping[str, Sequence[Value]], constraints: Iterable[str] = ()
    ) -> None:
        self.names = check_names(parameters)
        self.values = tuple(check_values(name, values) for name, values in parameters.items())
        if isinstance(constraints, str):
            raise SpaceError(f"constraints is {constraints!r}: it must be a list of texts")
        self.constraints = tuple(Constraint(text) for text in constraints)
        for constraint in self.constraints:
            if unknown := constraint.names - set(self.names):
                raise SpaceError(
                    f"the constraint {constraint.text!r} names {sorted(unknown)}, "
                    f"which are not among the parameters {sorted(self.names)}"
                )
        self._tree = _PrefixCounter(self.names, self.values, self.constraints)
        if not self._tree.after(()):
            raise EmptySpaceError(self._explain_contradiction())
        self._swaps = [
            (i, j)
            for i, j in combinations(range(len(self.names)), 2)
            if self.values[i] == self.values[j] and len(self.values[i]) > 1
        ]
        self.moves = 2 * len(self.names) + len(self._swaps)

    def __contains__(self, configuration: object) -> bool:
        if not self._fits(configuration):
            return False
        named = self.named(configuration)
        return all(constraint.holds(named) for constraint in self.constraints)

    def continuations(self, prefix: Configuration) -> Mapping[Value, int]:
        """Return the next parameter's values, with the number of configurations below each."""
        return self._tree.after(prefix)

    def moved(self, configuration: Configuration, move: int) -> Configuration | None:
        """Return the neighbour that a move leads to, or None if the move is illegal.

        Below twice the number of parameters, even moves go to a parameter's previous value, and odd
        moves to its next; the rest are swaps.
        """
        changed = list(configuration)
        if move < 2 * len(self.names):
            which, up = divmod(move, 2)
            values = self.values[which]
            place = values.index(configuration[which]) + (1 if up else -1)
            if not 0 <= place < len(values):
                return None
            changed[which] = values[place]
        else:
            i, j = self._swaps[move - 2 * len(self.names)]
            if changed[i] == changed[j]:
                return None
            changed[i], changed[j] = changed[j], changed[i]
        found = tuple(changed)
        return found if found in self else None

    def describe(self) -> dict[str, Any]:
        """Return the space as JSON."""
        return {
            "space": "parameters",
            "parameters": [
                {"name": name, "values": list(values)}
                for name, values in zip(self.names, self.values, strict=True)
            ],
            "constraints": [constraint.text for constraint in self.constraints],
        }

    def _explain_contradiction(self) -> str:
        alone = [each.text for each in self.constraints if self._holds_without(each)]
        return "no configuration satisfies the constraints: " + (
            f"without one of {alone} there are some"
            if alone
            else "several of them contradict each other, or the values"
        )

    def _holds_without(self, constraint: Constraint) -> bool:
        """Return whether the other constraints can hold; False if the search exceeds its limit."""
        others = [each for each in self.constraints if each is not constraint]
        most = MAX_TRIED // len(self.constraints)
        try:
            return bool(_PrefixCounter(self.names, self.values, others, most_tried=most).after(()))
        except SpaceError:
            return False


class _PrefixCounter:
    """Counts configurations by prefix.

    Prefixes of equal length have the same continuations if they agree in the parameters of the
    constraints that are not decided yet. Each such class is counted once.
    """

    def __init__(
        self,
        names: Sequence[str],
        values: Sequence[Sequence[Value]],
        constraints: Sequence[Constraint],
        *,
        most_tried: int = MAX_TRIED,
    ) -> None:
        self._left = most_tried
        self._names = names
        self._values = values
        place = {name: i for i, name in enumerate(names)}
        uses = [(each, sorted(place[name] for name in each.names)) for each in constraints]
        self._decided = [[each for each, used in uses if used[-1] == i] for i in range(len(names))]
        self._open = [
            sorted({j for _, used in uses if used[-1] >= i for j in used if j < i})
            for i in range(len(names))
        ]
        self._known: dict[tuple[int, Configuration], dict[Value, int]] = {}

    def after(self, prefix: Configuration) -> dict[Value, int]:
        """Return the values that may follow, with the number of configurations below each."""
        i = len(prefix)
        key = (i, tuple(prefix[j] for j in self._open[i]))
        if (known := self._known.get(key)) is not None:
            return known
        self._left -= len(self._values[i])
        if len(self._known) >= MAX_PREFIXES or self._left < 0:
            raise SpaceError(
                f"the constraints tie the parameters together in more than {MAX_PREFIXES} ways, or "
                f"have more than {MAX_TRIED} combinations of values: put parameters that share "
                "constraints next to each other, give them fewer values, or list the valid "
                "configurations in a TableSpace"
            )
        found: dict[Value, int] = {}
        named = dict(zip(self._names, prefix, strict=False))
        for value in self._values[i]:
            named[self._names[i]] = value
            if all(constraint.holds(named) for constraint in self._decided[i]):
                longer = (*prefix, value)
                count = sum(self.after(longer).values()) if len(longer) < len(self._names) else 1
                if count:
                    found[value] = count
        self._known[key] = found
        return found


def check_names(names: Iterable[Any]) -> tuple[str, ...]:
    """Return valid parameter names: distinct, and usable in constraints."""
    found = tuple(names)
    if not 1 <= len(found) <= MAX_PARAMETERS:
        error = SpaceError if found else EmptySpaceError
        raise error(f"there are {len(found)} parameters: it must be 1 to {MAX_PARAMETERS}")
    for name in found:
        if not isinstance(name, str) or not name.isidentifier() or len(name) > 100:
            raise SpaceError(
                f"{name!r} cannot be the name of a parameter: it must be letters, digits and _, "
                "at most 100, not a digit first"
            )
    if len(set(found)) < len(found):
        raise SpaceError(f"two parameters have the same name: {list(found)}")
    return found


def check_values(name: str, values: Iterable[Value]) -> tuple[Value, ...]:
    """Return valid parameter values: distinct texts, booleans and finite numbers."""
    if isinstance(values, str):
        raise SpaceError(f"the values of {name} are {values!r}: they must be a list")
    found = tuple(values)
    if not found:
        raise EmptySpaceError(f"{name} has no values")
    if len(found) > MAX_VALUES:
        raise SpaceError(f"{name} has {len(found)} values: at most {MAX_VALUES} can be searched")
    for value in found:
        if type(value) not in {bool, int, float, str} or (
            isinstance(value, float) and not math.isfinite(value)
        ):
            raise SpaceError(
                f"{value!r} cannot be a value of {name}: it must be a text, a boolean or a finite "
                "number"
            )
    if len(set(found)) < len(found):
        raise SpaceError(f"two values of {name} are equal: {list(found)[:20]}")
    return found
