import contextlib
import ctypes
import os
import signal
import threading
import weakref
from functools import partial
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphstash import GraphstashError
from graphstash.training.threads import (
    DeviceExecutor,
    ExecutorClosed,
    ExecutorError,
    ExecutorStopped,
    WorkerPool,
)
from support.processes import python
from support.run_case import RUN_CASE, case_arguments

SECONDS = 60


class Held:
    """A callable that runs until `release` is set."""

    def __init__(self):
        self.started = threading.Event()
        self.release = threading.Event()

    def __call__(self, *args):
        self.started.set()
        assert self.release.wait(SECONDS)
        return args


class Pair(NamedTuple):
    a: Any
    b: Any


class Thing:
    """An object that supports weak references."""


@pytest.fixture
def device():
    with DeviceExecutor("test-device") as device:
        yield device


def threads_of(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def fail(error):
    raise error


def test_submissions_run_in_order_on_one_named_thread(device):
    seen = []
    for number in range(100):
        device.submit(lambda n: seen.append((n, threading.current_thread().name)), number)
    device.close()
    assert [number for number, _ in seen] == list(range(100))
    assert {name for _, name in seen} == {"test-device_0"}


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_more_than_depth_are_unfinished(depth):
    futures = []
    with DeviceExecutor(depth=depth) as device:
        for _ in range(300):
            futures.append(device.submit(int))
            assert sum(not future.done() for future in futures) <= depth


def test_depth_below_one_step_is_refused():
    with pytest.raises(GraphstashError, match=r"depth must be at least 1 \(got 0\)"):
        DeviceExecutor(depth=0)


def test_a_pool_that_could_accept_nothing_is_refused():
    with pytest.raises(GraphstashError, match=r"capacity must be at least 0 \(got -1\)"):
        WorkerPool("pool", capacity=-1)


def test_futures_as_arguments_are_resolved(device):
    one, two = device.submit(int, 1), device.submit(int, 2)
    nested = {"list": [one, (two, 3)], "pair": Pair(one, two), "text": "four"}
    assert device.submit(lambda *, value: value, value=nested).result() == {
        "list": [1, (2, 3)],
        "pair": Pair(1, 2),
        "text": "four",
    }
    values = [{"a": [1]}, (2,)]
    assert device.submit(lambda value: value, values).result() is values


def test_wait_for_result_ends_at_its_timeout(device):
    held = Held()
    future = device.submit(held)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.01)
    held.release.set()
    assert future.exception() is None


def test_a_failure_is_raised_at_its_result_and_stops_the_run():
    held, error, seen = Held(), ValueError("step 1"), []
    with DeviceExecutor("stopping", depth=3) as device:
        device.submit(held)
        failed = device.submit(fail, error)
        behind = device.submit(seen.append, "behind")
        held.release.set()
        with pytest.raises(ValueError, match="step 1"):
            failed.result()
        with pytest.raises(ExecutorStopped, match=r"submission 3 to 'stopping'.*step 1") as stopped:
            behind.result()
        assert stopped.value.__cause__ is error
        for _ in range(2):
            with pytest.raises(ValueError, match="step 1"):
                device.submit(seen.append, "later")
    assert seen == []


def test_submitter_waiting_for_a_slot_raises_the_failure():
    held = Held()
    device = DeviceExecutor(depth=1)
    device.submit(lambda: (held(), fail(ValueError("while you waited"))))
    timer = threading.Timer(0.1, held.release.set)
    timer.start()
    with pytest.raises(ValueError, match="while you waited"):
        device.submit(int)
    timer.join()
    device.close()


def test_failure_reaches_dependents_in_another_executor():
    error = ValueError("no batch")
    loader = DeviceExecutor("loader")
    with DeviceExecutor("device") as device:
        dependant = device.submit(int, loader.submit(fail, error))
        assert dependant.exception() is error
    loader.close()


def test_exception_of_body_is_raised_with_note_of_failure():
    held = Held()

    def body():
        with DeviceExecutor("noted") as device:
            device.submit(lambda: (held(), fail(ValueError("unread"))))
            held.release.set()
            raise KeyError("body")

    with pytest.raises(KeyError, match="body") as raised:
        body()
    assert raised.value.__notes__ == ["'noted' failed as well: ValueError('unread')"]
    assert not threads_of("noted")


def test_close_drains_and_leaves_no_thread():
    device = DeviceExecutor("draining", depth=50)
    seen = []
    for number in range(50):
        device.submit(seen.append, number)
    device.close()
    device.close()
    assert seen == list(range(50))
    assert not threads_of("draining")


@pytest.mark.parametrize("how", ["close(cancel=True)", "an exception in the body"])
def test_cancelling_drops_pending_submissions_and_waits_for_the_running_one(how):
    held, seen = Held(), []
    device = DeviceExecutor("dropping")
    running, queued = device.submit(held), device.submit(seen.append, 1)
    assert held.started.wait(SECONDS)
    queued._future.add_done_callback(lambda _: held.release.set())
    if how.startswith("close"):
        device.close(cancel=True)
    else:
        with pytest.raises(KeyError), device:
            raise KeyError("body")
    assert running.result() == ()
    assert seen == []
    with pytest.raises(ExecutorClosed, match="dropped"):
        queued.result()
    assert not threads_of("dropping")


def test_nothing_can_be_submitted_after_close(device):
    device.close()
    with pytest.raises(ExecutorClosed, match="submit before close"):
        device.submit(int)


def test_submission_that_waits_for_itself_is_refused(device):
    def wait_for_a_later_one():
        assert submitted.wait(SECONDS)
        return later[0].exception()

    submitted, later = threading.Event(), []
    waits = device.submit(wait_for_a_later_one)
    later.append(device.submit(int))
    submitted.set()
    assert isinstance(waits.exception(), ExecutorError)
    for call in (lambda other: other.submit(int), lambda other: other.close()):
        with DeviceExecutor() as other:
            assert isinstance(other.submit(call, other).exception(), ExecutorError)


WAYS = {
    "result": lambda pool, future: future.result(),
    "submit": lambda pool, future: [pool.submit(int) for _ in range(3)],
    "close": lambda pool, future: pool.close(),
}


@pytest.mark.parametrize(("first", "second"), [*combinations_with_replacement(WAYS, 2)])
def test_executors_that_wait_for_each_other_are_refused(first, second):
    submitted = threading.Barrier(3)
    one, two = DeviceExecutor("one"), DeviceExecutor("two")

    def wait_for(way, pool, futures):
        submitted.wait(SECONDS)
        return WAYS[way](pool, *futures())

    here, there = [], []
    here.append(one.submit(wait_for, first, two, partial(iter, there)))
    there.append(two.submit(wait_for, second, one, partial(iter, here)))
    submitted.wait(SECONDS)
    errors = [each.exception(SECONDS) for each in (*here, *there)]
    refused = [each for each in errors if isinstance(each, ExecutorError)]
    assert refused
    assert "calls of 'one', 'two' would wait for each other" in str(refused[0])
    for pool in (one, two):
        with contextlib.suppress(ExecutorError):
            pool.close()


@pytest.fixture
def one_interrupt():
    """Interrupt the main thread once. Signals repeat, because Python may miss one before a wait."""
    received = threading.Event()

    def tell(*_):
        if not received.is_set():
            received.set()
            raise KeyboardInterrupt

    def interrupt():
        while not received.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, tell)
    yield interrupt
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("waits_in", ["submit", "result"])
def test_after_ctrl_c_the_executor_closes(waits_in, one_interrupt):
    held = Held()
    device = DeviceExecutor("interrupted", depth=1)
    device.submit(int).result()
    running = device.submit(held)
    assert held.started.wait(SECONDS)
    thread = threading.Thread(target=one_interrupt)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come anywhere in here
        thread.start()
        if waits_in == "submit":
            device.submit(int)
        running.result()
    thread.join()
    held.release.set()
    device.close()
    assert running.done()
    assert not threads_of("interrupted")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_may_close_and_is_refused_to_submit():
    held = Held()
    device = DeviceExecutor(depth=2)
    pending = [device.submit(held), device.submit(int)]
    assert held.started.wait(SECONDS)
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(SECONDS)
            for call in (pending[1].result, lambda: device.submit(int)):
                with pytest.raises(ExecutorClosed, match="create another in this one"):
                    call()
            device.close()
            with DeviceExecutor() as own:
                own.submit(int).result()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held.release.set()
    device.close()


def test_job_without_close_ends_after_its_last_step_and_logs_a_failure_that_is_never_read():
    script = """
import atexit, threading, time
from graphstash.training import DeviceExecutor

device, failing = DeviceExecutor(), DeviceExecutor("failing")
end_of_script = threading.Event()

def step(number):
    end_of_script.wait()
    time.sleep(0.1)
    print("step", number)

atexit.register(print, "exit handler")
failing.submit(divmod, 1, 0)
device.submit(step, 1)
device.submit(step, 2)
end_of_script.set()
"""
    done = python(script, check=True)
    assert done.stdout.splitlines() == ["step 1", "step 2", "exit handler"]
    assert "unhandled error in 'failing'" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_nothing_is_submitted_if_no_thread_starts(monkeypatch):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    seen = []
    device = DeviceExecutor(depth=1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            device.submit(seen.append, "refused")
    device.submit(seen.append, "submitted")
    device.close()
    assert seen == ["submitted"]


def test_a_result_lives_as_long_as_its_future(device):
    future = device.submit(Thing)
    result = weakref.ref(future.result())
    device.submit(int).result()  # the thread has continued
    assert result() is not None
    del future
    assert result() is None


def test_arguments_are_released_before_a_submission_is_done(device):
    held, argument, released = Held(), Thing(), []
    watched = weakref.ref(argument)
    future = device.submit(lambda _: held(), argument)
    del argument
    future._future.add_done_callback(lambda _: released.append(watched() is None))
    held.release.set()
    device.close()
    assert released == [True]


def test_executor_releases_submissions_dropped_after_failure():
    held = Held()
    device = DeviceExecutor(depth=3)
    device.submit(held)
    failed = device.submit(fail, ValueError())
    argument = Thing()
    watched = weakref.ref(argument)
    behind = device.submit(print, argument)
    del argument
    held.release.set()
    assert isinstance(behind.exception(), ExecutorStopped)
    assert failed.exception() is not None
    assert watched() is None
    device.close()


# Pools continue after a failure.


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
    """Acquire and release all slots."""
    room = 1 + 8
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


# Training.


def train(run, result_of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(batch):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [run(step, torch.randn(32, 16)) for _ in range(100)]
    return [result_of(loss) for loss in losses], list(model.parameters())


def test_eager_torch_trains_to_the_same_bits_as_in_series(device):
    losses, parameters = train(lambda step, batch: step(batch), lambda loss: loss)
    others, other_parameters = train(device.submit, lambda loss: loss.result())
    assert losses[-1] < losses[0] / 2
    assert all(torch.equal(*pair) for pair in zip(losses, others, strict=True))
    assert all(torch.equal(*pair) for pair in zip(parameters, other_parameters, strict=True))


def openmp_threads():
    """Return the size of the calling thread's next parallel region, as OpenMP itself reports it."""
    with Path("/proc/self/maps").open() as maps:
        loaded = [line.split()[-1] for line in maps if "libgomp" in line]
    library = next(path for path in loaded if "torch" in path)  # scikit-learn loads another one
    return ctypes.CDLL(library).omp_get_max_threads()


def test_torch_computes_with_as_many_threads_as_in_the_main_thread(device):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    try:
        assert device.submit(openmp_threads).result() == before + 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.extended
def test_torch_xla_trains_to_the_same_bits_with_the_same_graphs(jobs, tmp_path):
    options = case_arguments("executor:on_torch_xla")
    jobs.start(tmp_path, *options, script=RUN_CASE, under="").finish()


@pytest.mark.extended
def test_jax_trains_to_the_same_bits_as_in_series(jobs, tmp_path):
    options = case_arguments("executor:on_jax")
    variables = {"JAX_PLATFORMS": "cpu"}
    jobs.start(tmp_path, *options, script=RUN_CASE, under="python", variables=variables).finish()
