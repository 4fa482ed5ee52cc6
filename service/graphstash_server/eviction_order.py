"""Rank artifacts by their value: compile seconds saved per byte, halved every `HALF_LIFE`.

    value(now) = seconds / bytes * 2 ** -((now - last use) / half-life)

`now` is the same for all artifacts, so the order does not depend on it. The logarithm without `now`
has the same order:

    rank = log2(seconds / bytes) + last use / half-life

The rank changes only when the artifact is used, so it is stored in an indexed column. GreedyDual
(Young 1994; Cao and Irani 1997) likewise adds a growing clock to the value of a used object, and
never lowers the values of unused objects.
"""

import math
from datetime import datetime, timedelta

__all__ = ["HALF_LIFE", "aged", "density"]

HALF_LIFE = timedelta(days=7)
"""Time in which an unused artifact loses half of its value. Teams work in weeks."""

_MIN_SECONDS = 1e-3
_MIN_BYTES = 4096
"""Minimum size, because a smaller file still occupies a disk block."""


def density(*, compile_seconds: float, size_bytes: int) -> float:
    """Return log2 of the compile seconds that a hit saves per stored byte."""
    return math.log2(max(compile_seconds, _MIN_SECONDS) / max(size_bytes, _MIN_BYTES))


def aged(last_used_at: datetime) -> float:
    """Return the half-lives from 1970 to the last use. The rank is `density` plus this number."""
    return last_used_at.timestamp() / HALF_LIFE.total_seconds()
