"""Rank artifacts by their value: compile seconds saved per byte, aged since the last use.

    value(now) = seconds / bytes * 2 ** -((now - last use) / half-life)

The values change all the time, and recomputing them would read every row. But `now` is the same for
all artifacts, so the order does not depend on it. Without `now`, the logarithm of the value is a
sum:

    rank = log2(seconds / bytes) + last use / half-life

The first term (`density`) never changes. The second changes only when the artifact is used. So the
rank is stored in an indexed column, and the least valuable artifact comes first. Young 1994 and Cao
and Irani 1997 age in the same way, with a clock that is added and never subtracted.
"""

import math
from datetime import datetime, timedelta

__all__ = ["HALF_LIFE", "aged", "density"]

HALF_LIFE = timedelta(days=7)
"""Time after which an unused artifact is worth half. Teams work in weeks."""

_MIN_SECONDS = 1e-3
_MIN_BYTES = 4096
"""Minimum size that counts, because a smaller file still occupies a disk block."""


def density(*, compile_seconds: float, size_bytes: int) -> float:
    """Return log2 of the compile seconds that a hit saves per stored byte."""
    return math.log2(max(compile_seconds, _MIN_SECONDS) / max(size_bytes, _MIN_BYTES))


def aged(last_used_at: datetime) -> float:
    """Return the half-lives from the epoch to the last use. Rank = density + this."""
    return last_used_at.timestamp() / HALF_LIFE.total_seconds()
