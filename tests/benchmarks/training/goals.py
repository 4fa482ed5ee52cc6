"""The goals of the training loops."""

from benchmarks.goals import Goal
from benchmarks.training import fusion
from benchmarks.training.arms import HOST, RATES, RATIOS

__all__ = ["fusion_goals_of", "goals_of"]

HOST_BOUND = 0.5
"""The host is the bottleneck where its thread computes for this part of the best lazy step."""


HEAVY = 0.2
"""From this part of the unfused step on, what the optimizer takes is worth saving."""


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


def fusion_goals_of(parts):
    """Where the optimizer takes a fifth of the step, fusion saves a tenth; it costs little else."""
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
    """The cells where the host is the bottleneck."""
    return {
        name
        for name, cells in tables.get(HOST, {}).items()
        if "best" in cells
        and cells["best"]["median"] / 1000 * tables[RATES][name]["best"]["median"] >= HOST_BOUND
    }
