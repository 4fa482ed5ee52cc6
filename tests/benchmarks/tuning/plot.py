"""The plot: the best so far, over the measurements or seconds, one panel for each problem."""

import matplotlib as mpl
from matplotlib import pyplot as plt

__all__ = ["draw"]


def draw(curves, output):
    """Writes a picture of {(problem, unit of x): {arm: (x, best so far over best known)}}."""
    mpl.use("Agg")  # there is no display
    columns = min(2, len(curves))
    lines = -(-len(curves) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(7 * columns, 4 * lines), squeeze=False)
    for axes in grid.flat[len(curves) :]:
        axes.remove()
    for axes, ((problem, unit), arms) in zip(grid.flat, curves.items(), strict=False):
        for arm, (x, best) in arms.items():
            axes.plot(x, best, label=arm, linewidth=1.2)
        axes.set_title(problem, loc="left")
        axes.set_xscale("log")
        axes.set_xlabel(unit)
        axes.set_ylabel("best so far / best known")
        axes.set_ylim(0.98, 3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(output, dpi=100)
    plt.close(figure)
