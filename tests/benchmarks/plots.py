"""Plots of a report: one panel for each table."""

from contextlib import contextmanager

import matplotlib as mpl


@contextmanager
def panels(titles, output, *, size, columns=2, dpi=100):
    """Yield the axes of each title, and write the picture at the end.

    Args:
        size: size of one panel, in inches.
        columns: maximum number of panels side by side.
    """
    mpl.use("Agg")  # there is no display
    from matplotlib import pyplot as plt

    columns = min(columns, len(titles))
    lines = -(-len(titles) // columns)
    width, height = size
    figure, grid = plt.subplots(
        lines, columns, figsize=(width * columns, height * lines), squeeze=False
    )
    for axes in grid.flat[len(titles) :]:
        axes.remove()
    shown = dict(zip(titles, grid.flat, strict=False))
    yield shown
    for title, axes in shown.items():
        axes.set_title(title, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(output, dpi=dpi)
    plt.close(figure)
