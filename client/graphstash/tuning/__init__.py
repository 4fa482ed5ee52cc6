"""Search fast schedules of kernels, once for the whole team.

    space = tuning.GemmSpace(512, 512, 512)
    searcher = tuning.make_searcher("g-bfs", space, seed=0)
    for configuration in searcher.ask(4):
        searcher.tell(configuration, measure(configuration))
    print(searcher.best)

A space defines the possible schedules; a searcher chooses which to try next. Names are lazy: the
first use of a name imports its module, and the first use of a target imports its compiler.
"""

from typing import TYPE_CHECKING

from graphstash._lazy import lazy

if TYPE_CHECKING:
    from graphstash.tuning.measuring import Budget, MeasuringError, Method, Target
    from graphstash.tuning.measuring.outputs import CheckedOutput
    from graphstash.tuning.measuring.ray_pool import RayPool
    from graphstash.tuning.memory.problem import Problem, shape_bucket
    from graphstash.tuning.memory.team import Schedule
    from graphstash.tuning.search import SEARCHERS, make_searcher
    from graphstash.tuning.search.base import CostError, Searcher, Trial
    from graphstash.tuning.search.baselines import Exhaustive, RandomSearch
    from graphstash.tuning.search.gbfs import GBFS
    from graphstash.tuning.search.na2c import NA2C
    from graphstash.tuning.search.rnn import RNNController
    from graphstash.tuning.search.xgb import XGBoostSearch
    from graphstash.tuning.space import Configuration, EmptySpaceError, SearchSpace, SpaceError
    from graphstash.tuning.spaces import (
        GemmSpace,
        ParameterSpace,
        TableSpace,
        from_description,
    )
    from graphstash.tuning.targets.callable import CallableTarget
    from graphstash.tuning.targets.tvm_gemm import TvmGemm
    from graphstash.tuning.task import Task, tune

__all__ = [
    "GBFS",
    "NA2C",
    "SEARCHERS",
    "Budget",
    "CallableTarget",
    "CheckedOutput",
    "Configuration",
    "CostError",
    "EmptySpaceError",
    "Exhaustive",
    "GemmSpace",
    "MeasuringError",
    "Method",
    "ParameterSpace",
    "Problem",
    "RNNController",
    "RandomSearch",
    "RayPool",
    "Schedule",
    "SearchSpace",
    "Searcher",
    "SpaceError",
    "TableSpace",
    "Target",
    "Task",
    "Trial",
    "TvmGemm",
    "XGBoostSearch",
    "from_description",
    "make_searcher",
    "shape_bucket",
    "tune",
]

__getattr__, __dir__ = lazy(__name__)
