import httpx
import pytest

from graphstash._http.circuit_breaker import CircuitBreaker
from graphstash._http.errors import retry_after


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def opened(**options):
    clock = Clock()
    breaker = CircuitBreaker(threshold=2, first_pause_seconds=1.0, clock=clock, **options)
    breaker.record_failure()
    assert breaker.allows()
    breaker.record_failure()
    return breaker, clock


def test_failures_in_a_row_open_the_circuit_and_a_success_between_them_does_not():
    breaker, _ = opened()
    assert not breaker.allows()

    breaker = CircuitBreaker(threshold=2)
    breaker.record_failure()
    breaker.record_success()
    breaker.record_failure()
    assert breaker.allows()


def test_one_caller_may_try_after_the_pause_while_all_others_are_refused():
    breaker, clock = opened()
    clock.now += 1.01
    assert breaker.allows()
    clock.now += 20
    assert not breaker.allows()
    breaker.record_failure()
    clock.now += 2.01
    assert breaker.allows()
    assert not breaker.allows()
    breaker.record_success()
    assert breaker.allows()
    assert breaker.allows()


def test_each_further_failure_doubles_the_pause_up_to_its_bound():
    breaker, clock = opened(longest_pause_seconds=5.0)
    for pause in (1.0, 2.0, 4.0, 5.0, 5.0):
        clock.now += pause - 0.01
        assert not breaker.allows()
        clock.now += 0.02
        assert breaker.allows()
        breaker.record_failure()


def test_pause_requested_by_server_is_bounded():
    clock = Clock()
    breaker = CircuitBreaker(longest_pause_seconds=10.0, clock=clock)
    breaker.pause(3)
    assert not breaker.allows()
    clock.now += 3.1
    assert breaker.allows()
    breaker.pause(1e9)
    clock.now += 9.0
    assert breaker.asked_seconds == 1e9 - 9.0  # a job must not wait for a call that will fail
    clock.now += 1.1
    assert breaker.asked_seconds == 0.0
    assert breaker.allows()
    breaker.pause(2)
    assert breaker.asked_seconds == 2.0


def test_requested_pause_is_not_shortened():
    clock = Clock()
    breaker = CircuitBreaker(threshold=1, first_pause_seconds=1.0, clock=clock)
    breaker.pause(30)
    breaker.record_success()
    breaker.record_failure()
    breaker.pause(1)
    clock.now += 29
    assert not breaker.allows()
    clock.now += 1.1
    assert breaker.allows()


@pytest.mark.parametrize(
    ("sent", "seconds"), [(b"7", 7.0), (b"\xb2", 1.0), (b"-1", 1.0), (b"soon", 1.0), (b"", 1.0)]
)
def test_malformed_pause_counts_as_one_second(sent, seconds):
    answer = httpx.Response(503, headers=[(b"Retry-After", sent)])
    assert retry_after(answer) == seconds
