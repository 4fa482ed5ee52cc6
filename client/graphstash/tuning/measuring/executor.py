"""The interface that a search measures with, and what both pools of workers share."""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, Self

from typing_extensions import TypeVar

from graphstash.tuning.measuring.measurement import Measurement, Method
from graphstash.tuning.measuring.target import Target
from graphstash.tuning.space import Value

__all__ = ["MAX_TRIES", "Executor", "Job", "MakeExecutor", "Worker"]

MAX_TRIES: Final = 2
"""Maximum tries of a job whose worker ends from outside, by a signal or with its machine. The job
itself may cause that."""


@dataclass(eq=False)
class Job:
    """Configurations that one worker measures together; `tries` counts the workers that began."""

    configurations: list[dict[str, Value]]
    tries: int = 0

    def fail(self, failure: str) -> list[Measurement]:
        """Return a measurement of each configuration with this failure."""
        return [Measurement.failed(each, failure) for each in self.configurations]


@dataclass(eq=False, kw_only=True)
class Worker:
    """A worker, its job, and the monotonic time by which it must send its next message."""

    job: Job | None = None
    deadline: float = math.inf


W = TypeVar("W", bound=Worker, default=Any)


@dataclass
class Executor(ABC, Generic[W]):
    """Measures configurations of a target, in processes that may crash; a context manager.

    Use it in one thread. Workers start when needed.

    Attributes:
        target: the target, or its pickle.
        workers: maximum configurations in progress, 1 or more.
        method: how thoroughly to measure.
    """

    target: Target | bytes
    workers: int = 1
    method: Method = field(default_factory=Method)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1 (got {self.workers})")
        self._jobs: deque[Job] = deque()
        self._workers: list[W] = []
        self._done: list[Measurement] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all workers, even busy ones."""
        while self._workers:
            self._end(self._workers[-1])

    @property
    def pending(self) -> int:
        """Number of submitted configurations that `results` has not returned yet."""
        jobs = [*self._jobs, *(each.job for each in self._workers if each.job is not None)]
        return sum(len(job.configurations) for job in jobs) + len(self._done)

    def submit(self, configuration: Mapping[str, Value]) -> None:
        """Queue a configuration; `results` returns its measurement."""
        self._jobs.append(Job([_to_python_numbers(configuration)]))

    def results(self) -> list[Measurement]:
        """Return the available results; wait for one if configurations are pending.

        Raises:
            MeasuringError: nothing can be measured.
        """
        while self.pending and not self._done:
            self._advance()
        found = [*self._done]
        self._done.clear()
        return found

    def compare(self, configurations: Sequence[Mapping[str, Value]]) -> list[Measurement]:
        """Measure configurations in turns on one machine, without other work of this executor.

        Raises:
            MeasuringError: nothing can be measured.
            RuntimeError: other configurations are pending.
        """
        if self.pending:
            raise RuntimeError(
                f"{self.pending} configurations are pending: take their results first"
            )
        return self._compare(configurations)

    def _compare(self, configurations: Sequence[Mapping[str, Value]]) -> list[Measurement]:
        """Measure configurations in one worker; no other configuration is pending."""
        if configurations:
            self._jobs.append(Job([*map(_to_python_numbers, configurations)]))
        return self.results()

    @abstractmethod
    def _advance(self) -> None:
        """Hand out work, wait for an event, and collect results."""

    @abstractmethod
    def _end(self, worker: W) -> None:
        """Kill a worker, and forget it."""


class MakeExecutor(Protocol):
    """Creates an executor: `Pool`, `RayPool`, or a `partial` of one."""

    def __call__(self, target: Target, *, workers: int = 1, method: Method) -> Executor:
        """Return an executor for a target."""


def _to_python_numbers(configuration: Mapping[str, Value]) -> dict[str, Value]:
    """Convert numpy numbers to Python numbers, which JSON supports."""
    return {
        name: value.item() if hasattr(value, "item") else value
        for name, value in configuration.items()
    }
