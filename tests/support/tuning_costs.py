"""Synthetic costs of tilings, cheap to compute everywhere, and measures of a search on them."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphstash.tuning.search.base import Searcher

Values = Mapping[str, Any]


def _tile(values: Values, axis: str, *inner: int) -> int:
    return math.prod(values[f"{axis}_{i}"] for i in inner)


def valley(values: Values) -> float:
    """Return the cost of one smooth valley, in which every loop has one best tile."""
    distance = (
        abs(math.log2(_tile(values, "m", 2, 3)) - 2)
        + abs(math.log2(_tile(values, "n", 2, 3)) - 3)
        + abs(math.log2(values["n_3"]) - 2)
        + abs(math.log2(values["k_1"]) - 2)
        + abs(math.log2(values["m_3"]) - 1)
    )
    return 1 + 0.3 * distance


def ridge(values: Values) -> float:
    """Return the cost in a model of caches and vectors: large tiles miss, small tiles wait."""
    m, n, k = _tile(values, "m", 2, 3), _tile(values, "n", 2, 3), values["k_1"]
    footprint = m * k + k * n + m * n
    misses = 1 / m + 1 / n + 0.5 / k + (0 if footprint <= 256 else math.log2(footprint / 256))
    vector = {1: 4, 2: 2, 4: 1, 8: 0.6}.get(values["n_3"], 1.2)
    outer = 0.02 * (values["m_0"] + values["n_0"])
    return 0.2 + misses + vector + outer


def rugged(values: Values) -> float:
    """Return `ridge` with deterministic noise: neighbours may differ by 40 %."""
    text = ",".join(str(value) for value in values.values())
    return ridge(values) * (1 + 0.4 * zlib.crc32(text.encode()) / 2**32)


def cliffs(values: Values) -> float:
    """Return `ridge`, but infinity for a sixth of the tilings."""
    registers = values["m_3"] * values["n_3"]
    threads = values["m_2"] * values["n_2"]
    return math.inf if registers > 32 or threads > 64 else ridge(values)


COSTS: dict[str, Callable[[Values], float]] = {
    "valley": valley,
    "ridge": ridge,
    "rugged": rugged,
    "cliffs": cliffs,
}


def best_so_far(searcher: Searcher, cost: Callable[[Values], float], budget: int) -> list[float]:
    """Return the lowest cost after 1, 2, ... measurements."""
    found: list[float] = []
    while len(found) < budget and (asked := searcher.ask(budget - len(found))):
        for each in asked:
            measured = cost(searcher.space.named(each))
            searcher.tell(each, measured)
            found.append(min(measured, found[-1] if found else math.inf))
    return found


def area_above(best: Sequence[float], optimum: float) -> float:
    """Return the mean of log(best so far / optimum); log 100 before any measurement worked."""
    return sum(math.log(min(each / optimum, 100)) for each in best) / len(best)
