"""An exception that Python would drop in a callback of C code is raised after the callback."""

import ctypes
import operator
import os
import subprocess
import sys
import threading
import time

import pytest

from graphstash._interrupts import raise_after
from support.waiting import until


class StoppedError(Exception):
    """Raised by the job's own signal handler."""


def call_back(function):
    """Call a function from C code."""
    ctypes.PYFUNCTYPE(None)(function)()


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), StoppedError("by the scheduler", 15)])
def test_exception_is_raised_where_the_c_code_returns(raised):
    """JAX calls its compiler and then drops all exceptions of the next lines."""
    continued = threading.Event()

    def compile_and_continue():
        call_back(lambda: raise_after(sys._getframe(), raised))
        continued.set()

    with pytest.raises(type(raised)) as error:
        compile_and_continue()
    assert error.value.args == raised.args
    assert not continued.is_set()


def test_exception_waits_until_its_frame_is_left():
    steps = []

    def callback():
        frame = sys._getframe()
        call_back(lambda: raise_after(frame, KeyboardInterrupt()))
        steps.extend(step for step in range(1000))

    with pytest.raises(KeyboardInterrupt):
        call_back(callback)
    assert len(steps) == 1000


def test_exception_waits_while_the_c_code_makes_further_callbacks():
    """Python also drops an exception of these callbacks, for example of other fork handlers."""
    steps = []

    def first():
        raise_after(sys._getframe(), KeyboardInterrupt())

    def second():
        steps.extend(step for step in range(1000))

    with pytest.raises(KeyboardInterrupt):
        list(map(operator.call, [first, second]))
    assert len(steps) == 1000


@pytest.mark.filterwarnings("ignore:.*fork")  # from JAX, and from Python 3.12
def test_exception_is_not_raised_in_a_child_of_another_thread(monkeypatch):
    statuses = []
    monkeypatch.setattr(sys, "unraisablehook", lambda _: os._exit(1))  # of a fork handler

    def fork():
        if (child := os.fork()) == 0:
            try:
                for _ in range(1000):
                    time.sleep(0)  # Python looks for pending calls when a thread continues
            except BaseException:
                os._exit(1)
            os._exit(0)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    def callback():
        raise_after(sys._getframe(), KeyboardInterrupt())
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()

    with pytest.raises(KeyboardInterrupt):
        call_back(callback)
    assert statuses == [0]


def test_exceptions_of_two_frames_are_both_raised():
    raised = []

    def inner():
        raise_after(sys._getframe(), StoppedError("first"))

    def outer():
        raise_after(sys._getframe(), KeyboardInterrupt())
        try:
            call_back(inner)
        except StoppedError as error:
            raised.append(error)

    with pytest.raises(KeyboardInterrupt):
        call_back(outer)
    assert [error.args for error in raised] == [("first",)]


def test_exception_of_another_thread_is_raised_in_that_thread():
    """Ray and debuggers raise exceptions in threads."""
    raised = []

    def work():
        try:
            call_back(lambda: raise_after(sys._getframe(), StoppedError()))
            until(lambda: False)
        except StoppedError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(raised) == 1


def test_garbage_collections_do_not_stop_the_wait_for_a_frame():
    """A collection inside of `sys._current_frames` deadlocks if it finds a `threading.local`."""
    code = """
import gc, sys, threading, time
from graphstash._interrupts import raise_after

class Cycle:
    def __init__(self):
        self.me, self.local = self, threading.local()
        self.local.value = 1

def leave_garbage():
    Cycle()
    time.sleep(0)  # lets a waiting thread look

def work():
    for _ in range(50):
        raise_after(sys._getframe(), KeyboardInterrupt())
    ends = time.monotonic() + 1
    while time.monotonic() < ends:
        leave_garbage()

gc.set_threshold(1)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
