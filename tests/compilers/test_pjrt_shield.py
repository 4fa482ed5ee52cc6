"""No exception reaches C++. An interrupt of a callback is raised in its thread afterwards."""

import threading

import pytest

from graphstash.hooks.pjrt.interceptor import Shield


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
        shield.close()
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
