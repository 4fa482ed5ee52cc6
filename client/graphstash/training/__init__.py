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
    from graphstash.training.batches import Batches
    from graphstash.training.checkpoint import Checkpoint, CheckpointError, Checkpoints
    from graphstash.training.device_state import DeviceState
    from graphstash.training.events import (
        Callback,
        DivergedError,
        LogEntry,
        StopTraining,
        TrainingResult,
    )
    from graphstash.training.executor import DeviceExecutor
    from graphstash.training.feed import Feed
    from graphstash.training.gradients import clip_grad_norm_, clip_grad_value_
    from graphstash.training.loss_scale import LossScale
    from graphstash.training.optimizers import LAMB, SGD, Adam, AdamW
    from graphstash.training.placeholder import (
        ExecutorClosed,
        ExecutorError,
        ExecutorStopped,
        Placeholder,
    )
    from graphstash.training.traced import TracedStep, traced_step
    from graphstash.training.trainer import train
    from graphstash.training.workers import WorkerPool

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "Batches",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "Checkpoints",
    "DeviceExecutor",
    "DeviceState",
    "DivergedError",
    "ExecutorClosed",
    "ExecutorError",
    "ExecutorStopped",
    "Feed",
    "LogEntry",
    "LossScale",
    "Placeholder",
    "StopTraining",
    "TracedStep",
    "TrainingResult",
    "WorkerPool",
    "clip_grad_norm_",
    "clip_grad_value_",
    "to_device",
    "traced_step",
    "train",
]

_HOME = {
    "Adam": "optimizers",
    "AdamW": "optimizers",
    "Batches": "batches",
    "Callback": "events",
    "Checkpoint": "checkpoint",
    "CheckpointError": "checkpoint",
    "Checkpoints": "checkpoint",
    "DeviceExecutor": "executor",
    "DeviceState": "device_state",
    "DivergedError": "events",
    "ExecutorClosed": "placeholder",
    "ExecutorError": "placeholder",
    "ExecutorStopped": "placeholder",
    "Feed": "feed",
    "LAMB": "optimizers",
    "LogEntry": "events",
    "LossScale": "loss_scale",
    "Placeholder": "placeholder",
    "SGD": "optimizers",
    "StopTraining": "events",
    "TracedStep": "traced",
    "TrainingResult": "events",
    "WorkerPool": "workers",
    "clip_grad_norm_": "gradients",
    "clip_grad_value_": "gradients",
    "to_device": "batch",
    "traced_step": "traced",
    "train": "trainer",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"graphstash.training.{_HOME[name]}"), name)
    raise AttributeError(f"module 'graphstash.training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
