"""Circuit breaker: after a few failures in a row, stop asking for a while.

A job whose server is gone must not pay a time-out for every graph it compiles.
"""

import threading
from collections.abc import Callable
from time import monotonic

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Closed: calls pass. Open: they are refused until the pause is over, then one may try.

    Args:
        threshold: failures in a row that open the circuit.
        first_pause_seconds: length of the first pause; each further failure doubles it.
        longest_pause_seconds: upper bound of a pause, also of one that a server asked for.
        clock: seconds that never run backwards.
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
        self._open_until = 0.0  # after failures
        self._asked_until = 0.0  # because the server asked for it; a success does not end it
        self._trying_until = 0.0  # while one caller tries

    def allows(self) -> bool:
        """Whether a call may be made now.

        The first caller after a pause may try; others are refused until it has succeeded or failed,
        or nothing was heard of it for the longest pause.
        """
        with self._lock:
            now = self._clock()
            if now < max(self._open_until, self._asked_until, self._trying_until):
                return False
            if self._failures >= self._threshold:
                self._trying_until = now + self._longest_pause_seconds
            return True

    def succeeded(self) -> None:
        """An answer came: the circuit closes."""
        with self._lock:
            self._failures = 0
            self._open_until = self._trying_until = 0.0

    def failed(self) -> None:
        """No usable answer came."""
        with self._lock:
            self._failures += 1
            self._trying_until = 0.0
            beyond = self._failures - self._threshold
            if beyond >= 0:
                # The exponent is bounded so that years of failures cannot overflow a float.
                pause = self._first_pause_seconds * 2.0 ** min(beyond, 16)
                self._open_until = self._clock() + min(pause, self._longest_pause_seconds)

    def pause(self, seconds: float) -> None:
        """The server asked for a pause (`Retry-After`)."""
        with self._lock:
            self._trying_until = 0.0
            until = self._clock() + min(seconds, self._longest_pause_seconds)
            self._asked_until = max(self._asked_until, until)
