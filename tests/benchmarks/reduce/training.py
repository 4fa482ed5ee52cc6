"""Training end to end: steps in a second with each arm, and its losses beside those of dense."""

from benchmarks.figures import Figures, progress

__all__ = ["compare"]

EXACT = {"blocks", "dedicated", "colocated"}
"""What has to lead to the same losses; thresholding changes them."""

TOLERANCE = 1e-6


def compare(group, name, options):
    """Every model with every arm in each round."""
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
                add(figures, model, arm, trained, found.get((model, "dense")))
    return figures


def add(figures, model, arm, trained, dense):
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
