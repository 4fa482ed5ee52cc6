"""Searchers: choose which configuration to measure next.

    g-bfs       greedy best-first search: neighbours of the cheapest state not yet expanded
    n-a2c       a policy and a value network walk from the best so far
    xgboost     simulated annealing over a model of the costs, as in AutoTVM
    rnn         a recurrent controller writes configurations value by value
    random      random draws, the baseline for the others
    exhaustive  every configuration, for small spaces

All share the interface `Searcher`; `make_searcher` creates one by name.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from graphstash.tuning.search.base import Searcher
from graphstash.tuning.space import Configuration, SearchSpace

__all__ = ["SEARCHERS", "make_searcher"]

_CLASSES: Final = {
    "g-bfs": ("gbfs", "GBFS"),
    "n-a2c": ("na2c", "NA2C"),
    "xgboost": ("xgb", "XGBoostSearch"),
    "rnn": ("rnn", "RNNController"),
    "random": ("baselines", "RandomSearch"),
    "exhaustive": ("baselines", "Exhaustive"),
}

SEARCHERS: Final = tuple(_CLASSES)
"""The names of the searchers."""


def make_searcher(
    name: str,
    space: SearchSpace,
    *,
    seed: int = 0,
    first: Sequence[Configuration] = (),
    **options: Any,
) -> Searcher:
    """Create a searcher by name; imports only its own module.

    Raises:
        ValueError: no searcher has this name.
        ModuleNotFoundError: the searcher needs numpy or xgboost; install the extra `tuning`.
    """
    if name not in _CLASSES:
        raise ValueError(f"there is no searcher {name!r}: choose one of {', '.join(SEARCHERS)}")
    module, class_name = _CLASSES[name]
    made: Searcher = getattr(import_module(f"graphstash.tuning.search.{module}"), class_name)(
        space, seed=seed, first=first, **options
    )
    return made
