"""Clock: the source of time, passed as an argument so that tests can control it."""

import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeAlias

__all__ = ["Clock", "jitter", "system_clock"]

Clock: TypeAlias = Callable[[], datetime]
"""Returns the current time as an aware UTC time."""


def system_clock() -> datetime:
    """Return the time of this host."""
    return datetime.now(UTC)


_random = random.SystemRandom()


def jitter() -> float:
    """Return a random number in [0, 1), which keeps servers from acting in step. The global
    generator is not used, because a test may have seeded it in the same process.
    """
    return _random.random()
