"""A clock that stands still with its process, such as in a job that is suspended and goes on.

What others have said meanwhile has not arrived yet. By any other clock they would be silent.
"""

import time
from collections.abc import Callable
from typing import Final

__all__ = ["AwakeClock"]

_LONGEST_SECONDS: Final = 2.0
"""Between two looks at it; twice as long as anyone waits who is awake."""


class AwakeClock:
    """Seconds that go on, of which a longer time between two calls counts as two."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._missed = 0.0

    def __call__(self) -> float:
        """The time now."""
        now = self._clock()
        self._missed += max(0.0, now - self._last - _LONGEST_SECONDS)
        self._last = now
        return now - self._missed
