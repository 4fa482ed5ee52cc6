"""Measure sums cell by cell, compare sent bytes with the formula, and compare trainings."""

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.figures import Figures, progress
from benchmarks.plots import panels
from benchmarks.reduce.arms import AGGREGATED, LOOKS, arms_of, formula, model_bytes
from benchmarks.reduce.cells import link_payload
from benchmarks.report import Goal

COLOURS = {"coo": "#8a8a8a", "blocks": "#3b75af", "dedicated": "#e08a1e", "colocated": "#4f9d5d"}

SECONDS, MODEL, RATIOS = "Seconds", "Seconds over the model's", "Ring's seconds over this arm's"
PAYLOAD, WIRE = "MB of payload for each worker", "MB on all links for each worker"
CPU = "CPU milliseconds of a worker"

EXACT = {"blocks", "dedicated", "colocated"}
"""Arms with the same losses as the ring; thresholding changes the losses."""

TOLERANCE = 1e-6

SLACK = 1.25
FALLBACK = 1.03


@dataclass
class Checks:
    """Counts of samples with and without the required sum and bytes, by check."""

    passed: Counter = field(default_factory=Counter)
    failed: Counter = field(default_factory=Counter)

    def check(self, what, is_so):
        (self.passed if is_so else self.failed)[what] += 1

    def lines(self):
        for what in sorted(self.passed | self.failed):
            total = self.passed[what] + self.failed[what]
            yield f"{what}: in {self.passed[what]} of {total} samples"


def measure(group, name, cells, arms, *, gbits, rounds, checks):
    """Measure all cells with all arms in each round, back and forth to balance drift.

    Args:
        gbits: rate of the links; None for links without a rate.
    """
    figures = Figures(name, {"rounds": rounds})
    first = {cell.mib: cell for cell in reversed(cells)}  # a ring's time does not depend on zeros
    per_round = [
        (cell, arm)
        for cell in cells
        for arm in arms_of(cell, arms)
        if arm != "ring" or cell == first[cell.mib]
    ]
    with progress() as shown:
        task = shown.add_task(name, total=rounds * len(per_round))
        for number in range(rounds):
            found = {}
            for cell, arm in per_round[:: -1 if number % 2 else 1]:
                sample = found[cell, arm] = group.sample(arm, cell)
                verify(checks, arm, cell, sample)
                shown.advance(task)
            add(figures, found, gbits)
    return figures


def verify(checks, arm, cell, sample):
    checks.check("sums equal in every bit to the exact ones", sample.exact)
    expected = formula(arm, cell, sample.datagrams)
    checks.check("payload equal to the formula, to the byte", sample.payload == sum(expected))
    if sample.counted and arm not in AGGREGATED:
        handed = sample.counted * 2 * (cell.workers - 1) == cell.workers * expected[0]
        checks.check("what `Sent` says equal to it, to the byte", handed)


def add(figures, found, gbits):
    """Add one round's samples."""
    rings = {cell.mib: each.seconds for (cell, arm), each in found.items() if arm == "ring"}
    for (cell, arm), sample in found.items():
        of = f", {cell.mib} MiB"
        figures.add(SECONDS + of, str(cell), arm, sample.seconds)
        figures.add(CPU + of, str(cell), arm, 1000 * sample.cpu)
        figures.add(PAYLOAD + of, str(cell), arm, sample.payload / cell.workers / 1e6)
        if sample.wire:
            figures.add(WIRE + of, str(cell), arm, sample.wire / cell.workers / 1e6)
        if gbits is not None:
            seconds = model_bytes(arm, cell) / link_payload(gbits)
            figures.add(MODEL + of, str(cell), arm, sample.seconds / seconds)
        if arm != "ring" and cell.mib in rings:
            figures.add(RATIOS + of, str(cell), arm, rings[cell.mib] / sample.seconds)
        if arm == "look" and (cell, "paused") in found and cell.mib in rings:
            hook = LOOKS * sample.seconds + (1 - LOOKS) * found[cell, "paused"].seconds
            figures.add(RATIOS + of, str(cell), "hook", rings[cell.mib] / hook)


def goals_of(parts):
    """Return the goals, from the JSON of a report's parts by (workers, gbits)."""
    goals = []
    for arm in ("blocks", "dedicated", "colocated"):
        for rate in sorted({rate for _, rate in parts}):
            near = {
                f"{workers} workers, {table.rpartition(', ')[2]}, {row}": 1 / cells[arm]["median"]
                for (workers, gbits), part in parts.items()
                for table, rows in part["tables"].items()
                for row, cells in rows.items()
                if gbits == rate and workers <= 4 and table.startswith(MODEL) and arm in cells
            }
            text = f"{arm}, {rate:g} Gbit/s, 2 and 4 workers: the model's seconds over the arm's"
            goals.append(Goal(f"{text} at least {1 / SLACK:.2f}", 1 / SLACK, near))
    dense = {
        f"{workers} workers, {gbits:g} Gbit/s, {table.rpartition(', ')[2]}": cells["hook"]["median"]
        for (workers, gbits), part in parts.items()
        for table, rows in part["tables"].items()
        for row, cells in rows.items()
        if table.startswith(RATIOS) and row == "1" and "hook" in cells
    }
    text = "density 1, with the fallback: the ring's seconds over the hook's"
    return [*goals, Goal(f"{text} at least {1 / FALLBACK:.2f}", 1 / FALLBACK, dense)]


def draw(sums, output):
    """Write a picture of {(workers, gbits): part of a report}. Points are medians."""
    groups = {
        f"{part['part']}{title.removeprefix(RATIOS)}": rows
        for part in sums.values()
        for title, rows in part["tables"].items()
        if title.startswith(RATIOS)
    }
    if not groups:
        return
    with panels(groups, output, size=(7, 4)) as shown:
        for title, axes in shown.items():
            rows = groups[title]
            for arm, colour in COLOURS.items():
                points = [(x, c[arm]["median"]) for x, c in enumerate(rows.values()) if arm in c]
                axes.plot(*zip(*points, strict=True) or ([], []), "o-", label=arm, color=colour)
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set_yscale("log")
            axes.set_ylabel("times faster than the ring")
            names = [row.replace(", ", "\n") for row in rows]
            axes.set_xticks(range(len(rows)), names, fontsize=8)


def compare(group, name, options):
    """Train every model with every arm in each round."""
    figures = Figures(name, {"rounds": options.rounds, "steps": options.steps})
    each = [(model, arm) for model in options.models for arm in options.trained]
    with progress() as shown:
        task = shown.add_task(name, total=options.rounds * len(each))
        for number in range(options.rounds):
            found = {}
            for model, arm in each[:: -1 if number % 2 else 1]:
                found[model, arm] = group.train(model, arm, options.steps)
                shown.advance(task)
            for (model, arm), trained in found.items():
                add_training(figures, model, arm, trained, found.get((model, "dense")))
    return figures


def add_training(figures, model, arm, trained, dense):
    table = f"Training: {model}"
    figures.add(table, arm, "steps/s", trained["steps/s"])
    figures.add(table, arm, "CPU ms a step", 1000 * trained["cpu"])
    figures.add(table, arm, "MB a step on a link", trained["wire"] / 1e6)
    figures.add(table, arm, "density of the union", trained["union density"])
    if dense is not None:
        figures.add(table, arm, "over dense", trained["steps/s"] / dense["steps/s"])
        away = difference(trained["losses"], dense["losses"])
        figures.add(table, arm, "largest relative difference of a loss, x 1e-6", 1e6 * away)
        if arm in EXACT and away > TOLERANCE:
            figures.note(f"{model}, {arm}: a loss is {away:.1e} away from that of dense")
    quarter = -(-len(trained["losses"]) // 4)
    for first in range(0, len(trained["losses"]), quarter):
        some = trained["losses"][first : first + quarter]
        steps = f"steps {first + 1} to {first + len(some)}"
        figures.add(f"Mean loss: {model}", arm, steps, sum(some) / len(some))


def difference(losses, others):
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))
