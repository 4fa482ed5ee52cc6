"""Several measuring processes, which build in parallel and run one at a time.

Load distorts measurements, so only one process at a time runs kernels, while others may build.
`Pool.compare` also avoids these builds, for exact figures.

A trial may damage its process, so a later trial there fails. The pool therefore replaces a process
after every failure except a failed build or an invalid cost. It repeats the failures in `_REPEATED`
in a new process, unless the process was new. If something outside kills a process with its guard,
the pool repeats the trial once: Ray does so while it ends a worker whose machine fails.
"""

import logging
import math
import pickle
import selectors
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from graphstash.errors import GraphstashError
from graphstash.tuning.measuring.executor import MAX_TRIES, Executor, Job, Worker
from graphstash.tuning.measuring.measurement import Measurement
from graphstash.tuning.measuring.process import EndedError, KilledError, MeasuringProcess
from graphstash.tuning.space import Value

__all__ = ["MeasuringError", "Pool"]

_log = logging.getLogger("graphstash.trials")

_START_SECONDS: Final = 300.0
"""Seconds for a measuring process to import its compiler and to create inputs."""

_HARMLESS: Final = frozenset({None, "compile", "cost"})
"""Outcomes of a trial after which its process continues."""

_REPEATED: Final = frozenset({"run", "wrong", "memory", "crash"})
"""Failures that an earlier trial of the process may have caused. Repeating a timeout takes too
long."""


class MeasuringError(GraphstashError):
    """Nothing can be measured. The message gives the error of the target or the process."""


@dataclass(eq=False, kw_only=True)
class _Worker(Worker):
    """A measuring process and its state.

    Attributes:
        state: starting, idle, building, built (waiting for its turn), or running.
        is_new: whether the process has not measured before this job.
        results: the job's results so far.
    """

    process: MeasuringProcess
    state: str = "starting"
    is_new: bool = True
    results: list[dict[str, Any]] = field(default_factory=list)


class Pool(Executor[_Worker]):
    """Measures configurations of a target in processes of this host.

    With one process, results come in the order of `submit`.

    Raises:
        MeasuringError: the target cannot be pickled.
        ValueError: `workers` is below 1.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self._target = (
                self.target if isinstance(self.target, bytes) else pickle.dumps(self.target)
            )
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise MeasuringError(
                "the target cannot be sent to other processes; define the functions that it is "
                f"made of at the top level of a module: {error}"
            ) from error

    def _compare(self, configurations: Sequence[Mapping[str, Value]]) -> list[Measurement]:
        """Measure in one new process. If a failure ends it, measure each in its own process."""
        self.close()
        found = super()._compare(configurations)
        if len(configurations) > 1 and any(each.failure not in _HARMLESS for each in found):
            found = [alone for each in configurations for alone in self._compare([each])]
        return found

    def _advance(self) -> None:
        self._hand_out()
        self._wait()
        for worker in list(self._workers):
            self._listen(worker)

    def _listen(self, worker: _Worker) -> None:
        try:
            while worker in self._workers and (message := worker.process.receive()) is not None:
                self._handle(worker, message)
        except KilledError as error:
            if worker.job is not None and worker.job.tries < MAX_TRIES:
                self._jobs.appendleft(worker.job)
                self._end(worker)
            else:
                self._lose(worker, "crash", str(error))
        except EndedError as error:
            self._lose(worker, "crash", str(error))
        if worker in self._workers and worker.deadline <= monotonic():
            is_starting = worker.state == "starting"
            seconds = _START_SECONDS if is_starting else self.method.timeout_seconds
            self._lose(worker, "timeout", f"{worker.state} took more than {seconds} s")

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.state == "idle" and (job := self._next_job(is_new=worker.is_new)) is not None:
                worker.job = job
                job.tries += 1
                self._enter_state(worker, "building")
                worker.process.build(job.configurations)
        starting = sum(worker.state == "starting" for worker in self._workers)
        for _ in range(min(self.workers - len(self._workers), len(self._jobs) - starting)):
            try:
                process = MeasuringProcess(self._target, self.method)
            except OSError as error:
                raise MeasuringError(
                    "no measuring process can be started; is the working directory still there? "
                    f"{error}"
                ) from error
            self._workers.append(_Worker(process=process, deadline=monotonic() + _START_SECONDS))
        if not any(worker.state == "running" for worker in self._workers):
            for worker in [each for each in self._workers if each.state == "built"][:1]:
                self._enter_state(worker, "running")
                worker.process.run()

    def _next_job(self, *, is_new: bool) -> Job | None:
        for job in self._jobs:
            if is_new or not job.tries:
                self._jobs.remove(job)
                return job
        return None

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.process.channel, selectors.EVENT_READ)
                selector.register(worker.process.lifeline, selectors.EVENT_READ)
            deadline = min(worker.deadline for worker in self._workers)
            selector.select(None if deadline == math.inf else max(deadline - monotonic(), 0))

    def _enter_state(self, worker: _Worker, state: str) -> None:
        worker.state = state
        worker.deadline = monotonic() + self.method.timeout_seconds

    def _handle(self, worker: _Worker, message: dict[str, Any]) -> None:
        match message["step"]:
            case "unable":
                raise MeasuringError(f"nothing can be measured here: {message['reason']}")
            case "ready":
                worker.state, worker.deadline = "idle", math.inf
            case "built":
                worker.state, worker.deadline = "built", math.inf
            case "result":
                worker.results.append(message)
            case "measured":
                self._collect(worker)
            case _:  # the next build, check or sample begins
                self._enter_state(worker, worker.state)

    def _collect(self, worker: _Worker) -> None:
        assert worker.job is not None  # noqa: S101 - only a worker with a job sends results
        found = []
        for configuration, result in zip(worker.job.configurations, worker.results, strict=True):
            if result["failure"] is None:
                found.append(Measurement.of(configuration, result["samples"]))
            else:
                found.append(Measurement.failed(configuration, result["failure"]))
            if found[-1].failure is not None:
                _report(found[-1], result["reason"])
        self._settle(worker, found)

    def _lose(self, worker: _Worker, failure: str, reason: str) -> None:
        """End a process that crashed or timed out; its job fails with `failure`."""
        if worker.state == "starting":
            raise MeasuringError(f"a measuring process did not become ready: {reason}")
        if worker.job is None:
            self._end(worker)
            return
        found = worker.job.fail(failure)
        for measurement in found:
            _report(measurement, reason)
        self._settle(worker, found)

    def _settle(self, worker: _Worker, found: list[Measurement]) -> None:
        """Accept a job's results, or requeue the job for a new process."""
        assert worker.job is not None  # noqa: S101 - these are its results
        failures = {measurement.failure for measurement in found}
        if not worker.is_new and failures & _REPEATED:
            self._jobs.appendleft(worker.job)
        else:
            self._done.extend(found)
        worker.job, worker.results, worker.is_new = None, [], False
        worker.state, worker.deadline = "idle", math.inf
        if failures - _HARMLESS:
            self._end(worker)

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.process.end()


def _report(measurement: Measurement, reason: str) -> None:
    _log.info(
        "measuring %s failed (%s): %s", measurement.configuration, measurement.failure, reason
    )
