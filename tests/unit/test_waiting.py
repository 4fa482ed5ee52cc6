"""Limits of a job's waits, on a clock that the test advances."""

from contextlib import suppress

import pytest

from graphstash._compile.waiting import WaitBudget
from graphstash.errors import BusyError


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def budget(clock):
    return WaitBudget(100.0, clock=clock)


@pytest.fixture
def wait(clock, budget):
    """Wait until the compilation ends or the budget is used up, and return the seconds waited."""

    def run(holder, seconds=float("inf"), *, saved=None):
        started = clock.now
        with budget.wait() as one:
            if one.reason_to_skip(holder) is None:
                clock.now += min(seconds, one.left)
                one.saved_seconds = saved
                assert seconds < float("inf") or one.reason_to_skip(holder) is not None
        return clock.now - started

    return run


def test_one_holder_uses_at_most_half_of_the_budget(wait, budget):
    assert wait("a") == 50.0
    assert wait("a") == 0.0
    assert "waited long enough, 50 s" in budget.reason_to_skip("a")
    assert wait("b") == 50.0
    assert wait("c") == 0.0


def test_fruitless_waits_cost_one_budget_under_any_holder_names(wait, clock):
    waited = 0.0
    for number in range(10_000):
        waited += wait(f"holder {number}", 0.1)
        clock.now += 400.0  # longer than every pause
    assert waited == pytest.approx(100.0)


def test_three_fruitless_waits_cause_a_pause_and_one_try(wait, budget, clock):
    assert [wait("a", 1) for _ in range(4)] == [1, 1, 1, 0]
    assert "last 3 waits" in budget.reason_to_skip("a")
    clock.now += 300.0
    assert [wait("a", 1), wait("a", 1)] == [1, 0]


def test_successful_wait_resets_the_count_and_returns_at_most_the_time_that_it_saved(wait, budget):
    wait("a", 1)
    wait("a", 1)
    assert [wait("a", 10, saved=20.0) for _ in range(5)] == [10] * 5
    assert budget.left == 98.0
    assert [wait("b", 1, saved=0.0) for _ in range(10)] == [1] * 10  # compiled in an instant
    assert budget.left == 88.0
    assert wait("c", 30, saved=10.0) == 30
    assert budget.left == 68.0
    assert wait("a", 1) == 1
    assert WaitBudget(0.0).reason_to_skip("a") is not None


def test_successful_waits_cost_at_most_three_budgets(wait):
    """The limit holds for any compile time that the server reports."""
    waited = sum(wait("a", 20, saved=1e6) for _ in range(1000))
    waited += sum(wait("b", 20, saved=1e6) for _ in range(1000))
    assert 200 < waited <= 300


def test_a_wait_that_would_end_before_a_compilation_does_not_begin(wait, budget):
    for seconds in (30.0, 50.0):
        budget.add_compilation(seconds)
    assert wait("a", 20) == 20
    assert wait("a", 20) == 0.0
    assert "compiling takes 40 s here on average" in budget.reason_to_skip("a")
    assert wait("b", 20) == 20


@pytest.mark.parametrize(
    ("saved_seconds", "left", "left_for_each"), [(None, 60.0, 30.0), (20.0, 80.0, 40.0)]
)
def test_holders_of_one_wait_share_its_cost_and_its_refund(
    budget, clock, saved_seconds, left, left_for_each
):
    with budget.wait() as one:
        for holder in ("a", "b"):
            assert one.reason_to_skip(holder) is None
            assert one.left == 50.0
            clock.now += 20.0
        one.saved_seconds = saved_seconds
    assert (budget.left, budget.left_for("a"), budget.left_for("b")) == (
        *(left, left_for_each, left_for_each),
    )


def test_nested_wait_is_deducted_once(budget, clock):
    with budget.wait() as outer:
        assert outer.reason_to_skip("a") is None
        clock.now += 10.0
        with budget.wait() as inner:
            clock.now += 10.0
            while inner.pause_seconds(busy(5.0)):
                clock.now += 5.0
        clock.now += 10.0
    assert budget.left == 100.0 - 30.0 - 50.0


def test_nested_wait_is_settled_with_the_outer_wait(budget, clock):
    with budget.wait() as outer:
        assert outer.reason_to_skip("a") is None
        for _ in range(3):
            with budget.wait(), budget.wait() as inner:  # the wait between these two never begins
                assert inner.pause_seconds(busy(5.0))
                clock.now += 4.0
                inner.deduct()
                clock.now += 10.0  # the next call
                inner.saved_seconds = 0.0
        clock.now += 1.0
        assert outer.reason_to_skip("a") is None
        assert budget.left == 100.0 - 43.0
        assert (outer.left, sum(budget.server_waits.values())) == (19.0, 12.0)
        outer.saved_seconds = 60.0
    assert (budget.left, budget.left_for("a")) == (100.0, 50.0)


def test_nested_fruitless_wait_counts_once(budget, clock):
    for is_paused in (False, False, True):
        assert not budget.is_paused
        with suppress(BusyError), budget.wait() as outer:
            assert outer.reason_to_skip("a") is None
            with budget.wait() as inner:
                assert inner.pause_seconds(busy(1.0))
                clock.now += 1.0
                raise busy(1.0)
        assert budget.is_paused == is_paused


def test_ranks_share_one_budget(budget, clock):
    other = WaitBudget(100.0, clock=clock)
    waited = wait_for(other, clock, busy(1.0, patience=30.0))
    budget.share(other.left, other.server_waits)
    other.share(budget.left, budget.server_waits)
    assert budget.left == other.left == pytest.approx(100.0 - waited)
    assert wait_for(budget, clock, busy(1.0, patience=30.0)) == 0.0


def busy(seconds, patience=float("inf")):
    return BusyError("full", retry_after_seconds=seconds, patience_seconds=patience)


def wait_for(budget, clock, error, *, compile_seconds=None):
    """Wait for a server that stays busy, and return the seconds waited."""
    started = clock.now
    with budget.wait() as one:
        while pause := one.pause_seconds(error, compile_seconds=compile_seconds):
            assert 0.0 < pause <= error.retry_after_seconds
            clock.now += pause
    return clock.now - started


def test_busy_server_is_awaited_until_compiling_is_quicker(budget, clock):
    budget.add_compilation(1e6)  # the average of other graphs must not count
    assert wait_for(budget, clock, busy(2.0), compile_seconds=1.0) == 0.0
    assert 10.0 < wait_for(budget, clock, busy(2.0), compile_seconds=10.0) <= 12.0
    # Longer than the server's share of the budget.
    assert wait_for(budget, clock, busy(60.0)) == 0.0
    assert wait_for(WaitBudget(0.0), clock, busy(1.0)) == 0.0


def test_busy_server_uses_at_most_its_share_and_its_patience(clock):
    budget = WaitBudget(100.0, clock=clock)
    waited = wait_for(budget, clock, busy(1.0, patience=30.0))
    assert 29.0 <= waited <= 30.0
    assert wait_for(budget, clock, busy(1.0, patience=30.0)) == 0.0
    assert 49.0 <= wait_for(budget, clock, busy(1.0)) <= 50.0


def test_waits_that_never_began_cause_no_pause(budget, clock):
    for _ in range(5):
        assert wait_for(budget, clock, busy(60.0)) == 0.0
    assert not budget.is_paused
