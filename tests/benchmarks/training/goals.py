"""Goals of the training loops, and their picture: speed relative to the plain loop."""

from benchmarks.plots import panels
from benchmarks.report import Goal
from benchmarks.training import fusion
from benchmarks.training.arms import HOST, RATES, RATIOS

COLOURS = {"best": "#8a8a8a", "ours": "#3b75af", "ours-traced": "#e08a1e"}

HOST_BOUND = 0.5
"""Minimum share of the best lazy step in which the host's thread computes, if it is the
bottleneck."""


HEAVY = 0.2
"""Minimum share of the optimizer in the unfused step, if fusion is worthwhile."""


def goals_of(parts):
    """Return the goals, from the JSON of a report's parts by name."""
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


def fusion_goals_of(parts):
    """Return the goals of fusion.

    If the optimizer takes a fifth of the step, fusion saves a tenth of the step. Otherwise it costs
    little.
    """
    cells = parts.get("fusion", {}).get("tables", {}).get(fusion.RATIOS, {})
    goals = []
    for when in ("backward", "forward"):
        gained = {name: 1 / row[f"{when} / unfused"]["median"] for name, row in cells.items()}
        heavy = {name for name, row in cells.items() if row[fusion.SHARE]["median"] >= HEAVY}
        for where, least, names in (
            (f"at least {HEAVY:.0%}", 1 / 0.9, heavy),
            (f"below {HEAVY:.0%}", 1 / 1.03, gained.keys() - heavy),
        ):
            text = f"fused with {when}, optimizer {where} of the step: CPU time unfused / fused"
            chosen = {name: value for name, value in gained.items() if name in names}
            goals.append(Goal(f"{text} at least {least:.2f}", least, chosen))
    return goals


def pick(ratios, other, optimizer="", *, arm="ours"):
    column = f"{arm} / {other}"
    return {
        name: cells[column]["median"]
        for name, cells in ratios.items()
        if name.endswith(f" {optimizer}" if optimizer else "") and column in cells
    }


def host_bound(tables):
    """Return the cells in which the host is the bottleneck."""
    return {
        name
        for name, cells in tables.get(HOST, {}).items()
        if "best" in cells
        and cells["best"]["median"] / 1000 * tables[RATES][name]["best"]["median"] >= HOST_BOUND
    }


def draw(parts, output):
    """Write a picture of every part that compares arms. Bars are medians, whiskers all rounds."""
    backends = {
        f"{name}: steps per second, relative to the plain loop": part["tables"][RATIOS]
        for name, part in parts.items()
        if RATIOS in part["tables"]
    }
    if not backends:
        return
    widest = max(map(len, backends.values()))
    with panels(backends, output, size=(6 + 0.6 * widest, 4), columns=1, dpi=120) as shown:
        for title, axes in shown.items():
            cells = backends[title]
            for place, (arm, colour) in enumerate(COLOURS.items()):
                bars = {
                    x + 0.28 * (place - 1): cell[f"{arm} / plain"]
                    for x, cell in enumerate(cells.values())
                    if f"{arm} / plain" in cell
                }
                reach = [
                    [bar["median"] - bar["min"] for bar in bars.values()],
                    [bar["max"] - bar["median"] for bar in bars.values()],
                ]
                heights = [bar["median"] for bar in bars.values()]
                whiskers = {"yerr": reach, "error_kw": {"elinewidth": 0.8}} if bars else {}
                axes.bar([*bars], heights, width=0.26, color=colour, label=arm, **whiskers)
            axes.axhline(1, color="black", linewidth=0.8)
            names = [name.replace(" ", "\n") for name in cells]
            axes.set_xticks(range(len(cells)), names, fontsize=8)
            axes.margins(x=0.01, y=0.15)
