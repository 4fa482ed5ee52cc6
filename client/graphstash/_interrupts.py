"""Raise a signal handler's exception again after Python has dropped it.

A signal handler raises wherever the main thread is. In a callback of C code or in a fork handler,
Python prints the exception and continues, so the job would ignore the signal.
"""

import _thread
import ctypes
import signal
import sys
import threading
import time
from types import FrameType
from typing import Final

__all__ = ["raise_after"]

_POLL_SECONDS: Final = 0.01


def raise_after(frame: FrameType, interrupt: BaseException) -> None:
    """Raise an exception in this thread as soon as it has left `frame`."""
    # `Thread.start` waits for the thread to begin, and a second signal could interrupt the wait.
    _thread.start_new_thread(_raise_in, (threading.get_ident(), frame, interrupt))


def _raise_in(thread: int, frame: FrameType, interrupt: BaseException) -> None:
    time.sleep(_POLL_SECONDS)
    while _is_in(thread, frame):
        time.sleep(_POLL_SECONDS)
    is_ctrl_c = isinstance(interrupt, KeyboardInterrupt)
    if is_ctrl_c and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.pthread_kill(thread, signal.SIGINT)  # a signal also interrupts a wait for a lock
    else:
        # A custom handler has run once and may have side effects, so raise without a second signal.
        again = ctypes.py_object(_raisable_copy(interrupt))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), again)


def _is_in(thread: int, frame: FrameType) -> bool:
    """Return whether a frame is still on the thread's stack."""
    found = sys._current_frames().get(thread)  # noqa: SLF001 - documented
    while found is not None and found is not frame:
        found = found.f_back
    return found is not None


def _raisable_copy(interrupt: BaseException) -> type[BaseException]:
    """Return a class whose instances equal `interrupt`: other threads can raise only classes."""
    kind = type(interrupt)

    def init(self: BaseException) -> None:
        kind.__init__(self, *interrupt.args)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})
