"""The plot: speed relative to the plain loop, one panel for each backend."""

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.training.arms import RATIOS

__all__ = ["draw"]

COLOURS = {"best": "#8a8a8a", "ours": "#3b75af", "ours-traced": "#e08a1e"}


def draw(parts, output):
    """Writes a picture of every part that compares arms; bars are medians, whiskers all rounds."""
    panels = {
        name: part["tables"][RATIOS] for name, part in parts.items() if RATIOS in part["tables"]
    }
    if not panels:
        return
    mpl.use("Agg")  # there is no display
    widest = max(map(len, panels.values()))
    figure, all_axes = plt.subplots(
        len(panels), 1, figsize=(6 + 0.6 * widest, 4 * len(panels)), squeeze=False
    )
    for axes, (backend, cells) in zip(all_axes[:, 0], panels.items(), strict=True):
        for place, (arm, colour) in enumerate(COLOURS.items()):
            bars = [
                (x + 0.28 * (place - 1), cell[f"{arm} / plain"])
                for x, cell in enumerate(cells.values())
                if f"{arm} / plain" in cell
            ]
            middles = [bar["median"] for _, bar in bars]
            reach = [
                [middle - bar["min"] for middle, (_, bar) in zip(middles, bars, strict=True)],
                [bar["max"] - middle for middle, (_, bar) in zip(middles, bars, strict=True)],
            ]
            axes.bar(
                [x for x, _ in bars],
                middles,
                width=0.26,
                color=colour,
                label=arm,
                yerr=reach if bars else None,
                error_kw={"elinewidth": 0.8, "ecolor": "#444444"},
            )
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(f"{backend}: steps per second, relative to the plain loop", loc="left")
        axes.set_xticks(range(len(cells)), [name.replace(" ", "\n") for name in cells], fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, ncols=3, loc="upper left")
        axes.margins(x=0.01, y=0.15)
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    plt.close(figure)
