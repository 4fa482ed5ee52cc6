"""Executor: device work on a thread of its own, in order, at most `depth` steps ahead.

    with DeviceExecutor(depth=2) as device:
        for batch in feed:
            loss = device.submit(step, batch)     # returns at once: the next batch is prepared
        print(loss.result())

While a step runs, the submitting thread loads, converts and logs. All tracing of torch_xla belongs
into submitted callables: it must not be traced from two threads. What is bound to a thread is so
here too: gradient mode, autocast and the current CUDA stream are set inside of the callable.

Both threads share the interpreter lock: what overlaps is the time that one of them spends outside
of it (one long product, a graph, reading files). Hundreds of small eager operations beside a busy
Python loop gain nothing: each gives the lock up and has to wait for it.

A submission is finished when its callable has returned. One that only queues work on a device, as
JAX and CUDA do, bounds memory only if it waits for an earlier step before it returns.
"""

from typing import ClassVar

from graphstash._errors import ConfigError
from graphstash.training.workers import WorkerPool

__all__ = ["DeviceExecutor"]


class DeviceExecutor(WorkerPool):
    """A pool of one thread, whose first failure stops the run.

    What is queued behind a failed submission is not run (`ExecutorStopped`), and `submit` raises
    the failure from then on: no training step follows one that went wrong.

    Args:
        name: of the device; the thread's name begins with it.
        depth: how many submissions may be unfinished, 1 or more. So many inputs are alive, and the
            one that waits for room.
    """

    _stops_at_failure: ClassVar[bool] = True

    def __init__(self, name: str = "device", *, depth: int = 2) -> None:
        if depth < 1:
            raise ConfigError(f"depth is {depth}, the least is 1: one step runs and none waits")
        super().__init__(name, workers=1, capacity=depth - 1)
