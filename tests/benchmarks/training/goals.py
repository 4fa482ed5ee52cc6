"""Goals: which of them the figures reach, said plainly.

A cell reaches a goal if the median over the rounds does; no margin is taken off for noise.
"""

import statistics
from dataclasses import dataclass

from benchmarks.training.arms import HOST, RATES, RATIOS

__all__ = ["Goal", "goals_of"]

HOST_BOUND = 0.5
"""The host is the bottleneck where its thread computes for this part of the best lazy step."""


@dataclass
class Goal:
    """`cells` has each cell's figure, by its name."""

    text: str
    least: float
    cells: dict[str, float]

    @property
    def missed(self):
        return {name: value for name, value in self.cells.items() if value < self.least}

    def as_markdown(self):
        if not self.cells:
            return f"| {self.text} | nothing to measure it by here | |"
        low, high = min(self.cells.values()), max(self.cells.values())
        middle = statistics.median(self.cells.values())
        reached = len(self.cells) - len(self.missed)
        verdict = "holds" if not self.missed else "does not hold"
        misses = ", ".join(f"{name} {value:.2f}" for name, value in self.missed.items())
        return (
            f"| {self.text} | {verdict}: {reached} of {len(self.cells)} | {middle:.2f} "
            f"({low:.2f} to {high:.2f})" + (f"; not in {misses}" if misses else "") + " |"
        )


def goals_of(parts):
    """The goals, by what the parts of a report say: their JSON, by name."""
    tables = parts.get("torch_xla", {}).get("tables", {})
    ratios, bound = tables.get(RATIOS, {}), host_bound(tables)
    goals = [
        Goal(
            f"torch_xla, {name}: ours at least {least} x plain", least, pick(ratios, "plain", name)
        )
        for name, least in (("SGD", 1.7), ("AdamW", 2.5))
    ]
    goals += [
        Goal("torch_xla: ours (lazy) at least 1.0 x best", 1.0, pick(ratios, "best")),
        Goal(
            "torch_xla, host the bottleneck: ours-traced at least 1.5 x best",
            1.5,
            {
                name: value
                for name, value in pick(ratios, "best", arm="ours-traced").items()
                if name in bound
            },
        ),
    ]
    return goals


def pick(ratios, other, optimizer="", *, arm="ours"):
    column = f"{arm} / {other}"
    return {
        name: cells[column]["median"]
        for name, cells in ratios.items()
        if name.endswith(f" {optimizer}" if optimizer else "") and column in cells
    }


def host_bound(tables):
    """The cells where the host is the bottleneck."""
    return {
        name
        for name, cells in tables.get(HOST, {}).items()
        if "best" in cells
        and cells["best"]["median"] / 1000 * tables[RATES][name]["best"]["median"] >= HOST_BOUND
    }
