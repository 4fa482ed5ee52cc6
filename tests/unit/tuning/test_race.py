"""A race of candidates finds the cheapest one under noise, and stops when it is proven."""

import math
import random
from statistics import median

import pytest

from graphstash.tuning.measuring.race import Race

FIVE = [1.05, 1.2, 1.0, 1.5, 1.1]


def race(costs, noise, *, samples=500):
    """Return the candidate with the lowest median, and the number of samples."""
    running, left = Race(len(costs)), samples
    while 1 < len(running.running) <= left:
        left -= len(running.running)
        running.end_round({each: costs[each] * noise() for each in running.running})
    medians = [median(running.costs(each)) for each in range(len(costs))]
    return medians.index(min(medians)), samples - left


def in_turns(costs, noise, *, samples=500):
    """Return what `race` returns, if every candidate gets equally many samples."""
    drawn = [[each * noise() for each in costs] for _ in range(samples // len(costs))]
    medians = [median(column) for column in zip(*drawn, strict=True)]
    return medians.index(min(medians)), samples


def load(seed):
    """Return noise of a busy machine: its level changes, and one sample in five waits."""
    draw, level = random.Random(seed), 1.0

    def noise():
        nonlocal level
        if draw.random() < 0.02:
            level = draw.choice([1.0, 1.2, 2.0])
        waits = draw.expovariate(1) * 5 if draw.random() < 0.2 else 0
        return level * draw.lognormvariate(0, 0.05) + waits

    return noise


def test_race_errs_less_often_than_as_many_samples_in_equal_shares():
    wrong = {
        method: sum(method(FIVE, load(seed))[0] != 2 for seed in range(60))
        for method in (race, in_turns)
    }
    assert wrong[race] < 6
    assert wrong[race] < wrong[in_turns] / 2


def test_clear_difference_needs_few_samples():
    assert race([2.0, 1.0], lambda: 1.0) == (1, 2 * 7)
    assert race([3.0, 2.0, 1.0, 4.0, 5.0], lambda: 1.0) == (2, 5 * 9)


def test_equal_candidates_rarely_leave():
    """The confidence holds although the race looks after every round."""
    decided = sum(race([1.0, 1.0], load(seed), samples=200)[1] < 200 for seed in range(100))
    assert decided <= 2 * 0.05 * 100  # either of the two may leave


def test_costs_are_comparable_although_load_rose_after_some_left():
    candidates = Race(3)
    for number in range(20):
        load = 1.0 if number < 10 else 10.0
        candidates.end_round({each: [1.0, 1.01, 3.0][each] * load for each in candidates.running})
        if number == 5:
            candidates.stop(1)
    assert candidates.running == [0]
    assert [round(median(candidates.costs(each)), 9) for each in range(3)] == [5.5, 5.555, 16.5]


@pytest.mark.parametrize("failing", [{0}, {0, 1}])
def test_candidate_that_failed_does_not_win(failing):
    candidates = Race(3)
    candidates.end_round({0: 1.0, 1: 2.0, 2: 3.0})
    candidates.end_round({each: None if each in failing else 1.0 + each for each in range(3)})
    rest = {each: median(candidates.costs(each)) for each in {0, 1, 2} - failing}
    assert min(rest, key=rest.__getitem__) == len(failing)


def test_candidate_that_left_replaces_a_leader_that_fails_later():
    candidates = Race(2)
    while len(candidates.running) == 2:
        candidates.end_round({0: 1.0, 1: 2.0})
    candidates.end_round({0: None})
    assert candidates.running == []
    assert median(candidates.costs(1)) == 2.0
    assert not math.isnan(candidates.costs(1)[0])
