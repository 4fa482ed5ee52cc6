"""Measure on the machines of a Ray cluster. Needs the extra `ray`.

Each worker is a Ray actor with a `Pool` of one measuring process, which handles failing trials as
on this host. In addition, a machine may die. The job of a lost worker is repeated once, by another
worker. Lost workers are replaced until `_MAX_LOST` are lost without a result in between.
"""

import logging
import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from graphstash.errors import ConfigError
from graphstash.tuning.measuring.executor import MAX_TRIES, Executor, Job, Worker
from graphstash.tuning.measuring.measurement import Measurement, Method
from graphstash.tuning.measuring.pool import MeasuringError, Pool
from graphstash.tuning.space import Value

try:
    import ray
    import ray.cloudpickle
    from ray.exceptions import RayError, RayTaskError
except ModuleNotFoundError:  # `RayPool` raises on construction
    _HAS_RAY = False
else:
    _HAS_RAY = True

__all__ = ["RayPool", "join_cluster"]

_log = logging.getLogger("graphstash")

_OPTIONS: Final = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "max_restarts": 0}

_CONNECT_SECONDS: Final = 10.0

_READY_SECONDS: Final = 300.0
"""Seconds for Ray to place and start a worker. After that, measuring fails unless another worker
has a job."""

_JOB_SECONDS: Final = 300.0
"""Seconds added to the time limits of a job, for its process to start and create inputs."""

_MAX_LOST: Final = 4
"""Number of workers lost without a result in between at which measuring fails."""


class _Measurer:
    def __init__(self, target: bytes, method: Method) -> None:
        self._pool = Pool(target, method=method)

    def ready(self) -> None:
        """Return once the worker has started."""

    def measure(self, configurations: list[dict[str, Value]]) -> list[dict[str, Any]]:
        """Return the measurements as JSON. Several configurations are measured in turns."""
        if len(configurations) > 1:
            found = self._pool.compare(configurations)
        else:
            self._pool.submit(configurations[0])
            found = self._pool.results()
        return [each.to_json() for each in found]


@dataclass(eq=False, kw_only=True)
class _Worker(Worker):
    """A Ray actor, which has no job while it starts, and its latest call.

    Attributes:
        call: Ray's reference to the call's result. None while idle.
    """

    actor: Any
    call: Any


@dataclass
class RayPool(Executor[_Worker]):
    """Measures configurations of a target on the machines of a Ray cluster.

    Replaces `Pool`: `tune(task, executor=RayPool, workers=8, ...)`. Calls `ray.init()` if Ray is
    not initialized. The machines must be alike, with graphstash and the target's imports installed.
    Functions of a script are sent to them. Workers on one machine disturb each other's
    measurements: use `options` to give each its own device or machine.

    Args:
        target: the target to measure.
        workers: maximum number of workers, 1 or more.
        method: how thoroughly to measure.
        options: options of the Ray actors, such as `{"num_gpus": 1}`. Default: one CPU each.
        modules: names of imported modules that the machines lack. Their functions are sent by
            value, as functions of a script are.

    Raises:
        ConfigError: Ray is not installed, or `modules` is a string.
        MeasuringError: the target cannot be sent.
        ValueError: `workers` is below 1.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    modules: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _HAS_RAY:
            raise ConfigError("RayPool needs Ray: pip install 'graphstash[ray] @ git+<repository>'")
        if isinstance(self.modules, str):
            raise ConfigError(f"modules is {self.modules!r}: it must be a list of names")
        for name in self.modules:
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])
        try:
            self._target = ray.cloudpickle.dumps(self.target)
        except Exception as error:
            raise MeasuringError(f"the target cannot be sent to other machines: {error}") from error
        self._lost: list[str] = []

    def _advance(self) -> None:
        for worker in self._workers:
            if worker.call is None and self._jobs:
                self._assign(worker, self._jobs.popleft())
        starting = sum(each.job is None and each.call is not None for each in self._workers)
        for _ in range(min(self.workers - len(self._workers), len(self._jobs) - starting)):
            self._start()
        busy = {each.call: each for each in self._workers if each.call is not None}
        until = min(each.deadline for each in busy.values())
        ready, _ = ray.wait([*busy], timeout=max(until - monotonic(), 0.0))
        for call in ready:
            self._collect(busy[call])
        for worker in busy.values():
            if worker in self._workers and worker.call is not None:
                self._check_deadline(worker)

    def _start(self) -> None:
        if not ray.is_initialized():
            join_cluster()
        make = ray.remote(**{**_OPTIONS, **self.options})(_Measurer)
        actor = make.remote(self._target, self.method)
        deadline = monotonic() + _READY_SECONDS
        self._workers.append(_Worker(actor=actor, call=actor.ready.remote(), deadline=deadline))

    def _assign(self, worker: _Worker, job: Job) -> None:
        job.tries += 1
        # A failing configuration is measured twice. After a failed comparison, each configuration
        # is measured alone.
        seconds = _JOB_SECONDS + 4 * self.method.most_seconds(len(job.configurations))
        worker.job, worker.deadline = job, monotonic() + seconds
        worker.call = worker.actor.measure.remote(job.configurations)

    def _collect(self, worker: _Worker) -> None:
        job, call, worker.call = worker.job, worker.call, None
        try:
            returned = ray.get(call)
            found = [] if job is None else [Measurement.from_json(each) for each in returned]
        except RayTaskError as error:
            if job is not None:  # the machine failed, not the job
                job.tries -= 1
            self._lose(worker, str(error.cause))
        except (RayError, ValueError, TypeError) as error:
            self._lose(worker, str(error))
        else:
            worker.job, worker.deadline = None, math.inf
            self._done += found
            if job is not None:
                self._lost.clear()

    def _check_deadline(self, worker: _Worker) -> None:
        """Give up a worker whose job is late. Raise if no worker has a job and none can start."""
        if worker.deadline > monotonic():
            return
        if worker.job is not None:
            self._lose(worker, "no answer from the worker's machine")
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
        if job.tries < MAX_TRIES:
            self._jobs.appendleft(job)
        else:
            self._done += job.fail("crash")

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        with suppress(Exception):  # fails if the cluster has ended
            ray.kill(worker.actor)


def join_cluster(**options: Any) -> None:
    """Call `ray.init`. Connect to RAY_ADDRESS first, because `ray.init` retries for minutes.

    Args:
        options: further arguments of `ray.init`.

    Raises:
        MeasuringError: no cluster answers.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise MeasuringError(
                f"no Ray cluster answers at RAY_ADDRESS={address}: {error}"
            ) from error
    # Ray would print notes about the cluster and the workers into the output of `--json`.
    ray.init(log_to_driver=False, **options)
