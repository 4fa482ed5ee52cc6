"""Measure configurations reliably, even if a trial crashes, hangs or corrupts memory.

    target        the kernel to tune: builds, checks and runs one configuration
    measurement   the result for a configuration; how thoroughly to measure; a budget
    sampling      checks, warm-up, calibration and samples, in a measuring process
    race          finds the cheapest of a few configurations with few samples, under noise
    outputs       arrays that show what a kernel left out or overran
    worker        the program of a measuring process
    guard         the program around it: ends every process that a trial starts
    process       the search's side of a measuring process: messages, deadlines, its end
    pool          several measuring processes: builds in parallel, runs one at a time
    ray_pool      one pool over the machines of a Ray cluster
    executor      the common interface of both pools

A trial may crash, hang, take all memory, or write to the wrong place. Therefore it never runs in
the process of the search. This guards against accidents, not against malice: a kernel runs with the
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
