"""Clock: the source of time, an argument so that tests can control it; and what blurs it."""

import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeAlias

__all__ = ["Clock", "jitter", "system_clock"]

Clock: TypeAlias = Callable[[], datetime]
"""Returns the present as an aware UTC time."""


def system_clock() -> datetime:
    """The time of this host."""
    return datetime.now(UTC)


_random = random.SystemRandom()


def jitter() -> float:
    """A number in [0, 1), so that servers do not act in step.

    Not of the global generator: a server may run in the process of a test that has seeded it.
    """
    return _random.random()
