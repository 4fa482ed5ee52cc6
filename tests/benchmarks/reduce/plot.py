"""The plot: the ring's time over each arm's, one panel for each group of workers and size."""

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.reduce.measure import RATIOS

__all__ = ["draw"]

COLOURS = {"coo": "#8a8a8a", "blocks": "#3b75af", "dedicated": "#e08a1e", "colocated": "#4f9d5d"}


def draw(sums, output):
    """Writes a picture of {(workers, gbits): part of a report}; points are medians."""
    panels = {
        f"{part['part']}{title.removeprefix(RATIOS)}": rows
        for part in sums.values()
        for title, rows in part["tables"].items()
        if title.startswith(RATIOS)
    }
    if not panels:
        return
    mpl.use("Agg")  # there is no display
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(7 * columns, 3.6 * lines), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (title, rows) in zip(grid.flat, panels.items(), strict=False):
        for arm, colour in COLOURS.items():
            points = [
                (x, cells[arm]["median"]) for x, cells in enumerate(rows.values()) if arm in cells
            ]
            axes.plot(*zip(*points, strict=True) or ([], []), "o-", label=arm, color=colour)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_title(title, loc="left")
        axes.set_ylabel("times faster than the ring")
        axes.set_xticks(range(len(rows)), [row.replace(", ", "\n") for row in rows], fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(output, dpi=100)
    plt.close(figure)
