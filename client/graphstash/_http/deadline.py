"""Deadline: the time limit of one call.

A timeout bounds each wait for data, but not their sum. A server that sends one header byte per
second could block a job forever. So every wait of a call also ends at the call's deadline.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from graphstash._http.lean_httpx import httpx

__all__ = ["Deadline"]


class Deadline:
    """Time limit of one call. It can be shortened and paused, but not extended."""

    def __init__(self, seconds: float) -> None:
        self._started = monotonic()
        self._seconds = seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time in the block."""
        began = monotonic()
        try:
            yield
        finally:
            self._started += monotonic() - began

    def shorten(self, seconds: float) -> None:
        """Shorten the limit to `seconds` after the start of the call."""
        self._seconds = min(self._seconds, seconds)

    def bound(self, seconds: float) -> float:
        """Return the maximum seconds of a wait that may take `seconds`.

        Raises:
            httpx.ReadTimeout: no time is left.
        """
        left = self._started + self._seconds - monotonic()
        if left <= 0:
            raise httpx.ReadTimeout(f"not finished within {self._seconds:g} s")
        return min(left, seconds)
