"""What happens during training, as the caller, callbacks and the progress bar see it."""

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
    """The loss or the gradients have not been finite for a while; training has no effect."""


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
    """How many of them were skipped because a gradient was infinite or NaN."""
    gradient_norm: float | None = None
    """Before clipping, in the last step; None where the norm is not clipped."""
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """What the loss function gave beside the loss, in each of them, by name."""
    reduced: Mapping[str, float] = field(default_factory=dict)
    """What was sent of the gradients since this run began, as `SparseState.scalars` says; empty
    without `reduce`."""

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
    """The step of the checkpoint that this run resumed; 0: it started from the beginning."""


class Callback:
    """Override what you want to see; called in the training thread of every process.

    Everything given is on the host already. An exception ends the training; `StopTraining` does so
    in order, with a checkpoint. Of a job with one process, another exception leaves a checkpoint,
    too, where the position in the data is known: at a boundary, or without batches loaded ahead.
    """

    def on_start(self, step: int, steps: int) -> None:
        """Training begins after step `step` of `steps`."""

    def on_step(self, step: int) -> None:
        """A step was queued; the device may not have made it. The place to average parameters.

        Whatever reads the device here waits for it, at every step.
        """

    def on_log(self, entry: LogEntry) -> None:
        """A logging boundary."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """`evaluate` has returned its metrics."""

    def on_checkpoint(self, step: int, directory: Path) -> None:
        """A checkpoint was taken; it may not be on the disk yet."""

    def on_end(self, result: TrainingResult) -> None:
        """Training has ended without an error."""


class Progress(Callback):
    """Shows what each logging boundary has brought, on standard error.

    It moves at boundaries only: between them the host does not know how far the device is.
    """

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._steps = 0

    def on_start(self, step: int, steps: int) -> None:
        """Begins the bar."""
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
                auto_refresh=False,  # a refreshing thread would take turns with the training
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=steps, completed=step)

    def on_log(self, entry: LogEntry) -> None:
        """Advances the bar, or prints a line."""
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
        """Prints the metrics."""
        values = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._print(f"step {step}: evaluation  {values}")

    def on_end(self, result: TrainingResult) -> None:
        """Ends the bar."""
        self._print(f"{len(result.losses)} steps in {result.seconds:.1f} s")
        self.close()

    def close(self) -> None:
        """Leaves the terminal as it was; may be called again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)


_PATIENCE = 3
"""So many steps in a row with a bad loss are no accident. Without a loss scale one is enough: its
gradients have already been applied."""

_MIN_SCALE = 2.0**-10
"""Below this a scale is not what makes gradients overflow."""


class Divergence:
    """Looks at the rows of a `DeviceLog` at each boundary, and raises where training is lost.

    With a dynamic loss scale single bad steps are normal: they are skipped and the scale shrinks. A
    loss that stays infinite or NaN is not, and neither are gradients that stay so at any scale;
    such a run would continue forever and train nothing.
    """

    def __init__(self) -> None:
        self._bad_loss_since: int | None = None
        self._skipping_since: int | None = None

    def look(self, first_step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """Takes in the rows of steps `first_step`, `first_step + 1`, ...

        Raises:
            DivergedError: training is lost; the message names step, loss and scale.
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
