import threading
import time
import weakref

import pytest

from graphstash._executor import BoundedExecutor
from support.waiting import until


@pytest.fixture
def executor():
    executor = BoundedExecutor("test", workers=1, capacity=2)
    yield executor
    executor.close()


def test_calls_run_in_order_also_after_one_that_fails(executor, caplog):
    seen = []
    executor.submit(lambda: 1 / 0)
    for number in range(2):
        assert executor.submit(lambda number=number: seen.append(number))
    assert executor.drain(5)
    assert seen == [0, 1]
    assert "ZeroDivisionError" in caplog.text


def test_idle_thread_does_not_keep_its_last_call(executor):
    class Call:
        def __call__(self):
            pass

    call = Call()
    kept = weakref.ref(call)
    executor.submit(call)
    del call
    assert executor.drain(5)
    assert kept() is None


def test_full_queue_rejects_calls_until_one_has_ended():
    """The queue is full when each thread runs a call and `capacity` calls wait."""
    executor = BoundedExecutor("full", workers=2, capacity=3)
    release = threading.Event()
    assert [executor.submit(release.wait) for _ in range(7)] == [True] * 5 + [False] * 2
    release.set()
    assert executor.drain(5)
    assert executor.submit(release.wait)
    assert executor.drain(5)
    executor.close()


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


def test_close_waits_for_idle_thread_and_its_thread_local_objects():
    """Objects of torch abort the process if their thread ends while the interpreter exits."""
    ended = []

    class Slow:
        def __del__(self):
            time.sleep(0.1)
            ended.append(True)

    local = threading.local()
    executor = BoundedExecutor("slow", workers=1, capacity=1)
    executor.submit(lambda: setattr(local, "slow", Slow()))
    assert executor.drain(5)
    executor.close()
    assert ended


def test_process_that_starts_no_more_threads_refuses_calls_or_runs_them_in_earlier_threads(
    executor, monkeypatch
):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    late, seen = BoundedExecutor("late", workers=1, capacity=2), []
    executor.start()
    executor.start()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert executor.submit(lambda: seen.append(1))
        assert executor.drain(5)
        late.start()
        assert not late.submit(lambda: seen.append(2))
    assert late.submit(lambda: seen.append(3))
    assert late.drain(5)
    late.close()
    assert seen == [1, 3]
