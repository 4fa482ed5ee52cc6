"""One training step in four arms, to compare: same arithmetic, different ways around it.

    plain         torch.optim and torch.amp.GradScaler; the loss is read after every step
    best          the best there was before: on torch_xla `torch_xla.amp.syncfree` with its
                  GradScaler (torch_xla 2.7 and before), elsewhere `fused=True` optimizers
    ours          the optimizers and the loss scale of `graphstash.training`
    ours-traced   the same, in `traced_step`

The step itself is the same code in all of them. Only `plain` reads the loss in each step; the other
loops keep losses on the device until the caller reads them.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ARMS", "OPTIMIZERS", "PRECISIONS", "Step", "device_counts", "make_step"]

ARMS = ("plain", "best", "ours", "ours-traced")
OPTIMIZERS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Adam": {}, "AdamW": {}}
"""By their name in every arm; with options that all arms use."""
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

Step = Callable[..., Tensor | float]
"""Trains on one batch; `float()` of what it gives is the loss, and reads the device if need be."""


def make_step(
    arm: str,
    model: nn.Module,
    loss_of: Callable[..., Tensor],
    *,
    optimizer: str,
    learning_rate: float,
    precision: str = "fp32",
    scaled: bool | None = None,
    **options: Any,
) -> Step:
    """Makes the function that trains `model` by one step.

    Args:
        arm: one of ARMS.
        model: already on its device.
        loss_of: `loss_of(*batch)` is the model's loss, a scalar.
        optimizer: a name in OPTIMIZERS.
        learning_rate: above 0.
        precision: what autocast computes in; parameters are float32 in any case.
        scaled: with a dynamic loss scale; None: where the precision needs it, in fp16.
        options: more of the optimizer's.

    Raises:
        ImportError: the arm needs something that is not installed.
    """
    device = next(model.parameters()).device
    dtype = PRECISIONS[precision]
    settings = {"lr": learning_rate, **OPTIMIZERS[optimizer], **options}
    make_parts = {"plain": _plain, "best": _best}.get(arm, _ours)
    make_optimizer, make_scale = make_parts(optimizer, device)
    trainer = make_optimizer(model.parameters(), **settings)
    scale = make_scale() if scaled or (scaled is None and precision == "fp16") else None

    def step(*batch: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype) if dtype else nullcontext():
            loss = loss_of(*batch)
        if scale is None:
            loss.backward()
            trainer.step()
        else:
            scale.scale(loss).backward()
            scale.step(trainer)
            scale.update()
        trainer.zero_grad()
        return loss.detach()

    if arm == "ours-traced":
        from graphstash.training import traced_step

        return traced_step(step, state=[model, trainer, *([scale] if scale else [])])
    if device.type == "xla":
        step = _synced(step)
    return _read_every_loss(step) if arm == "plain" else step


def device_counts(device: torch.device) -> dict[str, int]:
    """What this process has done so far by torch_xla's metrics; empty on other devices.

    Waits for what is under way, since an execution is counted at its end. Compiles
    are counted by `CompileTime`, so what was loaded from a cache is none.
    """
    if device.type != "xla":
        return {}
    import torch_xla.debug.metrics as xla_metrics
    from torch_xla.core import xla_model

    xla_model.wait_device_ops()
    names = {
        "reads": "TransferFromDeviceTime",
        "executions": "ExecuteTime",
        "compiles": "CompileTime",
    }
    data = {name: xla_metrics.metric_data(metric) for name, metric in names.items()}
    return {name: int(values[0]) if values else 0 for name, values in data.items()}


_Parts = tuple[Callable[..., Any], Callable[[], Any]]


def _plain(optimizer: str, device: torch.device) -> _Parts:
    return getattr(torch.optim, optimizer), lambda: torch.amp.GradScaler(device.type)


def _best(optimizer: str, device: torch.device) -> _Parts:
    if device.type != "xla":
        fused = {"fused": True}
        return (
            lambda parameters, **settings: getattr(torch.optim, optimizer)(
                parameters, **settings, **fused
            ),
            lambda: torch.amp.GradScaler(device.type),
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch_xla.amp import GradScaler, syncfree
    return getattr(syncfree, optimizer), lambda: _quietly(GradScaler)


def _ours(optimizer: str, device: torch.device) -> _Parts:
    del device
    from graphstash import training

    return getattr(training, optimizer), training.LossScale


def _quietly(make: Callable[[], Any]) -> Any:
    """torch_xla's GradScaler is made of one that torch has renamed since, and says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return make()


def _synced(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    import torch_xla

    def synced(*batch: Tensor) -> Tensor:
        loss = step(*batch)
        torch_xla.sync()
        return loss

    return synced


def _read_every_loss(step: Callable[..., Tensor]) -> Step:
    return lambda *batch: step(*batch).item()
