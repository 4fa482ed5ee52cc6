"""Measure optimizer fusion: CPU time and memory of a step, beside torch's own ways.

    python tests/benchmarks/training/run.py --parts fusion

runs this. Every arm of a cell is a new process with one thread. In a round, the processes make the
same number of steps, one after the other, in an order that rotates. Ratios compare two arms of one
round. CPU time is the training thread's, because other programs may use the cores at the same time.
The allocator decides when a freed gradient's memory is reused; LD_PRELOAD selects another one.
"""

import argparse
import multiprocessing
import os
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.figures import Figures, progress, rotated
from benchmarks.training.fusion_run import ARMS, MIB, MODELS, OPTIMIZERS, Cell, serve

TABLE = "CPU time of the training thread, ms per step"
RATES = "Steps per second of wall time"
RATIOS = "Ratios of CPU time per step, of the same round"
SHARE = "optimizer's share"
FAULTS = "Page faults per step: memory that the allocator had given back"
GRADIENTS = "Gradients that are live at once, MiB"
PEAK = "Peak of a process over what it had before the model, MiB"
PAIRS = (
    ("unfused", "backward"),
    ("unfused", "forward"),
    ("torch fused", "backward"),
    ("torch fused", "unfused"),
    ("torch fused", "torchtune"),
)
ROUNDS = 7
BLOCK_MS = 150  # of the arm `unfused`
BATCH_SIZES = (1, 8, 32, 128)
LARGE = "MLP 25x1024"


def main():
    options = parse_options()
    settings = {"torch": torch.__version__, "rounds": options.rounds, "threads": 1}
    settings["allocator"] = Path(os.environ.get("LD_PRELOAD") or "libc").name
    figures = Figures("fusion", settings)
    cells = [
        Cell(model, optimizer, batch)
        for model in options.models
        for optimizer in options.optimizers
        for batch in options.batch_sizes
    ]
    with progress() as bar:
        for cell in bar.track(cells, description="fusion"):
            with Processes(cell) as processes:
                measure_time(cell, processes, options.rounds, figures)
        large = options.optimizers if options.memory else ()
        for optimizer in bar.track(large, description="memory"):
            measure_memory(Cell(LARGE, optimizer, 8), figures)
    figures.write(options.output)


class Processes(ExitStack):
    """A process for each arm, called with an arm and a method of its `Run`."""

    def __init__(self, cell, arms=ARMS):
        super().__init__()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.training.fusion_run"])
        self._connections = {}
        for arm in arms:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, cell, arm), daemon=True)
            process.start()
            theirs.close()
            self._connections[arm] = ours
            self.callback(process.join)
        for connection in self._connections.values():
            self.callback(connection.send, None)  # before it is joined
        self.losses = {arm: connection.recv() for arm, connection in self._connections.items()}

    def __call__(self, arm, *call):
        self._connections[arm].send(call)
        return self._connections[arm].recv()


def measure_time(cell, processes, rounds, figures):
    reference = processes.losses["unfused"]
    for arm in ("backward", "forward"):
        if processes.losses[arm] != reference:
            figures.note(f"{cell}: the losses of {arm} are not those of unfused")
    steps = max(1, round(BLOCK_MS / processes("unfused", "block", 1)[0]))
    for number in range(rounds):
        taken = {}
        for arm in rotated(ARMS, number):
            taken[arm], wall, in_step, faults = processes(arm, "block", steps)
            figures.add(TABLE, str(cell), arm, taken[arm])
            figures.add(RATES, str(cell), arm, 1000 / wall)
            figures.add(FAULTS, str(cell), arm, faults)
            if arm == "unfused":
                figures.add(RATIOS, str(cell), SHARE, in_step / taken[arm])
        for base, arm in PAIRS:
            figures.add(RATIOS, str(cell), f"{arm} / {base}", taken[arm] / taken[base])


def measure_memory(cell, figures):
    """Add the memory of a large model. Each process runs alone."""
    for arm in ARMS:
        with Processes(cell, [arm]) as processes:
            figures.add(PEAK, str(cell), arm, processes(arm, "peak") / MIB)
            figures.add(GRADIENTS, str(cell), arm, processes(arm, "live gradients") / MIB)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = [name for name in MODELS if name != LARGE]
    parser.add_argument("--models", nargs="*", choices=models, default=models, help="or none")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=BATCH_SIZES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
