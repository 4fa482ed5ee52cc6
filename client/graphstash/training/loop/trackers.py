"""Callbacks that log the cache's figures beside a run's other curves; they import no tracker.

    from torch.utils.tensorboard import SummaryWriter
    from graphstash import training

    training.train(..., callbacks=[training.TensorBoardCallback(SummaryWriter("runs/1"))])

Other loops log `graphstash.stats().scalars()` where they log their loss.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from graphstash._process.session import stats
from graphstash.training.loop.events import Callback, LogEntry, TrainingResult

__all__ = ["TensorBoardCallback", "WandbCallback"]

_STEP = "graphstash/step"


class _Writer(Protocol):
    """The method that writers of torch, TensorBoard and tensorboardX share."""

    def add_scalar(self, tag: str, value: Any, step: Any, /) -> Any:
        """Add a point to a curve."""


class _Run(Protocol):
    def define_metric(self, name: str, *, step_metric: str) -> Any:
        """Set which value is the horizontal axis of a curve."""

    def log(self, data: dict[str, Any], /) -> Any:
        """Add points to curves."""


class _Tracker(Callback):
    def on_log(self, entry: LogEntry) -> None:
        sent = {f"graphstash/reduce/{name}": value for name, value in entry.reduced.items()}
        self._write(entry.step, {**stats().scalars(), **sent})

    def on_end(self, result: TrainingResult) -> None:
        self._write(result.step, stats().scalars())

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        raise NotImplementedError


class TensorBoardCallback(_Tracker):
    """Writes the process's cache hits, misses and savings at logging boundaries and at the end.

    Args:
        writer: a `SummaryWriter` of torch or tensorboardX, or a `tensorboard.summary.Writer`; not
            closed. Give a writer to the first process only.
    """

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)


class WandbCallback(_Tracker):
    """Logs the process's cache hits, misses and savings at logging boundaries and at the end.

    The curves have their own axis, `graphstash/step`, so the run may log other values at any step.

    Args:
        run: the result of `wandb.init`; the callback does not finish it.
    """

    def __init__(self, run: _Run) -> None:
        self._run = run
        run.define_metric("graphstash/*", step_metric=_STEP)

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({_STEP: step, **scalars})
