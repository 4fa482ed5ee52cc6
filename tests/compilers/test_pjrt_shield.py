"""No exception reaches C++. An interrupt of a callback is raised in its thread afterwards."""

import ctypes
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from graphstash.hooks.pjrt.abi import FUNCTIONS_OFFSET, ClientCompileArgs, Function, TableHead
from graphstash.hooks.pjrt.api import FUNCTION_TYPE, Api
from graphstash.hooks.pjrt.interceptor import Interceptor, Shield
from graphstash.hooks.pjrt.plugins import Plugin


class StoppedError(BaseException):
    """An exception of a signal handler. The hook handles ordinary exceptions as its own errors."""


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, StoppedError])
def test_interrupt_waits_until_the_callback_has_returned(interrupt):
    def interrupted(_):
        raise interrupt

    def fail():
        raise ValueError("broken on purpose")

    returned = []

    def callback():
        shield = Shield(interrupted)
        assert shield.attempt(fail) is None  # an interrupt waits even while an error is logged
        shield.close(sys._getframe())
        for _ in range(20):  # a busy machine returns as slowly
            threading.Event().wait(0.01)
        returned.append(True)

    with pytest.raises(interrupt):
        wait_after(callback)
    assert returned


def wait_after(callback):
    callback()
    for _ in range(600):
        threading.Event().wait(0.1)


def test_interrupt_is_raised_after_the_outermost_frame_of_the_callback():
    """Under debuggers and torch.compile, Python looks for pending calls after each call."""
    table = (ctypes.c_uint64 * 256)()
    TableHead.from_buffer(table).struct_size = ctypes.sizeof(table)
    slot = FUNCTIONS_OFFSET // 8 + Function.CLIENT_COMPILE
    table[slot] = ctypes.cast(FUNCTION_TYPE(lambda _: 0), ctypes.c_void_p).value
    plugin = Plugin(Path("plugin.so"), Api(ctypes.addressof(table)))
    interceptor = Interceptor(plugin, lambda: None)
    args = ClientCompileArgs()

    def compile_and_signal(_):
        args.executable = 1
        signal.raise_signal(signal.SIGINT)

    interceptor._compile = compile_and_signal
    interceptor._intercept = partial(interceptor._intercept)  # C code, so Python looks after it
    with pytest.raises(KeyboardInterrupt):
        wait_after(lambda: FUNCTION_TYPE(table[slot])(ctypes.addressof(args)))
    interceptor.close()
