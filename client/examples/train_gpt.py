"""Trains a small byte-level GPT with torch_xla on the sources of Python's standard library.

This is an ordinary training job: it does not use a compilation cache. Run it alone, or with a
command in front that makes its compilation cheaper, and compare the two reports.

The job is deterministic. Weights and batches are drawn on the CPU from `--seed` and then moved to
the device, so two runs on the same machine give the same losses bit for bit, whether their graphs
were compiled or loaded.

Three ways of driving the compiler (`--mode`):

* `lazy`: operations are recorded as they are called and `torch_xla.sync()` ends each step;
* `compile`: the whole step is wrapped in `torch_xla.compile`;
* `dynamo`: forward and backward go through `torch.compile(backend="openxla")`, the optimizer is
  recorded lazily.

In each mode the first two steps differ (the optimizer's state comes into being in the first), so
both compile something; later steps compile nothing. That makes two programs in the first two modes
and five with dynamo: forward, the gradient's seed, backward, and two of the optimizer. Losses of
dynamo may differ from those of the other two in the last bit.

`--loop` trains by another loop instead, to compare: see `loops`.

Shapes: B batch, T context (tokens).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

IMPORT_STARTED = time.perf_counter()

import torch
import torch_xla
import torch_xla.debug.metrics as xla_metrics
from torch import Tensor

IMPORT_SECONDS = time.perf_counter() - IMPORT_STARTED

sys.path.insert(0, str(Path(__file__).parent))  # so under PYTHONSAFEPATH too

import loops
from gpt import GPT, draw_batches, read_corpus

__all__ = ["GPT", "main"]

BETAS = (0.9, 0.95)  # of AdamW
SETTLED_STEP = 3  # steps 1 and 2 compile; this is the first that only repeats
SMALL_PRESET = {"steps": 6, "layers": 2, "width": 64, "context": 32, "learning_rate": 1e-2}

# (tokens [B, T], targets [B, T]) -> the loss: a scalar still on the device, or read already
StepFunction = Callable[[Tensor, Tensor], Tensor | float]


def make_step(model: GPT, *, learning_rate: float, mode: str, loop: str | None) -> StepFunction:
    """Makes the function that trains `model` by one step, compiled in the way `mode` says.

    With `loop`, it is that arm of the module `loops`.
    """
    if loop is not None:
        return loops.make_step(
            loop, model, model, optimizer="AdamW", learning_rate=learning_rate, betas=BETAS
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=BETAS)
    forward = torch.compile(model, backend="openxla") if mode == "dynamo" else model

    def train_step(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        loss: Tensor = forward(tokens_BT, targets_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if mode == "compile":
        compiled: StepFunction = torch_xla.compile(train_step)
        return compiled

    def synced_step(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        loss = train_step(tokens_BT, targets_BT)
        torch_xla.sync()
        return loss

    return synced_step


@dataclass
class Progress:
    """What the run has measured so far; times in seconds since the first step began."""

    losses: list[float] = field(default_factory=list)
    marks: list[tuple[int, float]] = field(default_factory=list)
    """(steps done, time) at each boundary, when that step's loss had reached the host."""

    def seconds_at(self, steps: int) -> float | None:
        """The time at which the loss of step `steps` (from 1) was on the host, if it ever was."""
        return dict(self.marks).get(steps)

    def step_seconds_median(self) -> float | None:
        """The median time of a step after the run has settled; steps between marks count alike."""
        step_seconds: list[float] = []
        for (steps_before, before), (steps_after, after) in pairwise(self.marks):
            steps = steps_after - steps_before
            if steps_before >= SETTLED_STEP:
                step_seconds += [(after - before) / steps] * steps
        return statistics.median(step_seconds) if step_seconds else None


def train(
    step_function: StepFunction,
    batches: Iterator[tuple[Tensor, Tensor]],
    *,
    steps: int,
    log_every: int,
    device: torch.device,
) -> Progress:
    """Trains for `steps` steps; losses stay on the device until a logging boundary.

    Besides every `log_every` steps, boundaries are the ends of the first, the settled and the last
    step, because the report tells their times.
    """
    boundaries = {1, SETTLED_STEP, steps, *range(log_every, steps + 1, log_every)}
    progress = Progress()
    unread: list[Tensor | float] = []  # scalars on the device, mostly
    started = time.perf_counter()
    for step in range(1, steps + 1):
        tokens_BT, targets_BT = next(batches)
        unread.append(step_function(tokens_BT.to(device), targets_BT.to(device)))
        if step not in boundaries:
            continue
        # One by one: stacking them first would be one more program to compile.
        progress.losses += [float(loss) for loss in unread]
        unread.clear()
        progress.marks.append((step, time.perf_counter() - started))
        print(f"step {step:4d}  loss {progress.losses[-1]:.4f}  {progress.marks[-1][1]:8.2f} s")
    return progress


def compiler_metrics() -> dict[str, float | int]:
    """Reads from torch_xla's own metrics what compiling has cost.

    In dynamo mode the two persistent counts are lower bounds: torch_xla's dynamo bridge clears all
    counters while it extracts a graph. Timed metrics survive that, so compiles are counted by
    `CompileTime`; in the other modes that equals the counter `UncachedCompile`.
    """
    compile_time = xla_metrics.metric_data("CompileTime")  # (count, total in ns, samples)
    compiles, compile_nanoseconds, _ = compile_time or (0, 0.0, ())
    return {
        "compile_seconds": compile_nanoseconds / 1e9,
        "compiles": compiles,
        "persistent_hits": xla_metrics.counter_value("PersistentCacheHit") or 0,
        "persistent_misses": xla_metrics.counter_value("PersistentCacheMiss") or 0,
    }


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line; `--small` changes defaults, so options beside it still count."""
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT with torch_xla.")
    parser.add_argument("--mode", choices=("lazy", "compile", "dynamo"), default="lazy")
    parser.add_argument(
        "--loop", choices=loops.ARMS, help="another training loop, instead of --mode"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0, help="for the weights and the batches")
    parser.add_argument("--log-every", type=int, default=10, help="steps between reading losses")
    parser.add_argument("--small", action="store_true", help="2 layers, width 64, 6 steps")
    parser.add_argument("--report", type=Path, help="write times, losses and metrics here as JSON")
    options = parser.parse_args(arguments)
    if options.small:
        parser.set_defaults(**SMALL_PRESET)
        options = parser.parse_args(arguments)
    if min(options.steps, options.log_every) < 1 or options.width % options.heads:
        parser.error("--steps and --log-every must be positive and --heads must divide --width")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Runs the job that the command line describes."""
    options = parse_options(arguments)
    torch.manual_seed(options.seed)
    model = GPT(
        layers=options.layers, width=options.width, heads=options.heads, context=options.context
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    device = torch_xla.device()
    model.to(device)
    torch_xla.sync(wait=True)  # the uploads are not the first step's cost
    print(
        f"{parameters:,} parameters on {device}, "
        + (f"loop {options.loop}" if options.loop else f"mode {options.mode}")
    )

    batches = draw_batches(
        read_corpus(), batch=options.batch, context=options.context, seed=options.seed
    )
    step_function = make_step(
        model, learning_rate=options.learning_rate, mode=options.mode, loop=options.loop
    )
    progress = train(
        step_function, batches, steps=options.steps, log_every=options.log_every, device=device
    )
    if options.report is not None:
        report = {
            "mode": options.mode,
            **({"loop": options.loop} if options.loop else {}),
            "parameters": parameters,
            "steps": options.steps,
            "import_seconds": IMPORT_SECONDS,
            "first_step_seconds": progress.seconds_at(1),
            "settled_seconds": progress.seconds_at(SETTLED_STEP),
            "step_seconds_median": progress.step_seconds_median(),
            "total_seconds": time.perf_counter() - IMPORT_STARTED,
            "losses": progress.losses,
            **compiler_metrics(),
        }
        options.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
