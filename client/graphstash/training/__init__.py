"""The training loop: sync-free optimizers, a threaded executor, a traced step, and `train`.

    from graphstash import training

    optimizer = training.AdamW(model.parameters(), lr=1e-3)
    result = training.train(model, optimizer, data, steps=1000)

Each part stands alone: `DeviceExecutor` needs no torch, the optimizers and the loss scale need no
torch_xla. So this module imports nothing until a name is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphstash.training.batch import to_device
    from graphstash.training.executor import DeviceExecutor
    from graphstash.training.feed import Feed
    from graphstash.training.placeholder import (
        ExecutorClosed,
        ExecutorError,
        ExecutorStopped,
        Placeholder,
    )
    from graphstash.training.workers import WorkerPool

__all__ = [
    "DeviceExecutor",
    "ExecutorClosed",
    "ExecutorError",
    "ExecutorStopped",
    "Feed",
    "Placeholder",
    "WorkerPool",
    "to_device",
]

_HOME = {
    "DeviceExecutor": "executor",
    "ExecutorClosed": "placeholder",
    "ExecutorError": "placeholder",
    "ExecutorStopped": "placeholder",
    "Feed": "feed",
    "Placeholder": "placeholder",
    "WorkerPool": "workers",
    "to_device": "batch",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"graphstash.training.{_HOME[name]}"), name)
    raise AttributeError(f"module 'graphstash.training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
