"""TrainingStep: forward, backward and update, without reading the device."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from graphstash.errors import ConfigError
from graphstash.training.device import TracedOp, assign, upload
from graphstash.training.loop.events import Callback
from graphstash.training.loop.parallel import Parallel
from graphstash.training.optimizers.gradients import LossScale, clip_grad_norm_, clip_grad_value_
from graphstash.training.reduce.ddp_hook import SparseState
from graphstash_schema import InvalidValueError, ManifestName

__all__ = ["Options", "TrainingStep"]

Precision = Literal["fp32", "bf16", "fp16"]

LossFunction = Callable[[nn.Module, Any], Any]
"""`loss(model, batch)` returns the mean loss of a batch, a scalar; or a mapping or object with
`loss` and a scalar for each name in `metrics`."""

_DTYPES: Final[Mapping[str, torch.dtype | None]] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model that computes its own loss: `model(*batch)` or `model(**batch)`."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


class Stateful(Protocol):
    """An object whose state belongs in checkpoints, such as averaged parameters."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors, numbers and strings, in lists, tuples and dictionaries."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore a result of `state_dict`."""
        ...


@dataclass(frozen=True, eq=False)
class Options:
    """The arguments of `train`, which documents them.

    Raises:
        ConfigError: an argument is out of its range, or two arguments conflict.
    """

    model: nn.Module
    optimizer: Optimizer
    data: Iterable[Any]
    _: KW_ONLY
    steps: int
    loss: LossFunction = call_model
    precision: Precision = "fp32"
    loss_scale: LossScale | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    schedule: LRScheduler | None = None
    traced: bool = False
    fuse: Literal["backward", "forward"] | None = None
    reduce: SparseState | None = None
    ahead: int | None = None
    log_every: int = 50
    metrics: Sequence[str] = ()
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    evaluate_every: int | None = None
    checkpoints: Path | str | None = None
    checkpoint_every: int = 1000
    keep: int = 3
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    progress: bool = True
    job: str | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_parameters()
        self._check_fusion()
        self._check_schedule()
        if isinstance(self.metrics, str):
            raise ConfigError(
                f"metrics is {self.metrics!r}: it must be a list of names, such as "
                f"[{self.metrics!r}]"
            )
        if clash := {"loss", "loss_scale", "found_inf", "gradient_norm"} & {*self.metrics}:
            raise ConfigError(f"metrics: {', '.join(clash)} is logged without being named")
        if self.precision not in _DTYPES:
            raise ConfigError(
                f"precision must be 'fp32', 'bf16' or 'fp16' (got {self.precision!r})"
            )
        if self.loss_scale is None and self.precision == "fp16":
            object.__setattr__(self, "loss_scale", LossScale())
        if self.loss_scale is not None and not self.loss_scale.is_enabled():
            object.__setattr__(self, "loss_scale", None)
        if self.reduce is not None and self.reduce.holds_back and self.loss_scale is not None:
            raise ConfigError(
                "thresholding keeps gradients for later steps, which have another loss scale; use "
                "precision='bf16', or reduce= without thresholding"
            )
        step_parameters = inspect.signature(self.optimizer.step).parameters
        if self.loss_scale is not None and "found_inf" not in step_parameters:
            raise ConfigError(
                f"{type(self.optimizer).__name__} cannot skip steps with non-finite gradients; "
                "with a loss scale, use one of graphstash.training's optimizers"
            )
        if self.job is not None:
            try:
                ManifestName(self.job)
            except InvalidValueError as error:
                raise ConfigError(f"job: {error}") from None

    def _check_numbers(self) -> None:
        for name in ("steps", "accumulate", "log_every", "checkpoint_every", "evaluate_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Integral) or int(value) < 1):
                raise ConfigError(f"{name} must be a whole number, at least 1 (got {value!r})")

    def _check_parameters(self) -> None:
        parameters = {id(parameter) for parameter in self.model.parameters()}
        if not parameters:
            raise ConfigError(f"the model, a {type(self.model).__name__}, has no parameters")
        updated = [p for group in self.optimizer.param_groups for p in group["params"]]
        if not any(id(parameter) in parameters for parameter in updated):
            raise ConfigError(
                "the optimizer has none of the model's parameters; make it of model.parameters(), "
                "after the model was moved to its device"
            )
        if not any(parameter.requires_grad for parameter in updated):
            raise ConfigError(
                "there is nothing to train: no parameter of the optimizer has requires_grad"
            )

    def _check_schedule(self) -> None:
        if isinstance(self.schedule, ReduceLROnPlateau):
            raise ConfigError(
                "ReduceLROnPlateau needs a metric at every step, which would read the device; step "
                "it in a callback's on_evaluation, or use another schedule"
            )
        if self.schedule is not None and not _share_groups(self.schedule, self.optimizer):
            raise ConfigError(
                f"the schedule, a {type(self.schedule).__name__}, was made of another optimizer, "
                "so the learning rate would never change; make it of the optimizer that trains"
            )

    def _check_fusion(self) -> None:
        if self.fuse not in (None, "backward", "forward"):
            raise ConfigError(f"fuse must be None, 'backward' or 'forward' (got {self.fuse!r})")
        if self.fuse is not None and self.traced:
            raise ConfigError(
                "a traced step is one graph, in which the compiler fuses the updates: leave fuse "
                "or traced out"
            )
        needs_all = ("loss_scale", "clip_norm", "clip_value")
        late = [name for name in needs_all if getattr(self, name) is not None]
        late += ["accumulate"] * (self.accumulate > 1) + ["fp16"] * (self.precision == "fp16")
        if self.fuse == "backward" and late:
            raise ConfigError(
                f"fuse='backward' updates parameters before all gradients are there, which "
                f"{', '.join(late)} would wait for: use fuse='forward'"
            )

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device


def _share_groups(schedule: LRScheduler, optimizer: Optimizer) -> bool:
    """Return whether a schedule changes groups of the optimizer, which another may wrap."""
    groups = getattr(getattr(schedule, "optimizer", optimizer), "param_groups", ())
    return not {*map(id, groups)}.isdisjoint(map(id, optimizer.param_groups))


class TrainingStep:
    """Trains on one step's micro-batches, and appends a row to the log.

    Frees the gradients, which would otherwise be results of the graph on torch_xla.

    Attributes:
        model: the model whose forward is called, as `Parallel.wrap` returns it.
    """

    def __init__(self, options: Options, parallel: Parallel) -> None:
        self._options = options
        self._parallel = parallel
        self.model = parallel.wrap(options.model, reduce=options.reduce, is_captured=options.traced)
        self._device = options.device
        self._parameters = [p for g in options.optimizer.param_groups for p in g["params"]]
        columns = ["loss", *options.metrics]
        if options.loss_scale is not None:
            options.loss_scale.to(self._device)
            columns += ["loss_scale", "found_inf"]
        if options.clip_norm is not None:
            columns += ["gradient_norm"]
        self.log = DeviceLog(columns, min(options.log_every, options.steps), self._device)

    def __call__(self, *batches: Any) -> None:
        """Make one step; each argument is a micro-batch."""
        options, scale = self._options, self._options.loss_scale
        row = self._accumulate(batches)
        self._parallel.reduce_gradients(self._parameters)
        clips = options.clip_norm is not None or options.clip_value is not None
        if scale is not None and clips:
            scale.unscale_(options.optimizer)
        if options.clip_norm is not None:
            row["gradient_norm"] = clip_grad_norm_(self._parameters, options.clip_norm)
        if options.clip_value is not None:
            clip_grad_value_(self._parameters, options.clip_value)
        if scale is not None:
            found_inf = scale.step(options.optimizer)
            scale.update()
            row |= {"found_inf": found_inf, "loss_scale": scale.value}
        else:
            options.optimizer.step()
        options.optimizer.zero_grad(set_to_none=True)
        self.log.append(row)

    def _accumulate(self, batches: tuple[Any, ...]) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            with self._parallel.reducing(self.model, last=last):
                with self._autocast():
                    values = self._values_of(self._options.loss(self.model, batch))
                if len(batches) > 1:
                    values = {name: value / len(batches) for name, value in values.items()}
                loss, scale = values["loss"], self._options.loss_scale
                scaled = loss if scale is None else scale.scale(loss)
                scaled.backward()
            for name, value in values.items():
                part = value.detach()
                total[name] = part if name not in total else total[name] + part
        if not total:
            raise ValueError("a training step needs at least one batch")
        return total

    def _values_of(self, result: Any) -> dict[str, Tensor]:
        names = ("loss", *self._options.metrics)
        if isinstance(result, Mapping):
            values: dict[str, Any] = {name: result.get(name) for name in names}
        elif isinstance(result, Tensor) and len(names) == 1:
            values = {"loss": result}
        else:
            values = {name: getattr(result, name, None) for name in names}
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"the {name} is {given}, not one number; `loss=` must be a function of model "
                    "and batch that returns the mean loss, or a mapping with 'loss' and what "
                    f"`metrics=` names (it gave a {type(result).__name__}; a model of Hugging Face "
                    "computes its loss where the batch has labels)"
                )
        return values

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _DTYPES[self._options.precision]
        if dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=dtype)


class DeviceLog:
    """The loss and other values of the last steps, in a ring buffer on the device.

    The buffer is a table [rows, columns] of float32, and each step writes a row. At a logging
    boundary, the host reads the table once. At most `rows` steps may lie between two boundaries.
    """

    def __init__(self, columns: Sequence[str], rows: int, device: torch.device) -> None:
        self.columns = tuple(columns)
        self._read_count = 0
        empty = torch.full((rows, len(self.columns)), math.nan, dtype=torch.float32)
        first = torch.tensor(0, dtype=torch.int32)
        numbers = torch.arange(rows, dtype=torch.int32).unsqueeze(1)  # [rows, 1]
        self._table, self._next, self._numbers = upload([empty, first, numbers], device)

    @torch.no_grad()
    def append(self, values: Mapping[str, Tensor]) -> None:
        """Write a row, one element per column, as part of the step; does not read the device."""
        row = [values[column].detach() for column in self.columns]
        changed = _append([self._table, self._next, self._numbers, *row], self._table.shape)
        assign([self._table, self._next], changed)

    def read(self, count: int) -> list[dict[str, float]]:
        """Read the device, and return the rows of the `count` steps since the last call."""
        rows = self._table.cpu().tolist()
        numbers = range(self._read_count, self._read_count + count)
        self._read_count += count
        return [dict(zip(self.columns, rows[n % len(rows)], strict=True)) for n in numbers]

    def device_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that a step reads or changes."""
        yield from (self._table, self._next, self._numbers)

    def refresh(self) -> None:
        """Do nothing: no value here depends on the host."""


def _with_row(inputs: list[Tensor], key: object) -> list[Tensor]:
    del key
    table, position, numbers, *values = inputs
    row = torch.stack([value.reshape(()).float() for value in values])
    return [torch.where(numbers == position, row, table), (position + 1) % table.shape[0]]


_append = TracedOp("log", _with_row)
