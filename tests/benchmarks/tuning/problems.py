"""What searchers are compared on: lattices with synthetic costs, and tables that were measured.

A problem that is measured while it is searched needs nothing else: `Problem(name, space, measure)`.
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

__all__ = ["Problem", "lattices", "table"]


@dataclass
class Problem:
    """Something to tune.

    Attributes:
        name: for the report.
        space: what is searched.
        measure: the cost of a configuration; infinity where it does not work.
        optimum: the lowest cost of all, where it is known.
        compare: the costs of configurations that are measured against each other, where a cost is
            not exact; None where it is.
    """

    name: str
    space: SearchSpace
    measure: Callable[[Configuration], float]
    optimum: float | None = None
    compare: Callable[[list[Configuration]], list[float]] | None = None


def lattices(lengths):
    """Every tiling has a cost that is computed, so that the optimum is known."""
    for length in lengths:
        space = GemmSpace(length, length, length)
        for name, cost in COSTS.items():
            known = {each: cost(space.named(each)) for each in space}
            yield Problem(
                f"lattice {length}^3, {name}", space, known.__getitem__, min(known.values())
            )


def table(file):
    """A file of CSV, perhaps compressed: a column for each parameter, then `milliseconds`, which is
    `invalid` for what did not work.
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
