"""Clocks: the sources of time, passed as arguments so that tests can control them."""

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

__all__ = [
    "Ago",
    "Clock",
    "SteadyClock",
    "jitter",
    "parsed_time",
    "steady_seconds",
    "system_clock",
    "without_steps",
]

Clock: TypeAlias = Callable[[], datetime]
"""Returns the current time as an aware UTC time."""

Ago: TypeAlias = Callable[[timedelta], datetime]
"""Returns the time before which stored times are older than an age, as `PlausibleClock.ago`."""


def system_clock() -> datetime:
    """Return the time of this host."""
    return datetime.now(UTC)


def parsed_time(text: str) -> datetime:
    """Return an aware UTC time from its ISO 8601 form. Raise ValueError or OverflowError if the
    text has no time zone or another form.
    """
    parsed = datetime.fromisoformat(text)
    if parsed.tzinfo is None:
        raise ValueError(text)
    return parsed.astimezone(UTC)


SteadyClock: TypeAlias = Callable[[], float]
"""Returns seconds since an arbitrary time. Setting the host's clock does not change it."""

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def steady_seconds() -> float:
    """Return the seconds since this host booted, including the time that it was suspended."""
    return time.clock_gettime(_STEADY)


def without_steps(steady: SteadyClock) -> Clock:
    """Return a clock for ages in memory. Setting the host's clock does not change it. It begins at
    an arbitrary time.
    """
    return lambda: _EPOCH + timedelta(seconds=steady())


_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)

_random = random.SystemRandom()


def jitter() -> float:
    """Return a random number in [0, 1), which keeps servers and clients from acting in step. Does
    not use the global generator, which a test in the same process may have seeded.
    """
    return _random.random()
