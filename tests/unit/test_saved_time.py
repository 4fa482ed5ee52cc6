"""The estimate of saved wall time equals the time that the same work takes without a cache."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstash._compile.saved_time import SavedTime


class Together:
    """Run works in threads that overlap, so that no thread reuses another's number."""

    def __init__(self, *works):
        everyone = threading.Barrier(len(works))
        turn = threading.Lock()

        def live(work):
            everyone.wait(20)
            with turn:
                work()
            everyone.wait(20)

        threads = [threading.Thread(target=live, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_hits_one_after_another_save_the_sum_of_their_compilations():
    saved = SavedTime()
    for number in range(3):
        saved.add_hit(number, number + 0.1, compile_seconds=10)
    assert saved.wall_seconds == pytest.approx(3 * (10 - 0.1))
    slow = SavedTime()
    slow.add_hit(0.0, 30.0, compile_seconds=10)
    assert slow.wall_seconds == 0


def test_savings_of_workers_follow_those_of_the_main_thread():
    saved = SavedTime()
    saved.add_hit(0.0, 0.1, compile_seconds=60)
    Together(
        lambda: saved.add_hit(0.2, 0.3, compile_seconds=10),
        lambda: saved.add_hit(0.2, 0.3, compile_seconds=10),
    )
    assert saved.wall_seconds == pytest.approx(60 + 10 - 0.2)


@pytest.mark.parametrize(("seconds", "saved_seconds"), [(10, 0), (29, 10 - 0.1)])
def test_hit_saves_the_time_that_exceeds_a_concurrent_compilation(seconds, saved_seconds):
    saved = SavedTime()
    Together(
        lambda: saved.add_hit(1.0, 1.1, compile_seconds=seconds),  # until 11 or 30
        lambda: saved.add_compilation(20.0, seconds=20),
    )
    assert saved.wall_seconds == pytest.approx(saved_seconds)


def test_a_hit_inside_a_compilation_of_the_same_thread_saves_its_own():
    saved = SavedTime()
    saved.add_hit(5.0, 5.1, compile_seconds=25)
    saved.add_compilation(6.0, seconds=6.0 - 0.1)  # the outer compilation, from 0.1 on
    assert saved.wall_seconds == pytest.approx(25 - 0.1)


_works = st.lists(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), min_size=1, max_size=4)


@given(_works)
def test_independent_threads_save_time_of_the_busiest(works):
    saved = SavedTime()

    def work(seconds):
        return lambda: [saved.add_hit(0.0, 0.0, compile_seconds=each) for each in seconds]

    Together(*map(work, works))
    assert saved.wall_seconds == pytest.approx(max(map(sum, works)))
