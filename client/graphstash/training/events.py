"""What happens during training, as the caller and callbacks see it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graphstash._errors import GraphstashError

__all__ = ["Callback", "DivergedError", "LogEntry", "StopTraining", "TrainingResult"]


class DivergedError(GraphstashError, ArithmeticError):
    """The loss or the gradients have not been finite for a while; no step trains any more."""


class StopTraining(Exception):  # noqa: N818 - a request, as StopIteration
    """A callback raises it to end the training after this step, with a checkpoint."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """What is known at a logging boundary about the steps since the last one."""

    step: int
    """The last of them, from 1."""
    losses: tuple[float, ...]
    """Of each of them; with several processes, of this one's share of the batch."""
    learning_rates: tuple[float, ...]
    """Of the optimizer's groups, in the last step."""
    steps_per_second: float
    loss_scale: float | None = None
    """After the last step; None where the loss is not scaled."""
    skipped: int = 0
    """How many of them were left out because a gradient was infinite or NaN."""
    gradient_norm: float | None = None
    """Before clipping, in the last step; None where the norm is not clipped."""

    @property
    def loss(self) -> float:
        """The mean of `losses`."""
        return sum(self.losses) / len(self.losses)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a call of `train` ended."""

    step: int
    """The last step that was made, in this run or in one that it resumed."""
    losses: tuple[float, ...]
    """Of every step of this run."""
    seconds: float
    stopped_by: Literal["steps", "callback"]
    resumed_from: int = 0
    """The step of the checkpoint that this run went on from; 0: it began anew."""


class Callback:
    """Override what you want to see; called in the training thread of every process.

    Everything given is on the host already. An exception ends the training; `StopTraining` does so
    in order, with a checkpoint.
    """

    def on_start(self, step: int, steps: int) -> None:
        """Training begins after step `step` of `steps`."""

    def on_log(self, entry: LogEntry) -> None:
        """A logging boundary."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """`evaluate` has returned its metrics."""

    def on_checkpoint(self, step: int, directory: Path) -> None:
        """A checkpoint was taken; it may still be on its way to the disk."""

    def on_end(self, result: TrainingResult) -> None:
        """Training has ended without an error."""
