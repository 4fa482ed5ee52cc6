"""Progress: a bar where somebody watches, lines where a file does."""

import sys
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from graphstash.training.events import Callback, LogEntry, TrainingResult

__all__ = ["Progress"]


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
        """Moves the bar, or prints a line."""
        text = f"loss {entry.loss:.4f}  lr {entry.learning_rates[0]:.3g}"
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
                f"step {entry.step}: {entry.skipped} of {len(entry.losses)} steps were left out, "
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
