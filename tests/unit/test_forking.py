"""A process forks while a background thread works, and its child finds no lock held."""

import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from graphstash import _forking
from graphstash._executor import BoundedExecutor
from graphstash._forking import forkable, unforked
from support.processes import python
from support.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:.*fork")  # from JAX, and from Python 3.12

FOREVER = 3600


class Terminated(BaseException):
    pass


def fork(code=lambda: None):
    """Run code in a forked child, and return its exit status: 1 if the code raised."""
    if (child := os.fork()) == 0:
        try:
            code()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_forking():
    return bool(_forking._forking)


def depth():
    return _forking._depths.get(threading.get_ident(), 0)


@contextmanager
def working(work, **options):
    """Run work in an executor, from its call of `begin` to the end of the block."""
    begun, stop = threading.Event(), threading.Event()

    def begin():
        begun.set()
        return stop

    executor = BoundedExecutor("test", workers=1, capacity=1, **options)
    executor.submit(lambda: work(begin))
    assert begun.wait(60)
    yield
    stop.set()
    assert executor.drain(60)
    executor.close()


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Clear the state that threads of earlier tests left, because it would delay forks."""
    for name in ("_depths", "_tasks", "_slow", "_forking", "_interrupts"):
        monkeypatch.setattr(_forking, name, type(vars(_forking)[name])())
    yield
    assert depth() == 0
    assert not is_forking()


@pytest.fixture
def patient(monkeypatch):
    """Let a fork wait for a block until the test times out."""
    monkeypatch.setattr(_forking, "_WAIT_SECONDS", FOREVER)


@pytest.mark.usefixtures("patient")
def test_fork_waits_for_call_of_an_executor_that_delays_it():
    lock = threading.Lock()

    def work(begin):
        with lock:
            begin()
            until(is_forking)

    with working(work, delays_forks=True):
        assert fork(lambda: lock.acquire(timeout=0) or os._exit(2)) == 0


@pytest.mark.parametrize("delays_forks", [False, True])
@pytest.mark.usefixtures("patient")
def test_fork_does_not_wait_for_other_work(delays_forks):
    def work(begin):
        with forkable(), forkable():
            begin().wait(60)
        assert bool(depth()) == delays_forks

    with working(work, delays_forks=delays_forks):
        assert fork() == 0


def test_fork_waits_once_for_a_block_that_does_not_end(monkeypatch):
    with working(lambda begin: begin().wait(60), delays_forks=True):
        monkeypatch.setattr(_forking, "_WAIT_SECONDS", 0.01)
        assert fork() == 0
        monkeypatch.setattr(_forking, "_WAIT_SECONDS", FOREVER)
        assert fork() == 0


def test_fork_waits_longer_for_a_block_that_uses_cpu_time(monkeypatch):
    """An import may take seconds on a busy host."""
    lock = threading.Lock()

    def work(begin):
        with lock:
            begin()
            until(is_forking)
            end = time.monotonic() + 1
            while time.monotonic() < end:
                pass

    monkeypatch.setattr(_forking, "_WAIT_SECONDS", 0.4)
    with working(work, delays_forks=True):
        assert fork(lambda: lock.acquire(timeout=0) or os._exit(2)) == 0


@pytest.mark.usefixtures("patient")
def test_thread_that_forks_inside_blocks_does_not_wait_for_itself():
    def child():
        assert depth() == 2
        with forkable():
            assert fork() == 0
        assert fork() == 0

    with unforked(), unforked():
        assert fork(child) == 0
        with forkable():
            assert depth() == 0
        assert depth() == 2
    assert depth() == 0


@pytest.mark.usefixtures("patient")
def test_forks_are_not_delayed_by_threads_that_take_turns():
    """Neither threads that take turns in blocks nor forks of other threads delay a fork."""
    stop = threading.Event()

    def work():
        while not stop.is_set():
            with unforked(), forkable():
                pass

    def use():
        with unforked():
            pass

    statuses = []
    threads = [threading.Thread(target=work) for _ in range(4)]
    forkers = [threading.Thread(target=lambda: statuses.append(fork(use))) for _ in range(8)]
    for thread in threads + forkers:
        thread.start()
    for thread in forkers:
        thread.join()
    stop.set()
    for thread in threads:
        thread.join()
    assert statuses == [0] * 8


@pytest.fixture
def handle():
    """Return a function that sets the handler of SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, lambda *_: handler())
    signal.signal(signal.SIGUSR1, before)


def send(number):
    """Send a signal to the main thread when this thread is in no block."""
    main = threading.main_thread().ident
    until(lambda: main not in _forking._depths)
    signal.pthread_kill(main, number)


def raise_(error):
    raise error


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), Terminated("by the scheduler")])
@pytest.mark.usefixtures("patient")
def test_exception_of_a_signal_handler_is_raised_after_the_fork(raised, handle):
    handle(lambda: raise_(raised))

    def work(begin):
        begin()
        until(is_forking)
        send(signal.SIGUSR1)
        until(lambda: _forking._interrupts)

    def fork_and_wait():
        assert fork() == 0
        until(lambda: False)

    with working(work, delays_forks=True), pytest.raises(type(raised)) as error:
        fork_and_wait()
    assert error.value.args == raised.args


def begin_a_block(meanwhile):
    meanwhile()
    with unforked():
        until(lambda: False)


def end_a_wait(meanwhile):
    with unforked(), forkable():
        meanwhile()


@pytest.mark.parametrize("wait", [begin_a_block, end_a_wait])
def test_interrupt_of_a_thread_that_waits_for_a_fork_leaves_no_block(wait, monkeypatch):
    """A thread waits for another thread's fork, which waits for a third thread."""
    forker = threading.Thread(target=fork)

    def meanwhile():
        forker.start()
        until(is_forking)
        monkeypatch.setattr(_forking, "_WAIT_SECONDS", FOREVER)
        threading.Thread(target=send, args=(signal.SIGINT,)).start()

    with working(lambda begin: begin().wait(60), delays_forks=True):
        with pytest.raises(KeyboardInterrupt):
            wait(meanwhile)
        assert depth() == 0
    forker.join()


def test_handler_of_a_signal_forks_while_its_thread_waits_for_another_fork(monkeypatch, handle):
    statuses = []

    def use():
        with unforked():
            pass

    handle(lambda: statuses.append(fork(use)))
    forker = threading.Thread(target=fork)
    with working(lambda begin: begin().wait(60), delays_forks=True):
        monkeypatch.setattr(_forking, "_WAIT_SECONDS", 1)
        forker.start()
        until(is_forking)
        threading.Thread(target=send, args=(signal.SIGUSR1,)).start()
        use()
        until(lambda: statuses)
    forker.join()
    assert statuses == [0]


def test_child_that_reused_the_descriptor_of_an_unnamed_file_keeps_its_own(tmp_path):
    program = """
import os, sys
from graphstash._compile.in_flight import _UnnamedFile

file = _UnnamedFile(b"result")
descriptor = int(file.path.name)
if os.fork():
    assert os.wait()[1] == 0
    assert file.path.read_bytes() == b"result"
    del file
    assert not os.path.exists(f"/proc/self/fd/{descriptor}")
else:
    os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), descriptor)
    del file
    os.write(descriptor, b"child")
    os._exit(0)
"""
    python(program, tmp_path / "own", check=True)
    assert (tmp_path / "own").read_text() == "child"


@pytest.mark.untraced  # the process cannot open a file when it exits
def test_child_replaces_only_lock_files_of_its_parent(tmp_path):
    """The child replaces its parent's lock files even if it has no free file descriptor."""
    program = """
import os, resource, sys
from graphstash._forking import open_unshared

def in_child(code):
    if os.fork():
        assert os.wait()[1] == 0
    else:
        code()
        os._exit(0)

def replaced():
    for descriptor in locks:
        assert os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))
    os.write(user, b"child ")
    os.close(locks[0])
    assert os.open("other", os.O_WRONLY | os.O_CREAT) == locks[0]
    in_child(lambda: os.write(locks[0], b"grandchild"))

os.chdir(sys.argv[1])
closed, *locks = [open_unshared(f"lock{number}") for number in range(3)]
os.close(closed)
user = os.open("user", os.O_WRONLY | os.O_CREAT)
assert user == closed
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        os.dup(user)
except OSError:
    in_child(replaced)
os.write(user, b"parent")
"""
    assert python(program, tmp_path, check=True).stderr == ""
    assert (tmp_path / "user").read_text() == "child parent"
    assert (tmp_path / "other").read_text() == "grandchild"
