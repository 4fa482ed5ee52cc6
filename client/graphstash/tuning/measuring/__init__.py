"""Measures configurations so that the figures can be believed, whatever a trial does.

    target        what is tuned: builds, checks and runs one configuration
    measurement   what is known of a configuration; how thoroughly it is measured; a budget
    sampling      checks, warm-up, calibration and interleaved samples, inside a measuring process
    outputs       arrays that show what a kernel left out or overran
    worker        the program of a measuring process
    guard         the program around it: no process that a trial starts outlives its worker
    process       a measuring process as the search sees it: messages, deadlines, its end
    pool          several of them: builds side by side, runs one at a time
    ray_pool      pools on the machines of a Ray cluster, as one
    executor      what a search wants of either

A trial may crash, hang, take all memory, or write where it should not: so it never runs in the
process of the search. This guards against accidents, not against malice: a kernel runs with the
rights of the user who tunes it.
"""

from graphstash.tuning.measuring.executor import Executor, MakeExecutor
from graphstash.tuning.measuring.measurement import Budget, Measurement, Method
from graphstash.tuning.measuring.pool import MeasuringError, Pool
from graphstash.tuning.measuring.target import Target

__all__ = [
    "Budget",
    "Executor",
    "MakeExecutor",
    "Measurement",
    "MeasuringError",
    "Method",
    "Pool",
    "Target",
]
