"""Measures on the machines of a Ray cluster. It needs the extra `ray`.

Each worker is an actor of Ray, and in it a `Pool` of one measuring process: what a trial does wrong
ends as it would on this host. What Ray adds is other machines, and that they may die. A job whose
machine died is done again elsewhere, once; a worker that is lost is replaced, as long as some give
results.
"""

import logging
import math
import os
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from graphstash.errors import ConfigError
from graphstash.tuning.measuring.executor import Executor
from graphstash.tuning.measuring.measurement import Measurement, Method
from graphstash.tuning.measuring.pool import MeasuringError, Pool
from graphstash.tuning.measuring.target import Target
from graphstash.tuning.space import Value

try:
    import ray
    import ray.cloudpickle
    from ray.exceptions import RayError, RayTaskError
except ModuleNotFoundError:  # `RayPool` says so when it is made
    _HAS_RAY = False
else:
    _HAS_RAY = True

__all__ = ["RayPool"]

_log = logging.getLogger("graphstash")

_OPTIONS: Final = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "max_restarts": 0}

_CONNECT_SECONDS: Final = 10.0

_READY_SECONDS: Final = 300.0
"""What Ray gets to find a place for a worker and to start it, before others are waited for."""

_JOB_SECONDS: Final = 300.0
"""What a job gets beyond its own time limits: its process is started, and inputs are made."""

_MAX_LOST: Final = 4
"""Workers that are lost one after the other, with no result in between."""

_MAX_TRIES: Final = 2
"""Of a job: its machine may die of it."""


class _Measurer:
    """What runs in a worker."""

    def __init__(self, target: bytes, method: Method) -> None:
        self._pool = Pool(target, method=method)

    def ready(self) -> None:
        """Returns when the worker has been started."""

    def measure(self, configurations: list[dict[str, Value]]) -> list[dict[str, Any]]:
        """Their measurements as JSON; of several, in turns."""
        if len(configurations) > 1:
            found = self._pool.compare(configurations)
        else:
            self._pool.submit(configurations[0])
            found = self._pool.results()
        return [each.to_json() for each in found]


@dataclass(eq=False)
class _Job:
    configurations: list[dict[str, Value]]
    tries: int = 0


@dataclass(eq=False)
class _Worker:
    """An actor, and the call that it was given last.

    Attributes:
        call: what Ray gives its result under; None while it is idle.
        job: what it measures; None while it starts and while it is idle.
    """

    actor: Any
    call: Any
    deadline: float
    job: _Job | None = None


@dataclass
class RayPool(Executor):
    """Measures configurations of a target on the machines of a Ray cluster.

    It is used as `Pool` is, and takes its place: `tune(task, executor=RayPool, workers=8, ...)`.
    Where Ray is not initialized yet, `ray.init()` is called. The machines have to be alike, and
    graphstash and what the target imports have to be installed on them; functions of a script are
    sent to them. Several workers on one machine disturb each other: let `options` give each a
    device or a machine of its own.

    Args:
        target: what is measured.
        workers: how many at most, 1 or more.
        method: how thoroughly.
        options: of Ray's actors, such as `{"num_gpus": 1}`; one CPU each by default.
        modules: names of imported modules that the machines do not have: their functions are sent
            as those of a script are.

    Raises:
        ConfigError: Ray is not installed.
        MeasuringError: when the target cannot be sent.
        ValueError: when there are no workers.
    """

    target: Target
    workers: int = 1
    method: Method = field(default_factory=Method)
    options: Mapping[str, Any] = field(default_factory=dict)
    modules: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1 (got {self.workers})")
        if not _HAS_RAY:
            raise ConfigError("RayPool needs Ray: pip install 'graphstash[ray] @ git+<repository>'")
        for name in self.modules:
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])
        try:
            self._target = ray.cloudpickle.dumps(self.target)
        except Exception as error:
            raise MeasuringError(f"the target cannot be sent to other machines: {error}") from error
        self._jobs: deque[_Job] = deque()
        self._workers: list[_Worker] = []
        self._done: list[Measurement] = []
        self._lost: list[str] = []

    def close(self) -> None:
        """Ends all workers, whatever they do."""
        while self._workers:
            self._end(self._workers[-1])

    @property
    def pending(self) -> int:
        """How many configurations were submitted and not yet returned by `results`."""
        jobs = [*self._jobs, *(each.job for each in self._workers if each.job is not None)]
        return sum(len(job.configurations) for job in jobs) + len(self._done)

    def submit(self, configuration: Mapping[str, Value]) -> None:
        """Queues a configuration; `results` has what comes of it."""
        self._jobs.append(_Job([dict(configuration)]))

    def _compare(self, configurations: Sequence[Mapping[str, Value]]) -> list[Measurement]:
        """In one worker, while the others are idle."""
        if configurations:
            self._jobs.append(_Job([*map(dict, configurations)]))
        return self.results()

    def _advance(self) -> None:
        """Hands out work, waits until something happens, and takes what has come."""
        for worker in self._workers:
            if worker.call is None and self._jobs:
                self._give(worker, self._jobs.popleft())
        starting = sum(each.job is None and each.call is not None for each in self._workers)
        for _ in range(min(self.workers - len(self._workers), len(self._jobs) - starting)):
            self._start()
        busy = {each.call: each for each in self._workers if each.call is not None}
        until = min(each.deadline for each in busy.values())
        ready, _ = ray.wait([*busy], timeout=max(until - monotonic(), 0.0))
        for call in ready:
            self._take(busy[call])
        for worker in busy.values():
            if worker in self._workers and worker.call is not None:
                self._check(worker)

    def _start(self) -> None:
        if not ray.is_initialized():
            _join_cluster()
        make = ray.remote(**{**_OPTIONS, **self.options})(_Measurer)
        actor = make.remote(self._target, self.method)
        self._workers.append(_Worker(actor, actor.ready.remote(), monotonic() + _READY_SECONDS))

    def _give(self, worker: _Worker, job: _Job) -> None:
        job.tries += 1
        # A failure is tried twice, and a comparison that fails once more for each.
        steps = 4 * len(job.configurations) * (self.method.samples + 3)
        seconds = _JOB_SECONDS + steps * self.method.timeout_seconds
        worker.job, worker.deadline = job, monotonic() + seconds
        worker.call = worker.actor.measure.remote(job.configurations)

    def _take(self, worker: _Worker) -> None:
        """The result of a call."""
        job, call, worker.call = worker.job, worker.call, None
        try:
            told = ray.get(call)
            found = [] if job is None else [Measurement.from_json(each) for each in told]
        except RayTaskError as error:
            if job is not None:  # nothing can be measured there: it is no fault of the job's
                job.tries -= 1
            self._lose(worker, str(error.cause))
        except (RayError, ValueError, TypeError) as error:
            self._lose(worker, str(error))
        else:
            worker.job, worker.deadline = None, math.inf
            self._done += found
            if job is not None:
                self._lost.clear()

    def _check(self, worker: _Worker) -> None:
        """Whether a call takes too long. A worker that finds no place harms nobody."""
        if worker.deadline > monotonic():
            return
        if worker.job is not None:
            self._lose(worker, "its machine says nothing any more")
        elif all(each.job is None for each in self._workers):
            raise MeasuringError(
                f"Ray has started no worker with {dict(self.options)} in {_READY_SECONDS:.0f} s: "
                "has the cluster such a machine, and is it free?"
            )
        else:
            worker.deadline = monotonic() + _READY_SECONDS

    def _lose(self, worker: _Worker, reason: str) -> None:
        job = worker.job
        self._end(worker)
        brief = " ".join(reason.split())[:500]
        _log.warning("a worker of Ray is lost: %s", brief)
        self._lost.append(brief)
        if len(self._lost) >= _MAX_LOST:
            raise MeasuringError(f"{_MAX_LOST} workers of Ray were lost in turn; the last: {brief}")
        if job is None:
            return
        if job.tries < _MAX_TRIES:
            self._jobs.appendleft(job)
        else:
            self._done += [Measurement.failed(each, "crash") for each in job.configurations]

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        with suppress(Exception):  # with the whole cluster, it has ended already
            ray.kill(worker.actor)


def _join_cluster() -> None:
    """Calls `ray.init`, unless nothing listens at its address: it would try that for minutes."""
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise MeasuringError(
                f"no Ray cluster answers at RAY_ADDRESS={address}: {error}"
            ) from error
    ray.init()
