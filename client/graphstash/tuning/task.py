"""Tune a kernel once for the team.

    task = Task(problem, space, target)
    schedule = tune(task, budget=Budget(measurements=500))

Other hosts get the same schedule without measuring.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from graphstash.tuning.measuring import Budget, MakeExecutor, Method, Pool, Target
from graphstash.tuning.memory.findings import Finding
from graphstash.tuning.memory.problem import Problem
from graphstash.tuning.memory.process import team_memory
from graphstash.tuning.memory.team import Fit, Schedule, Search
from graphstash.tuning.search import make_searcher
from graphstash.tuning.space import Configuration, SearchSpace
from graphstash.tuning.tuner import Progress, search

__all__ = ["Task", "tune"]

_log = logging.getLogger("graphstash")

_TARGET: Final = "target"
"""Name under which `tune` adds the target's description to the parts of a problem."""


@dataclass(frozen=True, slots=True)
class Task:
    """A kernel to tune.

    Attributes:
        problem: identifies the kernel for the team, together with `target.describe()`.
        space: the possible schedules.
        target: builds, checks and runs a schedule.

    Raises:
        ValueError: on construction, if `problem.parts` has a part named `target`.
    """

    problem: Problem
    space: SearchSpace
    target: Target

    def __post_init__(self) -> None:
        # `tune` overwrites this part. Problems that differ only in it would share their schedules.
        if _TARGET in self.problem.parts:
            raise ValueError(
                f"the part {_TARGET!r} of the problem cannot be used: it holds what "
                "describe() of the target returns; choose another name"
            )


def tune(
    task: Task,
    *,
    budget: Budget,
    searcher: str = "g-bfs",
    seed: int = 0,
    workers: int = 1,
    method: Method | None = None,
    executor: MakeExecutor = Pool,
    fit: Fit | None = None,
    observe: Callable[[Progress], object] = lambda _: None,
) -> Schedule | None:
    """Return the team's schedule for a task; search for one if there is none.

    One host searches. The others wait for its schedule, and use it without measuring. A search
    starts with the measurements of the whole team and the schedules of the nearest shapes and
    devices, and publishes its own measurements. Without a server, or with the cache off, this host
    searches alone.

    Args:
        task: the kernel to tune.
        budget: limit of each search. A second search, without the measurements of other hosts,
            follows if they prove wrong on this host. The final comparison of the best
            configurations does not count towards the limit.
        searcher: a name of `SEARCHERS`.
        seed: seed of the searcher.
        workers: maximum configurations built in parallel.
        method: how thoroughly each configuration is measured.
        executor: where to measure. Default: processes on this host. `RayPool` uses the machines of
            a Ray cluster, which must be of the problem's device type.
        fit: turns a configuration of another shape into one of this space; see `Fit`. Default: a
            search starts only from configurations that are also in this space.
        observe: called with the progress of a search on this host: at its start, after each
            measurement, and when measuring ends. An exception ends the search.

    Returns:
        None if no configuration works.

    Raises:
        MeasuringError: the target cannot be measured on this host.
        ValueError: the searcher is unknown, a number is out of range, or the target's description
            is not JSON.
    """
    try:
        about = json.dumps(task.target.describe(), sort_keys=True)
    except TypeError as error:
        raise ValueError(f"describe() of the target must be JSON: {error}") from error
    space = task.space

    def run_search(turn: Search) -> Finding | None:
        found = search(
            make_searcher(searcher, space, seed=seed, first=turn.hints),
            task.target,
            budget=budget,
            workers=workers,
            method=method,
            executor=executor,
            known=[each.named(space) for each in turn.known.values()],
            publish=lambda measurement: turn.publish(measurement.within(space)),
            observe=observe,
        )
        _log.info(
            "%s: %d measurements in %.0f s, %d were known; ended by %s",
            task.problem.label,
            len(found.measurements),
            found.seconds,
            found.known,
            found.ended,
        )
        return None if found.measurement is None else found.measurement.within(space)

    memory = team_memory()
    if memory is None:
        best = run_search(Search({}, (), lambda _: None))
        return None if best is None else Schedule((best,), None, was_searched=True)
    problem = replace(task.problem, parts={**task.problem.parts, _TARGET: about})

    def search_in_turn(turn: Search) -> None:
        run_search(turn)  # `TeamMemory` chooses among the published measurements

    with executor(task.target, method=method or Method()) as pool:

        def measure(configurations: Sequence[Configuration]) -> list[Finding]:
            compared = pool.compare([space.named(each) for each in configurations])
            return [each.within(space) for each in compared]

        return memory.schedule(
            problem, space, search_in_turn, measure=measure, confirm=True, fit=fit
        )
