"""WhenSettled: call a function when a process seems to have all its programs.

Many processes never end by themselves: servers run for weeks, and schedulers, launchers and
preemption end a job with a signal. Such a process never runs the code that waits for its exit.
"""

import threading
from collections.abc import Callable
from random import uniform
from time import monotonic
from typing import Final

from graphstash._compile.stats import Counters
from graphstash._executor import BoundedExecutor
from graphstash._forking import forkable

__all__ = ["WhenSettled"]

_QUIET_SECONDS: Final = 30.0
"""Seconds without a hit or compilation before the first call."""

_MAX_QUIET_SECONDS: Final = 3600.0
"""The same for later calls: the seconds double with each call, up to this limit. So a process that
compiles again and again makes few calls."""


class WhenSettled:
    """Calls `action` in the background, some time after the last hit or compilation.

    Args:
        counters: counters of this process.
        action: called without arguments. It handles its own failures.
    """

    def __init__(self, counters: Counters, action: Callable[[], None]) -> None:
        self._counters = counters
        self._action = action
        # Processes of a job start together, and must not call the server at the same time.
        self._seconds = _QUIET_SECONDS * uniform(1.0, 1.5)  # noqa: S311 - no secret
        self._seen: float | None = None
        self._is_ending = threading.Event()
        # A queued call runs again for programs that came while the running one ended.
        self._executor = BoundedExecutor(
            "graphstash-settled", workers=1, capacity=1, delays_forks=True
        )
        counters.program_ready = self._begin

    def end(self, timeout_seconds: float) -> bool:
        """Make no further call. Wait for a running one, and return False after the timeout."""
        self._counters.program_ready = lambda: None
        self._is_ending.set()
        is_idle = self._executor.drain(timeout_seconds)
        self._executor.close()
        return is_idle

    def _begin(self) -> None:
        self._executor.submit(self._run)

    def _run(self) -> None:
        while (latest := self._counters.last_program_at) != self._seen and latest is not None:
            with forkable():
                if self._is_ending.wait(max(0.0, latest + self._seconds - monotonic())):
                    return
            if self._counters.last_program_at == latest:
                self._seen = latest
                self._action()
                self._seconds = min(2 * self._seconds, _MAX_QUIET_SECONDS)
