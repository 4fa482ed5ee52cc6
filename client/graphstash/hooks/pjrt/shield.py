"""Keeps exceptions out of a C++ caller: what a signal raises meanwhile is raised again afterwards.

A callback of ctypes that ends in an exception returns null, which PJRT reads as success. Handlers
of signals run in the main thread, between any two steps of Python: someone presses Ctrl-C while a
graph is compiled for a minute, and KeyboardInterrupt is raised right after the compiler has
returned, in the middle of the callback. Without a hook it would be raised where the framework comes
back to Python; so that is where it goes.
"""

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

__all__ = ["Shield"]

_T = TypeVar("_T")

_AWAY_SECONDS: Final = 0.01
"""How long the callback may take to return. Should it need longer, the exception meets the shield
once more, and waits once more."""


class Shield:
    """Runs the steps of one callback.

    Args:
        failed: told of the errors of our own steps; must not raise.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._interrupt: BaseException | None = None

    def attempt(self, step: Callable[[], _T]) -> _T | None:
        """The step's value; None when it raised."""
        try:
            try:
                return step()
            except Exception as error:  # noqa: BLE001 - the hook's outermost frame
                self._failed(error)
        except BaseException as interrupt:  # noqa: BLE001 - raised again by `close`
            self._interrupt = interrupt
        return None

    def insist(self, step: Callable[[], _T]) -> _T:
        """The value of a step that raises nothing by itself; after a signal it is called again."""
        while True:
            try:
                return step()
            except BaseException as interrupt:  # noqa: BLE001 - raised again by `close`
                self._interrupt = interrupt

    def close(self) -> None:
        """Has what a signal raised raised again in this thread, once it is out of the callback."""
        if self._interrupt is not None:
            arguments = (threading.get_ident(), self._interrupt)
            threading.Thread(target=_raise_in, args=arguments, daemon=True).start()


def _raise_in(thread: int, interrupt: BaseException) -> None:
    time.sleep(_AWAY_SECONDS)
    is_ctrl_c = isinstance(interrupt, KeyboardInterrupt)
    if is_ctrl_c and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.pthread_kill(thread, signal.SIGINT)  # ends a wait for a lock, too
    else:
        # Whatever another handler has counted or closed, it must not do twice.
        again = ctypes.py_object(_again(interrupt))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), again)


def _again(interrupt: BaseException) -> type[BaseException]:
    """A class whose instances are like `interrupt`: only a class can be raised in a thread."""
    kind = type(interrupt)

    def init(self: BaseException) -> None:
        kind.__init__(self, *interrupt.args)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})
