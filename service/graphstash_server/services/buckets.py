"""Token buckets of this process: they limit how much each of many names may take."""

import time
from collections import OrderedDict
from collections.abc import Callable

__all__ = ["Buckets"]

_MAX_BUCKETS = 4096
"""Maximum number of buckets. Dropping the least recently used one forgets at most what it gave
out."""


class Buckets:
    """One bucket per name. Its capacity and fill rate come with each call."""

    def __init__(self, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str, wanted: int, *, most: float, per_second: float) -> tuple[int, float]:
        """Take up to `wanted` whole units from a bucket of size `most`, filled at `per_second`.

        Returns:
            How many units were taken, and how much is left.
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
