"""Compare ways to add up sparse gradients over links of a given rate, and train with them.

    .venv/bin/python tests/benchmarks/reduce/run.py [--quick]

Every worker is a process in a network namespace of its own with a shaped link (`links.py`).
`arms.py` has the arms, and `cells.py` the model of time and the formula of bytes. Namespaces
require root. Without it, all workers run on loopback, where bytes are counted and times mean
nothing. Writes bench-reduce.md, .json and .png; `make bench-reduce` runs this.
"""

import argparse
import json
import signal
import sys
from itertools import product
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS)]

from benchmarks.figures import console
from benchmarks.reduce.arms import ARMS
from benchmarks.reduce.cells import OVERLAPS, Cell
from benchmarks.reduce.group import Group
from benchmarks.reduce.links import Loopback, Star
from benchmarks.reduce.measure import Checks, compare, draw, goals_of, measure
from benchmarks.reduce.models import MODELS, TRAINED
from benchmarks.report import begin, files_of, finish, pages

PARTS = ("sums", "training")

EXPLANATION = """\
A row is a density, the share of blocks of 256 elements that are not zero on each worker, and how
the workers' blocks overlap. `blocks` is the block-sparse all-reduce on gloo without its fallback;
where the union is dense, `look` is a call with the fallback, `paused` what the hook does between
two looks, and `hook` is one look in 65 steps. The model is bytes on the busiest link over what its
frames have room for, 1448 of 1514 bytes.

Payload is what the workers send by TCP, without what was sent again; through aggregators, what
they send and receive by UDP. Without 66 bytes of headers in each, TCP's packets on the links are
the same, but for what was sent again. The formula has elements and bitmap, and for each message
3 x 48 bytes of gloo's own, or for each datagram its header and for each block its number."""


def main():
    options = parse_options()
    # So that namespaces are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    written = files_of(options.directory, "bench-reduce")
    kind = Loopback if options.loopback or not has_namespaces() else Star
    report, sums, checks = begin(links=kind.name), {}, Checks()
    for gbits, workers in product(options.rates if kind is Star else (None,), options.workers):
        name = f"{workers} workers, " + ("loopback" if gbits is None else f"{gbits:g} Gbit/s")
        cells = cells_of(options, workers)
        chosen = {*(options.arms if "sums" in options.parts else ())}
        chosen |= {*(options.trained if "training" in options.parts else ())}
        aggregators = workers * ("dedicated" in chosen)
        with (
            kind(workers + aggregators, gbits) as links,
            Group(links, workers, aggregators=aggregators) as group,
        ):
            if "sums" in options.parts:
                settings = {"gbits": gbits, "rounds": options.rounds, "checks": checks}
                figures = measure(group, name, cells, options.arms, **settings)
                report["parts"][name] = sums[workers, gbits] = figures.as_json()
            if "training" in options.parts:
                figures = compare(group, f"training, {name}", options)
                report["parts"][figures.part] = figures.as_json()
        goals = [] if kind is Loopback else goals_of(sums)
        report["goals"] = [goal.as_json() for goal in goals]
        report["checks"] = list(checks.lines())
        written["json"].write_text(json.dumps(report, indent=2) + "\n")
        written["md"].write_text(page_of(report, goals, written["png"].name))
    draw(sums, written["png"])
    console.print(written["md"].read_text(), highlight=False, markup=False)
    finish(report, written.values())
    if checks.failed:
        raise SystemExit("; ".join(checks.lines()))


def has_namespaces():
    """Return whether namespaces are permitted, and print the reason if not."""
    try:
        with Star(1, 1):
            return True
    except RuntimeError as error:
        console.print(f"no network namespaces, so all is on loopback: {error}", highlight=False)
        return False


def cells_of(options, workers):
    every = product((workers,), options.sizes, options.densities, OVERLAPS)
    return [
        cell
        for each in every
        if (cell := Cell(*each)).is_possible
        and (cell.density == 1 or cell.overlap in options.overlaps)
    ]


def page_of(report, goals, picture):
    checks = "\n".join(f"- {each}" for each in report["checks"])
    about = f"On {report['links']}. {EXPLANATION}\n\n{checks}"
    picture = f"![Speed of each arm relative to the ring]({picture})"
    return pages(report, "Sparse gradients", about=about, goals=goals, picture=picture)


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    many = {"nargs": "+"}
    parser.add_argument("--quick", action="store_true", help="few cells, in 3 minutes")
    parser.add_argument("--parts", choices=PARTS, default=PARTS, help="[all]", **many)
    parser.add_argument("--workers", type=int, help="[2 4 8; quick: 2 4]", **many)
    parser.add_argument("--rates", type=float, help="Gbit/s [0.1 1; quick: 1]", **many)
    parser.add_argument("--sizes", type=int, help="MiB [25 100; quick: 25]", **many)
    parser.add_argument("--densities", type=float, help="[1 .5 .1 .05 .01; quick: 1 .01]", **many)
    parser.add_argument("--overlaps", choices=OVERLAPS, help="[all; quick: random]", **many)
    parser.add_argument("--arms", choices=ARMS, default=ARMS, help="[all]", **many)
    parser.add_argument(
        "--models", choices=list(MODELS), default=list(MODELS), help="[all]", **many
    )
    parser.add_argument("--trained", choices=TRAINED, default=TRAINED, help="arms [all]", **many)
    parser.add_argument("--steps", type=int, help="of a training [8; quick: 3]")
    parser.add_argument("--rounds", type=int, help="samples of every figure [3; quick: 1]")
    parser.add_argument("--loopback", action="store_true", help="no namespaces, no rates")
    parser.add_argument("--directory", type=Path, default=Path("build"), help="[build]")
    options = parser.parse_args()
    if unknown := [density for density in options.densities or () if not 0 < density <= 1]:
        parser.error(f"--densities {unknown[0]:g}: take shares of the blocks above 0 and up to 1")
    defaults = {
        "workers": ((2, 4, 8), (2, 4)),
        "rates": ((0.1, 1), (1,)),
        "sizes": ((25, 100), (25,)),
        "densities": ((1, 0.5, 0.1, 0.05, 0.01), (1, 0.01)),
        "overlaps": (OVERLAPS, ("random",)),
        "steps": (8, 3),
        "rounds": (3, 1),
    }
    for name, both in defaults.items():
        setattr(options, name, getattr(options, name) or both[options.quick])
    return options


if __name__ == "__main__":
    main()
