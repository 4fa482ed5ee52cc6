"""Circuit breaker: stop calling a server after several failures in a row.

Otherwise a job whose server is down would wait for a timeout before every compilation.
"""

import threading
from collections.abc import Callable
from time import monotonic

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Refuses calls to a server after `threshold` failures in a row. Thread-safe.

    Each further failure doubles the pause, up to `longest_pause_seconds`. That is also the longest
    pause that a server can request.
    """

    def __init__(
        self,
        *,
        threshold: int = 3,
        first_pause_seconds: float = 2.0,
        longest_pause_seconds: float = 60.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._threshold = threshold
        self._first_pause_seconds = first_pause_seconds
        self._longest_pause_seconds = longest_pause_seconds
        self._clock = clock
        self._lock = threading.Lock()  # guards the fields below
        self._failures = 0
        self._open_until = 0.0  # set by failures
        # Set by the server's Retry-After. A success does not clear these two.
        self._asked_until = 0.0
        self._paused_until = 0.0  # at most `longest_pause_seconds` ahead
        self._trying_until = 0.0  # set while one caller makes the trial call

    def allows(self) -> bool:
        """Return whether the caller may make a call now, and must then report its outcome.

        If the circuit is open and its pause has ended, one caller may make a trial call. Other
        callers are refused until that caller reports an outcome, or for `longest_pause_seconds`.
        """
        with self._lock:
            now = self._clock()
            if now < max(self._open_until, self._paused_until, self._trying_until):
                return False
            if self._failures >= self._threshold:
                self._trying_until = now + self._longest_pause_seconds
            return True

    def record_success(self) -> None:
        """Record a usable response and close the circuit."""
        with self._lock:
            self._failures = 0
            self._open_until = self._trying_until = 0.0

    def record_failure(self) -> bool:
        """Record a failed call. Return whether the circuit is open now."""
        with self._lock:
            self._failures += 1
            self._trying_until = 0.0
            beyond = self._failures - self._threshold
            if beyond >= 0:
                # Bound the exponent, or the power overflows a float after very many failures.
                pause = self._first_pause_seconds * 2.0 ** min(beyond, 16)
                self._open_until = self._clock() + min(pause, self._longest_pause_seconds)
            return beyond >= 0

    @property
    def asked_seconds(self) -> float:
        """Seconds left of the server's whole `Retry-After`; 0 once calls are allowed again."""
        with self._lock:
            now = self._clock()
            return self._asked_until - now if now < self._paused_until else 0.0

    def pause(self, seconds: float) -> None:
        """Refuse calls for the server's `Retry-After`, at most `longest_pause_seconds`."""
        with self._lock:
            self._trying_until = 0.0
            now = self._clock()
            if now >= self._paused_until:
                self._asked_until = 0.0
            self._asked_until = max(self._asked_until, now + seconds)
            until = now + min(seconds, self._longest_pause_seconds)
            self._paused_until = max(self._paused_until, until)
