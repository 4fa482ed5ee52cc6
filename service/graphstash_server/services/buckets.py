"""Buckets: how much of something each of many may have, in this process."""

import time
from collections import OrderedDict
from collections.abc import Callable

__all__ = ["Buckets"]

_MAX_BUCKETS = 4096
"""The least recently used bucket goes, which forgets at most what it had given out."""


class Buckets:
    """A bucket per name holds at most so much, and fills at a rate."""

    def __init__(self, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str, wanted: int, *, most: float, per_second: float) -> tuple[int, float]:
        """Takes whole units out of a bucket, as far as there are some.

        Returns:
            How many, and how much is left.
        """
        now = self._seconds()
        rest, since = self._buckets.get(name, (most, now))
        rest = min(rest + (now - since) * per_second, most)
        taken = min(wanted, int(rest))
        self._buckets[name] = (rest - taken, now)
        self._buckets.move_to_end(name)
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return taken, rest - taken
