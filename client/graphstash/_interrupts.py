"""Raise a signal handler's exception again after Python has dropped it.

A signal handler raises wherever the main thread is. In a callback of C code or in a fork handler,
Python prints the exception and continues, so the job would ignore the signal.
"""

import _thread
import ctypes
import os
import sys
import threading
import time
from types import FrameType
from typing import Final

__all__ = ["raise_after"]

_POLL_SECONDS: Final = 0.01

_pending: set["_Pending"] = set()
"""Keeps the arguments of pending calls alive."""


def raise_after(frame: FrameType, interrupt: BaseException) -> None:
    """Raise an exception in this thread as soon as it has left `frame`, the outermost frame of a
    callback.

    The main thread raises it where Python would raise a signal handler's: in the line that called
    the C code. Later would be too late, because JAX drops every exception of some other lines.
    """
    thread = threading.get_ident()
    if thread == threading.main_thread().ident and frame.f_back is not None:
        _Pending(frame, frame.f_back, interrupt).add()
    else:
        _raise_soon(thread, frame, interrupt)


class _Pending:
    """A pending call of the main thread, which Python makes between two bytecodes.

    A pending call is a C function with one argument. This one is `PyObject_IsTrue`, which calls
    `__bool__`, and whose error Python raises. A callback of `ctypes` could not raise.
    """

    _FUNCTION: Final = ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p)

    def __init__(self, frame: FrameType, caller: FrameType, interrupt: BaseException) -> None:
        self._frame = frame
        self._caller = caller
        self._instruction = caller.f_lasti
        self._interrupt = interrupt
        self._process = os.getpid()

    def add(self) -> None:
        """Queue the call. If Python's queue is full, raise the exception from another thread."""
        _pending.add(self)
        if ctypes.pythonapi.Py_AddPendingCall(self._FUNCTION, ctypes.py_object(self)) != 0:
            _pending.discard(self)
            _raise_soon(threading.get_ident(), self._frame, self._interrupt)

    def __bool__(self) -> bool:
        """Raise the exception, or return False if the C code has not returned to its caller."""
        _pending.discard(self)
        if os.getpid() != self._process:
            return False  # another thread has forked, and the child has a copy of the queue
        if self._has_returned(sys._getframe(1)):  # noqa: SLF001 - documented
            raise self._interrupt
        self.add()
        return False

    def _has_returned(self, now: FrameType | None) -> bool:
        """Return whether the C code has returned to its caller. It may make further callbacks, such
        as other fork handlers, whose exceptions Python also drops.
        """
        if now is self._caller:
            return True
        while now is not None and now is not self._caller:
            now = now.f_back
        return now is None or now.f_lasti != self._instruction


def _raise_soon(thread: int, frame: FrameType, interrupt: BaseException) -> None:
    # `Thread.start` waits for the thread to begin, and a second signal could interrupt the wait.
    _thread.start_new_thread(_raise_in, (thread, frame, interrupt))


def _raise_in(thread: int, frame: FrameType, interrupt: BaseException) -> None:
    time.sleep(_POLL_SECONDS)
    while _is_running(frame):
        time.sleep(_POLL_SECONDS)
    again = ctypes.py_object(_raisable_copy(interrupt))
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), again)


def _is_running(frame: FrameType) -> bool:
    """Return whether the function of a frame has not returned yet. Clears a frame that has ended.

    `sys._current_frames` would show the same, but a garbage collection inside of it, which finds a
    `threading.local`, deadlocks all threads (Python 3.11.7, gh-106883).
    """
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


def _raisable_copy(interrupt: BaseException) -> type[BaseException]:
    """Return a class whose instances equal `interrupt`: other threads can raise only classes."""
    kind = type(interrupt)

    def init(self: BaseException) -> None:
        kind.__init__(self, *interrupt.args)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})
