"""What an artifact is worth to the cache: compile seconds saved per byte, aged by last use.

    value(now) = seconds / bytes * 2 ** -((now - last use) / half-life)

An order by value changes all the time, and computing it anew would read every row. But `now` is the
same for all artifacts, so its share can be left out, and in logarithms the rest is a sum:

    rank = log2(seconds / bytes) + last use / half-life

The first term never changes (`density`), the second one only when the artifact is used. So the rank
is kept in an indexed column, and whatever is worth least stands first (Young 1994 and Cao and Irani
1997 age the same way, by a clock that is added and never subtracted).
"""

import math
from datetime import datetime, timedelta

__all__ = ["HALF_LIFE", "aged", "density"]

HALF_LIFE = timedelta(days=7)
"""An artifact that was not used for a week is worth half: teams work in weeks."""

_MIN_SECONDS = 1e-3
_MIN_BYTES = 4096
"""A smaller file takes a block of the disk, too."""


def density(*, compile_seconds: float, size_bytes: int) -> float:
    """log2 of the seconds that a hit saves per byte kept."""
    return math.log2(max(compile_seconds, _MIN_SECONDS) / max(size_bytes, _MIN_BYTES))


def aged(last_used_at: datetime) -> float:
    """Half-lives from the epoch to the last use; added to the density it is the rank."""
    return last_used_at.timestamp() / HALF_LIFE.total_seconds()
