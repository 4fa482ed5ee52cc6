import threading

import pytest

from graphstash import GraphstashError
from graphstash.training.threads import DeviceExecutor, WorkerPool

SECONDS = 60


def threads_of(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def fail(error):
    raise error


def test_as_many_calls_run_at_once_as_there_are_workers():
    with WorkerPool("together", workers=3) as pool:
        meet = threading.Barrier(3)
        assert {pool.submit(meet.wait, SECONDS) for _ in range(3)}
        assert len(threads_of("together")) == 3


def test_pool_without_queue_runs_calls():
    with WorkerPool("tight", capacity=0) as pool:
        assert [pool.submit(int, n).result() for n in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"workers": 0}, r"workers must be at least 1 \(got 0\)"),
        ({"capacity": -1}, r"capacity must be at least 0 \(got -1\)"),
    ],
)
def test_pool_with_invalid_settings_is_refused(setting, message):
    with pytest.raises(GraphstashError, match=message):
        WorkerPool("refused", **setting)


def test_a_failure_does_not_keep_others_from_running():
    seen = []
    with WorkerPool("going-on") as pool:
        failed = pool.submit(fail, ValueError("one"))
        with pytest.raises(ValueError, match="one"):
            failed.result()
        pool.submit(seen.append, 1)
    assert seen == [1]


def test_unread_failure_is_raised_once_by_next_submit():
    pool = WorkerPool("surfacing")
    with DeviceExecutor() as device:  # waits for the failure without reading it
        finished = threading.Event()
        pool.submit(fail, ValueError("unread"))
        threading.Thread(target=lambda: (wait_for_idle(pool), finished.set())).start()
        assert finished.wait(SECONDS)
        with pytest.raises(ValueError, match="unread"):
            pool.submit(int)
        assert device.submit(int, pool.submit(int)).result() == 0
    pool.close()


def wait_for_idle(pool):
    """Takes all the room there is, and gives it back."""
    room = pool._workers + 8
    for _ in range(room):
        pool._slots.acquire()
    pool._slots.release(room)


def test_close_raises_the_first_unread_failure_and_names_the_others():
    pool, release = WorkerPool("closing"), threading.Event()
    pool.submit(release.wait, SECONDS)
    for name in ("first", "second"):
        pool.submit(fail, ValueError(name))
    release.set()
    with pytest.raises(ValueError, match="first") as raised:
        pool.close()
    assert raised.value.__notes__ == ["another failure of 'closing': ValueError('second')"]
    pool.close()
