"""Compare the arms on one backend: every cell, interleaved, round by round.

    python tests/benchmarks/training/run.py --help

runs this as a process of its own for each backend. In a round, every arm runs the same number of
steps, in an order that rotates. Ratios compare two arms of one round, so that other load on the
machine affects both. The garbage collector is off meanwhile.
"""

import argparse
import gc
from pathlib import Path

import torch
from loops import ARMS, OPTIMIZERS

from benchmarks.figures import Figures, progress, rotated
from benchmarks.training.cells import BATCH_SIZES, Cell, Run

BACKENDS = ("torch_xla", "cuda", "torch")
RATES = "Steps per second"
RATIOS = "Ratios of steps per second, of the same round"
HOST = "CPU time of the training thread, ms per step"
COSTS = "Per step between boundaries, over all cells of the model"
PAIRS = (
    ("best", "plain"),
    ("ours", "plain"),
    ("ours", "best"),
    ("ours-traced", "plain"),
    ("ours-traced", "best"),
)
BLOCK_SECONDS = 0.25  # of the arm `plain`
ROUNDS = 9


def main():
    options = parse_options()
    device = device_of(options.backend)
    cells = [
        Cell(model, batch, optimizer)
        for model in options.models
        for batch in BATCH_SIZES[model][: options.batch_sizes]
        for optimizer in options.optimizers
    ]
    rounds = options.rounds
    figures = Figures(
        options.backend,
        {
            "device": str(device),
            "torch": torch.__version__,
            "rounds": rounds,
            "precision": ("fp16" if device.type == "cuda" else "bf16") + " with a loss scale",
        },
    )
    with progress() as bar:
        for cell in bar.track(cells, description=options.backend):
            measure(cell, options.arms, device, rounds, figures)
    if device.type == "xla":
        figures.note(
            "Arms share what is compiled: ours-traced finds graphs that ours has compiled."
        )
    figures.write(options.output)


def measure(cell, arms, device, rounds, figures):
    runs = {}
    for arm in arms:
        try:
            runs[arm] = Run(cell, arm, device)
        except (ImportError, RuntimeError) as why:
            figures.note(f"{cell}: {arm} does not run here: {why}")
    steps = steps_of_a_block(runs["plain"])
    gc.collect()
    gc.disable()
    for number in range(rounds):
        one_round(cell, dict(rotated(runs.items(), number)), steps, figures)
    gc.enable()
    for arm, run in runs.items():
        row = f"{cell.model}, {arm}"
        if device.type != "xla":
            figures.add(COSTS, row, "reads", run.reads())
        else:
            figures.add(COSTS, row, "compiles until settled", run.compiles)
        figures.add(
            COSTS, row, "loss and plain's differ by, ppm", 1e6 * difference(run, runs["plain"])
        )
        if (reason := getattr(run.step, "reason", None)) is not None:
            figures.note(f"{cell}: {arm} runs lazily: {reason}")
    runs.clear()
    gc.collect()


def one_round(cell, runs, steps, figures):
    rates = {}
    for arm, run in runs.items():
        rates[arm], host, counts = run.block(steps)
        figures.add(RATES, str(cell), arm, rates[arm])
        if run.device.type != "cpu":  # a CPU computes in this thread
            figures.add(HOST, str(cell), arm, host)
        for name, count in counts.items():
            figures.add(COSTS, f"{cell.model}, {arm}", name, count)
    for arm, other in PAIRS:
        if arm in rates and other in rates:
            figures.add(RATIOS, str(cell), f"{arm} / {other}", rates[arm] / rates[other])


def steps_of_a_block(run):
    rate, _, _ = run.block(5)
    return min(max(round(rate * BLOCK_SECONDS), 5), 400)


def difference(run, other):
    """Return the largest relative difference of a loss in the warm-up."""
    return max(abs(a - b) / abs(b) for a, b in zip(run.losses, other.losses, strict=True))


def device_of(backend):
    if backend == "torch_xla":
        import torch_xla

        return torch_xla.device()
    return torch.device("cpu" if backend == "torch" else backend)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    parser.add_argument("--models", nargs="+", choices=BATCH_SIZES, default=list(BATCH_SIZES))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--batch-sizes", type=int, default=2, help="how many of each model's")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
