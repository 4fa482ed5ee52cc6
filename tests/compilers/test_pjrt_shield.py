"""Nothing is raised into C++: what comes in between is raised again in its thread afterwards."""

import threading

import pytest

from graphstash.hooks.pjrt.interceptor import Shield


def test_an_interrupt_while_an_error_is_told_waits_too():
    def interrupted(_):
        raise KeyboardInterrupt

    def fail():
        raise ValueError("broken on purpose")

    shield = Shield(interrupted)
    assert shield.attempt(fail) is None
    with pytest.raises(KeyboardInterrupt):
        close_and_wait(shield)


def close_and_wait(shield):
    shield.close()
    for _ in range(100):
        threading.Event().wait(0.1)
