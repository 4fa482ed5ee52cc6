"""Problems for searchers: lattices with synthetic costs, and tables of earlier measurements.

A problem that is measured during the search needs only `Problem(name, space, measure)`.
"""

import csv
import gzip
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from graphstash.tuning import GemmSpace, SearchSpace, TableSpace
from graphstash.tuning.space import Configuration
from support.tuning_costs import COSTS


@dataclass
class Problem:
    """A tuning problem.

    Attributes:
        name: name in the report.
        space: space to search.
        measure: the cost of a configuration; infinity if it does not work.
        optimum: the lowest cost of all, if it is known.
        compare: the costs of configurations that are measured against each other, if a cost is not
            exact; None if it is.
    """

    name: str
    space: SearchSpace
    measure: Callable[[Configuration], float]
    optimum: float | None = None
    compare: Callable[[list[Configuration]], list[float]] | None = None


def lattices(lengths):
    """Yield problems whose costs are computed, so that the optimum is known."""
    for length in lengths:
        space = GemmSpace(length, length, length)
        for name, cost in COSTS.items():
            known = {each: cost(space.named(each)) for each in space}
            yield Problem(
                f"lattice {length}^3, {name}", space, known.__getitem__, min(known.values())
            )


def table(file):
    """Return the problem of a CSV file, perhaps compressed.

    The file has a column for each parameter, then `milliseconds`, which is `invalid` for a
    configuration that did not work.
    """
    opened = partial(gzip.open, mode="rt") if file.suffix == ".gz" else open
    with opened(file, newline="", encoding="utf-8") as lines:
        names, *rows = csv.reader(lines)
    if names[-1] != "milliseconds":
        raise SystemExit(f"{file}: the last column is {names[-1]!r}, not 'milliseconds'")
    known = {
        tuple(map(_value, row[:-1])): math.inf if row[-1] == "invalid" else float(row[-1])
        for row in rows
    }
    space = TableSpace(names[:-1], known)
    return Problem(file.name.partition(".")[0], space, known.__getitem__, min(known.values()))


def _value(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
