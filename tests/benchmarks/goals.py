"""Goals: which of them the figures reach, said plainly.

A cell reaches a goal if the median over the rounds does; no margin is taken off for noise.
"""

import statistics
from dataclasses import dataclass

__all__ = ["Goal"]


@dataclass
class Goal:
    """`cells` has each cell's figure, by its name."""

    text: str
    least: float
    cells: dict[str, float]

    @property
    def missed(self):
        return {name: value for name, value in self.cells.items() if value < self.least}

    def as_json(self):
        return vars(self) | {"missed": sorted(self.missed)}

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
