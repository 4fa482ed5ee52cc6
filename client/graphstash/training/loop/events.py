"""Events of training: callbacks, progress, and the check for divergence."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from graphstash.errors import GraphstashError

__all__ = [
    "Callback",
    "DivergedError",
    "Divergence",
    "LogEntry",
    "Progress",
    "StopTraining",
    "TrainingResult",
]


class DivergedError(GraphstashError, ArithmeticError):
    """The loss is infinite or NaN, or the gradients are at any loss scale."""


class StopTraining(Exception):  # noqa: N818 - a request, like StopIteration
    """Raised by a callback to end the training, with a checkpoint.

    Without checkpoints, training ends after this step. With checkpoints, it first trains on the
    batches that were loaded ahead, at most up to the next logging boundary. Otherwise a resumed run
    would skip them. Several processes end at the next logging boundary.
    """


@dataclass(frozen=True, slots=True)
class LogEntry:
    """The numbers of the steps since the last logging boundary."""

    step: int
    """Number of the last of these steps, from 1."""
    losses: tuple[float, ...]
    """The loss of each step. With several processes, the loss of this process's share of the
    batch."""
    learning_rates: tuple[float, ...]
    """The learning rate of each optimizer group after the last step and its schedule, which the
    next step uses."""
    steps_per_second: float
    loss_scale: float | None = None
    """The loss scale after the last step; None if the loss is not scaled."""
    skipped: int = 0
    """Number of these steps that were skipped because a gradient was infinite or NaN."""
    gradient_norm: float | None = None
    """Norm of the gradients in the last step, before clipping; None without `clip_norm`."""
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By name, the values that the loss function returned in each step."""
    reduced: Mapping[str, float] = field(default_factory=dict)
    """Result of `SparseState.scalars`; empty without `reduce`."""

    @property
    def loss(self) -> float:
        """Mean of `losses`."""
        return sum(self.losses) / len(self.losses)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The outcome of a call of `train`."""

    step: int
    """The last completed step, of this run or of the run that it resumed."""
    losses: tuple[float, ...]
    """The loss of each step of this run."""
    seconds: float
    stopped_by: Literal["steps", "callback"]
    resumed_from: int = 0
    """The step of the checkpoint that this run resumed; 0 if the run started from the beginning."""


class Callback:
    """Base class of callbacks: `train` calls each method in the training thread of every process.

    All values are on the host. `StopTraining` ends the training with a checkpoint. Any other
    exception ends it at once. In a job of one process, it also leaves a checkpoint if the position
    in the data is known: at a logging boundary, or if no batches are loaded ahead.
    """

    def on_start(self, step: int, steps: int) -> None:
        """Run before training begins. `step` of `steps` steps were made by an earlier run."""

    def on_step(self, step: int) -> None:
        """Run after each step is queued on the device. Suits averaging of parameters.

        Reading the device here makes training wait for every step.
        """

    def on_log(self, entry: LogEntry) -> None:
        """Run at each logging boundary."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Run when `evaluate` has returned its metrics."""

    def on_checkpoint(self, step: int, directory: Path) -> None:
        """Run after a checkpoint was taken. It may not be on disk yet."""

    def on_end(self, result: TrainingResult) -> None:
        """Run when training has ended without an error."""


class Progress(Callback):
    """Shows each `LogEntry` on standard error.

    The bar advances only at logging boundaries, because reading progress from the device would make
    training wait.
    """

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._steps = 0

    def on_start(self, step: int, steps: int) -> None:
        """Start the bar."""
        self._steps = steps
        if step:
            self._print(f"resumed after step {step}")
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self._console,
                auto_refresh=False,  # a refresh thread would interrupt training
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=steps, completed=step)

    def on_log(self, entry: LogEntry) -> None:
        """Advance the bar, or print a line if there is no terminal."""
        text = f"loss {entry.loss:.4f}  lr {entry.learning_rates[0]:.3g}"
        for name, values in entry.metrics.items():
            text += f"  {name} {sum(values) / len(values):.4f}"
        if entry.gradient_norm is not None:
            text += f"  norm {entry.gradient_norm:.3g}"
        if entry.loss_scale is not None:
            text += f"  scale {entry.loss_scale:g}"
        text += f"  {entry.steps_per_second:.1f} steps/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=entry.step, description=text, refresh=True)
        else:
            self._print(f"step {entry.step:>{len(str(self._steps))}}/{self._steps}  {text}")
        if entry.skipped:
            self._print(
                f"step {entry.step}: {entry.skipped} of {len(entry.losses)} steps were skipped: "
                "their gradients were infinite or NaN"
            )

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the metrics."""
        values = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._print(f"step {step}: evaluation  {values}")

    def on_end(self, result: TrainingResult) -> None:
        """Print the duration and end the bar."""
        self._print(f"{len(result.losses)} steps in {result.seconds:.1f} s")
        self.close()

    def close(self) -> None:
        """Restore the terminal. Further calls do nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)


_PATIENCE = 3
"""Consecutive steps with an infinite or NaN loss that end training with a loss scale. Without a
scale one such step is enough, because its gradients have been applied."""

_MIN_SCALE = 2.0**-10
"""Below this value, the loss scale is not the reason why gradients overflow."""


class Divergence:
    """Checks the rows of a `DeviceLog` at each boundary, and raises if training has diverged.

    With a dynamic loss scale, single infinite or NaN gradients are normal: the step is skipped, and
    the scale shrinks. If the loss stays infinite or NaN, or the gradients do at any scale, further
    steps have no effect.
    """

    def __init__(self) -> None:
        self._bad_loss_since: int | None = None
        self._skipping_since: int | None = None

    def check(self, first_step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """Check the rows of steps `first_step`, `first_step + 1`, ...

        Raises:
            DivergedError: training has diverged. The message names step, loss and scale.
        """
        for step, row in enumerate(rows, first_step):
            if math.isfinite(row["loss"]):
                self._bad_loss_since = None
            elif self._bad_loss_since is None:
                self._bad_loss_since = step
            if not row.get("found_inf"):
                self._skipping_since = None
            elif self._skipping_since is None:
                self._skipping_since = step
        step, row = first_step + len(rows) - 1, rows[-1]
        scale = row.get("loss_scale")
        scaled = "" if scale is None else f", loss scale {scale:g}"
        if self._bad_loss_since is not None:
            count = step - self._bad_loss_since + 1
            if scale is None or count >= _PATIENCE:
                raise DivergedError(
                    f"the loss is {row['loss']} in step {step} and has not been finite since step "
                    f"{self._bad_loss_since}{scaled}; lower the learning rate, clip the gradients "
                    "(clip_norm), or look at the batch of that step"
                )
        elif self._skipping_since is not None and scale is not None and scale < _MIN_SCALE:
            raise DivergedError(
                f"step {step}: gradients are infinite or NaN at any loss scale, and no step has "
                f"counted since step {self._skipping_since}{scaled}; look for a division by zero "
                "or the like in the model's backward pass, or train in bf16"
            )
