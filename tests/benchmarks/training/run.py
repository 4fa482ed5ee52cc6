"""Compare training loops: the plain one, the fastest known one, and graphstash's, lazy and traced.

    .venv/bin/python tests/benchmarks/training/run.py [--quick]

Runs on every available backend: torch_xla, CUDA, and plain torch on the CPU. The CPU has only one
batch size, because torch.compile takes half a minute there for each traced step. Then measures the
overlap of the executor, and the time and memory of optimizer fusion. Writes bench-training.md,
.json and .png. `make bench-training` runs this.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
EXAMPLES = TESTS.parent / "client" / "examples"
sys.path[:0] = [str(TESTS), str(EXAMPLES)]

from loops import ARMS

from benchmarks.figures import Figures, console
from benchmarks.report import begin, environment, files_of, finish, pages, run_part
from benchmarks.training import overlap
from benchmarks.training.arms import BACKENDS, ROUNDS
from benchmarks.training.goals import HOST_BOUND, draw, fusion_goals_of, goals_of

PARTS = ("loops", "overlap", "fusion")

EXPLANATION = (
    "A cell is a model, a batch size and an optimizer; it reaches a goal if the median of its "
    "rounds does. The host counts as the bottleneck where its thread computes for at least "
    f"{HOST_BOUND:.0%} of the wall time of best's step."
)


def main():
    options = parse_options()
    written, report = files_of(options.directory, "bench-training"), begin()
    for backend in options.backends if "loops" in options.parts else ():
        console.rule(f"[bold]{backend}[/bold]")
        measure_loops(report, backend, options)
    if "overlap" in options.parts:
        console.rule("[bold]overlap[/bold]")
        figures = Figures("overlap", {"rounds": options.rounds})
        overlap.measure(figures, options.rounds, 10 if options.quick else overlap.STEPS)
        figures.write(options.directory / "bench-training-overlap.json")
        report["parts"]["overlap"] = figures.as_json()
    if "fusion" in options.parts:
        console.rule("[bold]fusion[/bold]")
        measure_fusion(report, options)
    goals = [*goals_of(report["parts"]), *fusion_goals_of(report["parts"])]
    report["goals"] = [goal.as_json() for goal in goals]
    written["json"].write_text(json.dumps(report, indent=2) + "\n")
    draw(report["parts"], written["png"])
    picture = f"![Speed of each arm relative to the plain loop]({written['png'].name})"
    page = pages(report, "Training loops", about=EXPLANATION, goals=goals, picture=picture)
    written["md"].write_text(page)
    console.print("\n".join(goal.as_markdown() for goal in goals), highlight=False)
    finish(report, written.values())


def measure_loops(report, backend, options):
    """Measure the loops in a process for each backend."""
    env = environment(EXAMPLES, TORCHINDUCTOR_COMPILE_THREADS="1")
    if backend == "torch_xla":
        env = {"PJRT_DEVICE": "CPU"} | env
    output = options.directory / f"bench-training-{backend}.json"
    given = (
        *("--backend", backend, "--rounds", options.rounds, "--models", *options.models),
        *("--optimizers", *options.optimizers, "--arms", *options.arms),
        *("--batch-sizes", "1" if options.quick or backend == "torch" else "2"),
    )
    run_part(report, backend, "benchmarks.training.arms", output, *given, env=env)


def measure_fusion(report, options):
    """Measure fusion in processes of one thread each."""
    output = options.directory / "bench-training-fusion.json"
    given = ["--rounds", options.rounds, "--optimizers", *options.optimizers]
    given += ["--batch-sizes", "1", "32"] if options.quick else []
    env = environment(EXAMPLES, OMP_NUM_THREADS="1")
    run_part(report, "fusion", "benchmarks.training.fusion", output, *given, env=env)


def backends_here():
    """Return the available backends without starting any of them."""
    import torch

    there = {
        "torch_xla": importlib.util.find_spec("torch_xla") is not None,
        "cuda": torch.cuda.is_available(),
        "torch": True,
    }
    return [backend for backend in BACKENDS if there[backend]]


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer cells and rounds: 10 minutes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="[all]")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, help="[all available]")
    parser.add_argument("--models", nargs="+", default=("MLP", "CNN", "GPT"), help="[all]")
    parser.add_argument("--optimizers", nargs="+", help="[SGD Adam AdamW; quick: not Adam]")
    parser.add_argument("--arms", nargs="+", default=ARMS, help="[all]; plain among them")
    parser.add_argument("--rounds", type=int, help=f"samples of every figure [{ROUNDS}; quick: 3]")
    parser.add_argument("--directory", type=Path, default=Path("build"), help="[build]")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else ROUNDS)
    everything = ("SGD", "AdamW") if options.quick else ("SGD", "Adam", "AdamW")
    options.optimizers = options.optimizers or everything
    options.backends = options.backends or backends_here()
    return options


if __name__ == "__main__":
    main()
