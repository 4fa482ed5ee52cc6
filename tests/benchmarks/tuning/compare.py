"""Run searchers on a problem with paired seeds, and compare them with the first of them."""

import math
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import median
from time import monotonic

from scipy.stats import wilcoxon

from graphstash.tuning import make_searcher
from support.tuning_costs import area_above

ARMS = {
    "random": ("random", {}),
    "g-bfs": ("g-bfs", {}),
    "g-bfs, no model": ("g-bfs", {"modelled": 0, "exploring": None}),
    "g-bfs, not exploring": ("g-bfs", {"exploring": None}),
    "g-bfs, the paper's start": ("g-bfs", {"starts": 0, "modelled": 0, "exploring": None}),
    "n-a2c": ("n-a2c", {}),
    "n-a2c, the paper's start": ("n-a2c", {"starts": 0}),
    "xgboost": ("xgboost", {}),
    "rnn": ("rnn", {}),
    "hyperopt": (None, {}),  # slow: not among the arms that run by default
}
"""Arms: searchers and their options."""

SHARES = (0.001, 0.005, 0.01, 0.05)
"""Shares of a space after which the best cost so far is reported."""

FINALISTS = 5
"""Number of a search's best configurations that are measured again if costs are not exact."""

NEAR = 0.05
"""Maximum relative distance from the best known cost that counts as reached."""

REMEASURED = "re-measured"

PAPER = {"xgboost": 0.24, "rnn": 0.40}
"""Time of G-BFS's best kernel, as a saving relative to these, after 0.1 % of the space: 512 to 2048
cubed on one GPU (arXiv 1909.10616)."""


def points_of(problem, most):
    """Return the measurement counts of `SHARES`, by share, without those above `most`."""
    points = {share: max(1, math.ceil(share * problem.space.size)) for share in SHARES}
    return {share: count for share, count in points.items() if share <= most}


@dataclass
class Run:
    """A search with one seed.

    Attributes:
        best: the lowest cost after 1, 2, ... measurements.
        seconds: wall time until then, of choosing and measuring.
        failed: number of configurations that did not work.
        final: the lowest cost of its finalists, measured against the finalists of the other
            arms; None if costs are exact.
    """

    best: list[float]
    seconds: list[float]
    failed: int
    final: float | None = None


def compare(problem, arms, seed, most):
    """Return each arm's search with a seed. Arms take turns, so that load affects all alike."""
    searches = {arm: _Search(problem, arm, seed) for arm in arms}
    budget = max(points_of(problem, most).values())
    for _ in range(budget):
        for search in searches.values():
            search.step()
    runs = {arm: search.run(budget) for arm, search in searches.items()}
    if problem.compare is not None:
        finalists = {arm: search.finalists() for arm, search in searches.items()}
        distinct = list(dict.fromkeys(each for few in finalists.values() for each in few))
        costs = dict(zip(distinct, problem.compare(distinct), strict=True))
        for arm, few in finalists.items():
            runs[arm].final = min(map(costs.__getitem__, few))
    return runs


class _Search:
    def __init__(self, problem, arm, seed):
        name, options = ARMS[arm]
        make = partial(make_searcher, name) if name else _hyperopt
        self._problem = problem
        self._searcher = make(problem.space, seed=seed, **options)
        self._seconds = []

    def step(self):
        started = monotonic()
        if not (asked := self._searcher.ask()):
            return
        self._searcher.tell(asked[0], self._problem.measure(asked[0]))
        self._seconds.append(monotonic() - started)

    def run(self, budget):
        costs = [trial.cost for trial in self._searcher.trials]
        best, seconds = list(accumulate(costs, min)), list(accumulate(self._seconds))
        rest = budget - len(costs)  # the space has no more configurations
        return Run(best + rest * best[-1:], seconds + rest * seconds[-1:], costs.count(math.inf))

    def finalists(self):
        """Return the finalists, as `graphstash.tuning.tuner.search` chooses them."""
        cheapest = sorted(self._searcher.trials, key=lambda trial: trial.cost)
        return [trial.configuration for trial in cheapest[:FINALISTS]]


def _hyperopt(space, *, seed):
    from benchmarks.tuning.tpe import Hyperopt  # imports hyperopt, which takes seconds

    return Hyperopt(space, seed=seed)


def best_known(problem, runs):
    """Return the lowest cost of the space, or of all measurements, without finalists."""
    return problem.optimum or min(run.best[-1] for each in runs.values() for run in each)


def rows_of(problem, runs, most):
    """Return each arm's rows of the report: best so far over the best known, and the comparison."""
    known = best_known(problem, runs)
    if problem.compare is not None:
        finals = [min(run.final for run in seed) for seed in zip(*runs.values(), strict=True)]
    first = next(iter(runs))
    rows = {}
    for arm, each in runs.items():
        row = rows[arm] = {}
        for share, count in points_of(problem, most).items():
            ratios = [run.best[count - 1] / known for run in each]
            cell = row[f"{share:.1%} ({count})"] = _summary(ratios)
            if arm != first:
                cell["p"] = _p(ratios, [run.best[count - 1] / known for run in runs[first]])
        if problem.compare is not None:
            row[REMEASURED] = _summary(
                run.final / final for run, final in zip(each, finals, strict=True)
            )
            row |= _seconds(each, known)
        if arm != first:
            row |= _against(each, first, runs[first], known)
    return rows


def saved(rows):
    """Return the share of time that `g-bfs`'s best kernel saves beside the kernels of `PAPER`."""
    shares = {}
    for arm in PAPER:
        if arm in rows and "g-bfs" in rows:
            column = REMEASURED if REMEASURED in rows[arm] else next(iter(rows[arm]))
            shares[arm] = 1 - rows["g-bfs"][column]["median"] / rows[arm][column]["median"]
    return shares


def _seconds(runs, known):
    near = [_until(run, known * (1 + NEAR)) for run in runs]
    within = f"to within {NEAR:.0%}"
    return {
        "seconds": _summary(run.seconds[-1] for run in runs),
        f"measurements {within}": _summary(count for count, _ in near),
        f"seconds {within}": _summary(seconds for _, seconds in near),
        "failed": sum(run.failed for run in runs),
    }


def _until(run, cost):
    """Return the measurements and seconds until a cost was reached."""
    for count, (best, seconds) in enumerate(zip(run.best, run.seconds, strict=True), 1):
        if best <= cost:
            return count, seconds
    return math.inf, math.inf


def _summary(values):
    values = list(values)
    return {"median": median(values), "min": min(values), "max": max(values)}


def _against(runs, first, baseline, known):
    """Compare the areas under the curves, paired by seed."""
    areas = [[area_above(run.best, known) for run in each] for each in (runs, baseline)]
    less = sum(a < b for a, b in zip(*areas, strict=True))
    return {f"seeds with less area than {first}": less, "p": _p(*areas)}


def _p(values, others):
    """Return the p of Wilcoxon's signed-rank test, two-sided; failures count as a cost of 1e9."""
    differences = [min(a, 1e9) - min(b, 1e9) for a, b in zip(values, others, strict=True)]
    return float(wilcoxon(differences).pvalue) if any(differences) else 1.0
