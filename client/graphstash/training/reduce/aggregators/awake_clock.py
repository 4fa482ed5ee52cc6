"""A clock that excludes the time during which its process was suspended.

When a suspended process resumes, it has not yet read the heartbeats that arrived meanwhile. By an
ordinary clock, their senders would count as dead.
"""

import time
from collections.abc import Callable
from typing import Final

__all__ = ["AwakeClock"]

_LONGEST_SECONDS: Final = 2.0
"""Maximum advance per call. A running process waits at most half of it."""


class AwakeClock:
    """Monotonic clock that advances at most two seconds per call, to exclude suspension."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._missed = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        now = self._clock()
        self._missed += max(0.0, now - self._last - _LONGEST_SECONDS)
        self._last = now
        return now - self._missed
