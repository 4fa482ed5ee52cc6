"""Compare searchers on lattices, on tables of measured kernels, and on TVM.

    .venv/bin/python tests/benchmarks/tuning/run.py [--tables FOLDER] [--gemm LENGTH ...]

A search on a lattice or a table looks costs up instead of measuring, so many seeds take minutes.
All searchers run with the same seeds. A table is a CSV file, perhaps with .gz: a column for each
parameter, then `milliseconds`, which is a number or `invalid`. `--gemm` adds matrix multiplications
that TVM compiles. A measurement takes 0.2 to 1 s, so choose an affordable size:

    --lattices --gemm 256 512 1024 --seeds 5 --most 0.001

`make bench-tuning` runs this. It writes bench-tuning.md and .json after each seed, and .png at the
end.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS)]

from benchmarks.figures import console, table_of
from benchmarks.plots import panels
from benchmarks.report import begin, files_of, finish
from benchmarks.tuning.compare import ARMS, PAPER, best_known, compare, rows_of, saved
from benchmarks.tuning.gemm import gemms
from benchmarks.tuning.problems import lattices, table

EXPLANATION = (
    "Cells: the best so far over the best known, median of the seeds (lowest to highest), after "
    "measuring that share of the space (in brackets: the number of measurements); p against the "
    "first row. Re-measured: the best of 5 finalists over the best of that seed, measured against "
    "those of the other searchers. To "
    "within 5%: of the best known (inf: not reached). Seconds: wall time; searchers took turns, "
    "one measurement each. Area: the mean over the measurements of log(best so far / best known); "
    "p of Wilcoxon's signed-rank test, two-sided, pairs of equal seeds."
)


def main(arguments=None):
    options = parse_options(arguments)
    written = files_of(options.directory, "bench-tuning")
    report, curves = begin(seeds=options.seeds, problems={}), {}
    for problem in problems(options):
        began = time.process_time()
        runs = {arm: [] for arm in options.arms}
        for seed in range(options.seeds):
            for arm, run in compare(problem, options.arms, seed, options.most).items():
                runs[arm].append(run)
            report["problems"][problem.name] = facts(problem, runs, options.most)
            written["json"].write_text(json.dumps(report, indent=2) + "\n")
            written["md"].write_text(pages(report, written["png"].name))
        curves |= curves_of(problem, runs)
        spent = time.process_time() - began
        console.print(f"{problem.name}: {spent:.0f} s of CPU time", highlight=False)
    draw(curves, written["png"])
    console.print(written["md"].read_text(), highlight=False, markup=False)
    finish(report, written.values())


def problems(options):
    yield from lattices(options.lattices)
    for file in sorted(options.tables.glob("*.csv*")) if options.tables else ():
        yield table(file)
    yield from gemms(options.gemm)


def facts(problem, runs, most):
    """Return the report's facts about a problem, after the seeds so far."""
    seeds = len(next(iter(runs.values())))
    found = {"size": problem.space.size, "seeds": seeds, "load": os.getloadavg()}
    found["rows"] = rows_of(problem, runs, most)
    # A measurement cannot be repeated exactly, so the report keeps all of them.
    if problem.compare is not None:
        found["runs"] = {arm: [asdict(run) for run in each] for arm, each in runs.items()}
    return found


def curves_of(problem, runs):
    """Return the medians of the seeds by problem and unit of x: {arm: (x, best so far)}."""
    known = best_known(problem, runs)
    ratios = {
        arm: [cost / known for cost in medians(run.best for run in each)]
        for arm, each in runs.items()
    }
    by_count = {arm: (range(1, len(each) + 1), each) for arm, each in ratios.items()}
    curves = {(problem.name, "measurements"): by_count}
    if problem.compare is not None:
        curves[problem.name, "seconds"] = {
            arm: (medians(run.seconds for run in each), ratios[arm]) for arm, each in runs.items()
        }
    return curves


def draw(curves, output):
    names = {f"{problem}, over {unit}": arms for (problem, unit), arms in curves.items()}
    with panels(names, output, size=(7, 4)) as panel:
        for title, axes in panel.items():
            for arm, (x, best) in names[title].items():
                axes.plot(x, best, label=arm, linewidth=1.2)
            axes.set_xscale("log")
            axes.set_ylabel("best so far / best known")
            axes.set_ylim(0.98, 3)


def medians(runs):
    return [median(each) for each in zip(*runs, strict=True)]


def pages(report, picture):
    about = report["machine"]
    lines = [
        "# Searchers",
        "",
        (
            f"{report['started']}; {about['cores']} cores ({about['cpu']}), "
            f"Python {about['python']}; {report['seeds']} seeds. {EXPLANATION}"
        ),
        "",
        f"![The best so far over the measurements]({picture})",
    ]
    for name, problem in report["problems"].items():
        load = ", ".join(f"{each:.1f}" for each in problem["load"])
        about = f"{problem['size']} configurations, {problem['seeds']} seeds; load {load}."
        lines += ["", f"## {name}", "", about, "", *table_of(problem["rows"], shown)]
        lines += ["", "Time of the best kernel that g-bfs saves: " + savings(problem["rows"])]
    return "\n".join(lines) + "\n"


def savings(rows):
    """Return the savings beside those in the paper."""
    found = {arm: f"{round(100 * share)}%" for arm, share in saved(rows).items()}
    return "; ".join(
        f"{found.get(arm, 'not compared')} of {arm}'s (paper: {share:.0%})"
        for arm, share in PAPER.items()
    )


def shown(cell):
    if isinstance(cell, dict):
        p = f", p {cell['p']:.2g}" if "p" in cell else ""
        return f"{cell['median']:.2f} ({cell['min']:.2f} to {cell['max']:.2f}){p}"
    return f"{cell:.2g}" if isinstance(cell, float) else str(cell)


def parse_options(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=30, help="how many [30]")
    parser.add_argument("--most", type=float, default=0.05, help="largest share of a space [0.05]")
    arms = [arm for arm in ARMS if arm != "hyperopt"]
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=arms, help="[all but hyperopt]")
    parser.add_argument("--lattices", nargs="*", type=int, default=(32, 64), help="[32 64]")
    parser.add_argument("--tables", type=Path, help="a folder of CSV files")
    parser.add_argument("--gemm", nargs="+", type=int, default=(), help="lengths, for TVM [none]")
    parser.add_argument("--directory", type=Path, default=Path("build"), help="[build]")
    options = parser.parse_args(arguments)
    if options.tables and not any(options.tables.glob("*.csv*")):
        parser.error(f"{options.tables} has no CSV files")
    return options


if __name__ == "__main__":
    main()
