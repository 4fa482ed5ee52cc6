import threading

import pytest

from graphstash._executor import BoundedExecutor
from support.waiting import until


@pytest.fixture
def executor():
    executor = BoundedExecutor("test", workers=1, capacity=2)
    yield executor
    executor.close()


def test_calls_run_in_order(executor):
    seen = []
    for number in range(3):
        assert executor.submit(lambda number=number: seen.append(number))
    assert executor.drain(5)
    assert seen == [0, 1, 2]


def test_call_beyond_capacity_is_refused_at_once(executor):
    release = threading.Event()
    started = threading.Event()
    executor.submit(lambda: (started.set(), release.wait()))
    started.wait(5)
    assert executor.submit(lambda: None)
    assert executor.submit(lambda: None)
    assert not executor.submit(lambda: None)
    release.set()
    assert executor.drain(5)
    assert executor.submit(lambda: None)


def test_drain_ends_at_its_timeout(executor):
    release = threading.Event()
    executor.submit(release.wait)
    assert not executor.drain(0.05)
    release.set()
    assert executor.drain(5)


def test_a_failing_call_does_not_stop_the_next(executor, caplog):
    seen = []
    executor.submit(lambda: 1 / 0)
    executor.submit(lambda: seen.append(1))
    assert executor.drain(5)
    assert seen == [1]
    assert "ZeroDivisionError" in caplog.text


def test_close_ends_threads_and_drops_queued_calls():
    executor = BoundedExecutor("closing", workers=2, capacity=8)
    release = threading.Event()
    for _ in range(2):
        executor.submit(release.wait)
    seen = []
    executor.submit(lambda: seen.append(1))
    executor.close()
    release.set()
    assert executor.drain(5)
    until(lambda: not any(t.name.startswith("closing") for t in threading.enumerate()))
    assert seen == []
    assert not executor.submit(lambda: None)


def test_call_is_refused_without_thread_and_later_calls_run(monkeypatch):
    executor = BoundedExecutor("poor", workers=1, capacity=2)

    def no_thread(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        assert not executor.submit(lambda: None)
    seen = []
    assert executor.submit(lambda: seen.append(1))
    assert executor.drain(5)
    assert seen == [1]
    executor.close()


def test_calls_run_at_the_end_of_a_process_that_starts_no_more_threads(executor, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread at interpreter shutdown")

    executor.start()
    executor.start()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    seen = []
    assert executor.submit(lambda: seen.append(1))
    assert executor.drain(5)
    assert seen == [1]
    late = BoundedExecutor("late", workers=1, capacity=2)
    late.start()
    assert not late.submit(lambda: seen.append(2))
