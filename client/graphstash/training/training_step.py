"""TrainingStep: forward, backward and update, none of which reads the device."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphstash.training.device_log import DeviceLog
from graphstash.training.gradients import clip_grad_norm_, clip_grad_value_
from graphstash.training.loss_scale import LossScale
from graphstash.training.parallel import Parallel

__all__ = ["LossFunction", "Precision", "TrainingStep", "call_model"]

Precision = Literal["fp32", "bf16", "fp16"]

LossFunction = Callable[[nn.Module, Any], Tensor]
"""`loss(model, batch)` gives the mean loss of a batch, a scalar."""

_DTYPES: Final[Mapping[Precision, torch.dtype]] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def call_model(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a model that computes it itself: `model(*batch)`, or `model(**batch)`."""
    if isinstance(batch, Mapping):
        return cast("Tensor", model(**batch))
    if isinstance(batch, tuple | list):
        return cast("Tensor", model(*batch))
    return cast("Tensor", model(batch))


class TrainingStep:
    """A function of one step's micro-batches that trains and writes a row of the log.

    The gradients are gone afterwards: on torch_xla they would otherwise be results of the graph.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: LossFunction,
        *,
        device: torch.device,
        parallel: Parallel,
        precision: Precision,
        scale: LossScale | None,
        clip_norm: float | None,
        clip_value: float | None,
        log_rows: int,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._loss = loss
        self._device = device
        self._parallel = parallel
        self._dtype = _DTYPES.get(precision)
        self._scale = scale.to(device) if scale is not None else None
        self._clip_norm = clip_norm
        self._clip_value = clip_value
        columns = ["loss"]
        if scale is not None:
            columns += ["loss_scale", "found_inf"]
        if clip_norm is not None:
            columns += ["gradient_norm"]
        self.log = DeviceLog(columns, log_rows, device)

    def __call__(self, *batches: Any) -> None:
        """One step over micro-batches that make up its batch."""
        row = {"loss": self._accumulate(batches)}
        self._parallel.reduce_gradients(self._parameters)
        clips = self._clip_norm is not None or self._clip_value is not None
        if self._scale is not None and clips:
            self._scale.unscale_(self._optimizer)
        if self._clip_norm is not None:
            row["gradient_norm"] = clip_grad_norm_(self._parameters, self._clip_norm)
        if self._clip_value is not None:
            clip_grad_value_(self._parameters, self._clip_value)
        if self._scale is not None:
            found_inf = self._scale.step(self._optimizer)
            self._scale.update()
            row |= {"found_inf": found_inf, "loss_scale": self._scale.value}
        else:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.log.append(row)

    def _accumulate(self, batches: tuple[Any, ...]) -> Tensor:
        """Sums the gradients of the batches; the mean of their losses."""
        total: Tensor | None = None
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            with self._parallel.reducing(self._model, last=last):
                with self._autocast():
                    loss: Any = self._loss(self._model, batch)
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                    raise ValueError(
                        f"the loss is {shape}, not one number; give `loss=` a function of model "
                        "and batch that returns the mean loss"
                    )
                part = loss if len(batches) == 1 else loss / len(batches)
                scaled = part if self._scale is None else self._scale.scale(part)
                scaled.backward()  # type: ignore[no-untyped-call]
            total = part.detach() if total is None else total + part.detach()
        if total is None:
            raise ValueError("a step without a batch")
        return total

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)
