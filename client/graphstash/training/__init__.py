"""The training loop: sync-free optimizers, a threaded executor, a traced step, and `train`.

    from graphstash import training

    optimizer = training.AdamW(model.parameters(), lr=1e-3)
    result = training.train(model, optimizer, data, steps=1000)

Each part works alone: `DeviceExecutor` needs no torch, and the optimizers and the loss scale need
no torch_xla. This module therefore imports a part only when one of its names is used.
"""

from typing import TYPE_CHECKING

from graphstash._lazy import lazy

if TYPE_CHECKING:
    from graphstash.training.checkpoints import Checkpoint, CheckpointError, Checkpoints
    from graphstash.training.data.batches import Batches
    from graphstash.training.data.device_loader import DeviceLoader, to_device
    from graphstash.training.fusion import Fusion, FusionError, fuse
    from graphstash.training.loop.events import (
        Callback,
        DivergedError,
        LogEntry,
        StopTraining,
        TrainingResult,
    )
    from graphstash.training.loop.trackers import TensorBoardCallback, WandbCallback
    from graphstash.training.loop.trainer import train
    from graphstash.training.optimizers import (
        LAMB,
        SGD,
        SOAP,
        Adafactor,
        Adam,
        Adam8bit,
        AdamW,
        AdamW8bit,
        Lion,
        Muon,
        ScheduleFreeAdamW,
        Shampoo,
        muon_groups,
    )
    from graphstash.training.optimizers.gradients import (
        LossScale,
        clip_grad_norm_,
        clip_grad_value_,
    )
    from graphstash.training.threads import DeviceExecutor
    from graphstash.training.traced import TracedStep, traced_step
    from graphstash.training.traced.state import DeviceState

__all__ = [
    "LAMB",
    "SGD",
    "SOAP",
    "Adafactor",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "Batches",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "Checkpoints",
    "DeviceExecutor",
    "DeviceLoader",
    "DeviceState",
    "DivergedError",
    "Fusion",
    "FusionError",
    "Lion",
    "LogEntry",
    "LossScale",
    "Muon",
    "ScheduleFreeAdamW",
    "Shampoo",
    "StopTraining",
    "TensorBoardCallback",
    "TracedStep",
    "TrainingResult",
    "WandbCallback",
    "clip_grad_norm_",
    "clip_grad_value_",
    "fuse",
    "muon_groups",
    "to_device",
    "traced_step",
    "train",
]

__getattr__, __dir__ = lazy(__name__)
