"""Forks while a background thread of the cache works: the child finds no lock held."""

import os
import threading
from contextlib import contextmanager

import pytest

from graphstash import _forking
from graphstash._executor import BoundedExecutor
from graphstash._forking import forkable, unforked

FOREVER = 3600


def fork(code=lambda: None):
    """Run code in a forked child; its exit status, 1 if the code raised."""
    if (child := os.fork()) == 0:
        try:
            code()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def executor(**options):
    made = BoundedExecutor("test", workers=1, capacity=1, **options)
    yield made
    assert made.drain(60)
    made.close()


@pytest.fixture
def waiting(monkeypatch):
    """An event that a fork sets when it begins to wait for other threads."""
    begun = threading.Event()
    begin = _forking._Work.begin_fork

    def begin_fork(work):
        begun.set()
        begin(work)

    monkeypatch.setattr(_forking._Work, "begin_fork", begin_fork)
    return begun


@pytest.fixture
def patient(monkeypatch):
    """A fork that waits for a block waits until the test fails."""
    monkeypatch.setattr(_forking, "_WAIT_SECONDS", FOREVER)


@pytest.mark.usefixtures("patient")
def test_fork_waits_for_call_of_an_executor_that_delays_it(waiting):
    lock, has_lock = threading.Lock(), threading.Event()

    def call():
        with lock:
            has_lock.set()
            assert waiting.wait(60)

    with executor(delays_forks=True) as threads:
        threads.submit(call)
        assert has_lock.wait(60)
        assert fork(lambda: lock.acquire(timeout=0) or os._exit(2)) == 0


@pytest.mark.parametrize("in_forkable", [False, True])
@pytest.mark.usefixtures("patient")
def test_fork_does_not_wait_for_other_work(in_forkable):
    begun, forked = threading.Event(), threading.Event()

    def call():
        with forkable(), forkable():
            begun.set()
            assert forked.wait(60)
        assert bool(_forking._work.depth) == in_forkable

    with executor(delays_forks=in_forkable) as threads:
        threads.submit(call)
        assert begun.wait(60)
        assert fork() == 0
        forked.set()


def test_fork_waits_once_for_a_block_that_does_not_end(monkeypatch):
    begun, forked = threading.Event(), threading.Event()

    def work():
        with unforked():
            begun.set()
            assert forked.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    monkeypatch.setattr(_forking, "_WAIT_SECONDS", 0.01)
    assert fork() == 0
    monkeypatch.setattr(_forking, "_WAIT_SECONDS", FOREVER)
    assert fork() == 0
    forked.set()
    thread.join()
    assert _forking._work._slow == set()


@pytest.mark.usefixtures("patient")
def test_thread_that_forks_inside_blocks_does_not_wait_for_itself():
    def child():
        assert _forking._work.depth == 2
        with forkable():
            assert fork() == 0
        assert fork() == 0

    with unforked(), unforked():
        assert fork(child) == 0
        with forkable():
            assert _forking._work.depth == 0
        assert _forking._work.depth == 2
    assert _forking._work.depth == 0


@pytest.mark.usefixtures("patient")
def test_fork_is_not_put_off_by_threads_that_take_turns():
    """New blocks begin after the fork."""
    stop = threading.Event()

    def work():
        while not stop.is_set():
            with unforked(), forkable():
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert fork(lambda: _forking._work.begin(1)) == 0
    stop.set()
    for thread in threads:
        thread.join()
