"""A kernel that is tuned once for the team: what it is, and how its schedule is found.

    task = Task(problem, space, target)
    schedule = tune(task, budget=Budget(measurements=500))

A second host gets the same schedule without a measurement.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Protocol

from graphstash.tuning.measuring import Budget, MakeExecutor, Measurement, Method, Pool, Target
from graphstash.tuning.memory.findings import Finding
from graphstash.tuning.memory.problem import Problem
from graphstash.tuning.memory.process import team_memory
from graphstash.tuning.memory.team import Fit, Schedule, Search
from graphstash.tuning.search import make_searcher
from graphstash.tuning.space import Configuration, SearchSpace
from graphstash.tuning.tuner import search

__all__ = ["Task", "tune"]

_log = logging.getLogger("graphstash")

_TARGET: Final = "target"
"""The name of the part that `tune` adds to a problem."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is tuned.

    Attributes:
        problem: what the team knows it as. What `target.describe` says belongs to it: another
            target is another problem.
        space: the schedules that there are.
        target: builds, checks and runs one.

    Raises:
        ValueError: on construction, if `problem.parts` has a part named `target`.
    """

    problem: Problem
    space: SearchSpace
    target: Target

    def __post_init__(self) -> None:
        # `tune` adds the target's description under this name. Two problems that differ only in a
        # part of the same name would share one answer.
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
) -> Schedule | None:
    """The schedule that the team has for a task; searched for, once, where there is none.

    A second host measures nothing and gets the same schedule. While one host searches, others wait
    for it. A search begins with what the whole team has measured and at the schedules of the
    nearest shapes and devices; each measurement is published. Without a server, or with the cache
    off, this host searches for itself.

    Args:
        task: what is tuned.
        budget: of the search, and of a second one where what others have measured does not hold
            here. Comparing the best few comes on top of it.
        searcher: a name of `SEARCHERS`.
        seed: of the searcher.
        workers: how many configurations are built side by side.
        method: how thoroughly each is measured.
        executor: where it is measured: by default in processes of this host. `RayPool` takes the
            machines of a Ray cluster, which have to be of the problem's device type.
        fit: turns the configuration of another shape into one of this space, see `TeamMemory`; by
            default only one that is in the space itself is a place to begin at.

    Returns:
        None when nothing works.

    Raises:
        MeasuringError: when the target cannot be measured here at all.
        ValueError: for a searcher or a number that there is not, and a target whose description is
            no JSON.
    """
    try:
        about = json.dumps(task.target.describe(), sort_keys=True)
    except TypeError as error:
        raise ValueError(f"describe() of the target must be JSON: {error}") from error
    space = task.space

    def searched(turn: Search) -> Finding | None:
        found = search(
            make_searcher(searcher, space, seed=seed, first=turn.hints),
            task.target,
            budget=budget,
            workers=workers,
            method=method,
            executor=executor,
            known=[_measurement(each, space) for each in turn.known.values()],
            publish=lambda measurement: turn.publish(_finding(measurement, space)),
        )
        _log.info(
            "%s: %d measurements in %.0f s, %d were known; ended by %s",
            task.problem.label,
            len(found.measurements),
            found.seconds,
            found.known,
            found.ended,
        )
        return None if found.measurement is None else _finding(found.measurement, space)

    memory = team_memory()
    if memory is None:
        best = searched(Search({}, (), lambda _: None))
        return None if best is None else Schedule((best,), None, was_searched=True)
    problem = replace(task.problem, parts={**task.problem.parts, _TARGET: about})

    def in_turn(turn: Search) -> None:
        searched(turn)  # the memory has been told of everything meanwhile

    with _measuring(task, method, executor) as measure:
        return memory.schedule(problem, space, in_turn, measure=measure, confirm=measure, fit=fit)


class _Measure(Protocol):
    def __call__(self, configuration: Configuration, /) -> Finding: ...


@contextmanager
def _measuring(task: Task, method: Method | None, executor: MakeExecutor) -> Iterator[_Measure]:
    """Measures one configuration after the other, in a process that the first of them starts."""
    with executor(task.target, method=method or Method()) as pool:

        def measure(configuration: Configuration) -> Finding:
            (measured,) = pool.compare([task.space.named(configuration)])
            return _finding(measured, task.space)

        yield measure


def _finding(measured: Measurement, space: SearchSpace) -> Finding:
    return Finding(
        space.configuration(measured.configuration),
        measured.cost,
        measured.spread,
        measured.count,
        measured.failure,
    )


def _measurement(found: Finding, space: SearchSpace) -> Measurement:
    named = space.named(found.configuration)
    return Measurement(named, found.cost, found.spread, found.count, found.failure)
