"""A search asks, measures and tells; a comparison of the finalists decides."""

import math
import random

import pytest

from graphstash.tuning.measuring import Budget, Measurement, Method
from graphstash.tuning.search.base import Trial
from graphstash.tuning.spaces import ParameterSpace
from graphstash.tuning.targets.callable import CallableTarget
from graphstash.tuning.tuner import search
from support import trials
from support.tiers import most_extended


def line(size):
    """The numbers below `size`. A move goes one down or one up."""
    return ParameterSpace({"x": list(range(size))})


class Descent:
    """A searcher that asks for the start, then for neighbours of the best, then for any new one.

    It implements only the methods of `Searcher` that a search uses.
    """

    def __init__(self, space, *, seed):
        self.space = space
        self.trials = []
        self._random = random.Random(seed)
        self._seen = set()

    def ask(self, count=1):
        return [self._next() for _ in range(min(count, self.space.size - len(self._seen)))]

    def tell(self, configuration, cost):
        self._seen.add(configuration)
        self.trials.append(Trial(configuration, cost))

    def _next(self):
        works = [trial for trial in self.trials if math.isfinite(trial.cost)]
        best = min(works, key=lambda trial: trial.cost, default=None)
        near = [self.space.start] if best is None else self.space.neighbours(best.configuration)
        new = [each for each in near if each not in self._seen]
        if not new:
            new = [each for each in self.space if each not in self._seen]
            self._random.shuffle(new)
        self._seen.add(new[0])
        return new[0]


def target(cost=trials.costs_its_distance):
    return CallableTarget(trials.numbered, name="line", cost=cost)


def run(
    *,
    size=100,
    measurements=None,
    seconds=None,
    seed=0,
    cost=trials.costs_its_distance,
    samples=5,
    **options,
):
    budget = Budget(measurements=measurements, seconds=seconds)
    method = Method(samples=samples, trial_seconds=1e6)  # all samples, even on a busy machine
    searcher = Descent(line(size), seed=seed)
    return search(searcher, target(cost), budget=budget, method=method, **options)


def asked(result, finalists=5):
    made = result.measurements[: len(result.measurements) - finalists]
    return [each.configuration["x"] for each in made]


def test_search_finds_the_best_despite_failures():
    result = run(measurements=60)
    assert result.ended == "measurements"
    assert result.best == (37,)
    assert result.measurement == Measurement({"x": 37}, 1.0, 0.0, 9, None)
    assert {each.failure for each in result.measurements} == {None, "run", "cost"}
    assert result.seconds > 0


def test_equal_seeds_give_equal_searches_with_one_worker():
    first, second = run(measurements=12, seed=3), run(measurements=12, seed=3)
    assert asked(first) == asked(second)
    assert len(set(asked(first))) == 12


def test_with_several_workers_every_configuration_is_measured_once():
    result = run(measurements=12, workers=3)
    assert len(asked(result)) == len(set(asked(result))) == 12


def test_search_publishes_every_measurement_and_ends_when_space_is_exhausted():
    published = []
    result = run(size=8, measurements=1000, samples=2, publish=published.append)
    assert result.ended == "exhausted"
    assert sorted(asked(result)) == list(range(8))
    assert published == result.measurements
    searched = published[:8]
    assert {each.count for each in searched if each.failure is None} == {2}


def test_search_ends_at_its_deadline():
    result = run(seconds=1e-9)
    assert (result.ended, result.best, result.measurement) == ("seconds", None, None)
    assert result.measurements == []


def test_search_without_working_configuration_has_no_best():
    result = run(measurements=3, cost=trials.costs_what_it_says)  # which needs another parameter
    assert result.best is None
    assert [each.failure for each in result.measurements] == ["run"] * 3


def test_finalists_are_decided_in_their_own_round():
    known = [Measurement.of({"x": x}, [cost]) for x, cost in ((3, 9.0), (4, 4.0), (6, 6.0))]
    result = run(measurements=1, finalists=2, known=known, cost=trials.flatters_at_first)
    assert [each.configuration["x"] for each in result.measurements] == [5, 5, 4]
    assert [each.cost for each in result.measurements] == [0.001, 6, 5]
    assert result.best == (4,)
    assert result.measurement == result.measurements[-1]


def test_known_findings_of_the_space_are_passed_on_and_not_measured_again(caplog):
    known = [Measurement.of({"x": 36}, [2.0]), Measurement.failed({"x": 37}, "crash")]
    others = [Measurement.of({"y": 1}, [1e-9]), Measurement.of({"x": 1000}, [1e-9])]
    result = run(measurements=5, known=known + others, finalists=2)
    assert result.known == 2
    assert caplog.text.count("a known measurement is left out") == 2
    assert asked(result, finalists=2)[0] == 35
    assert 37 not in asked(result, finalists=0)


@pytest.mark.parametrize("finalists", most_extended([1, 5], quick=[5]))
def test_finding_wins_only_after_measurement_here(finalists):
    known = [Measurement.of({"x": 95}, [1e-9]), Measurement.of({"x": 38}, [2.0])]
    result = run(measurements=1, finalists=finalists, known=known)
    assert result.best == (38,)


def test_search_continues_if_publishing_fails(caplog):
    def publish(measurement):
        raise OSError("no server")

    result = run(measurements=3, publish=publish)
    assert len(asked(result, finalists=3)) == 3
    assert "a measurement was not published" in caplog.text


@pytest.mark.parametrize("options", [{"finalists": 0}, {"finalists": 65}, {"workers": 0}])
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="must be "):
        run(measurements=1, **options)


def test_a_failure_costs_infinity():
    assert Measurement.failed({"x": 1}, "wrong").trial(line(100)).cost == math.inf
