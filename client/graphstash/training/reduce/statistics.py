"""Running totals of the traffic of one bucket."""

from collections import defaultdict
from typing import Final

from graphstash.training.reduce.all_reduce import Sent

__all__ = ["BucketStatistics"]

_MEANS: Final = ("density", "union_density")
_SECONDS: Final = ("pack_seconds", "send_seconds", "unpack_seconds")


class BucketStatistics:
    """The totals of many `Sent`."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(int)

    def add(self, sent: Sent) -> None:
        """Add one `Sent`. It has 0 blocks if the bucket was sent without a look at its blocks."""
        self._sums["looks" if sent.blocks else "whole"] += 1
        self._sums["sent_bytes"] += sent.bitmap_bytes + sent.block_bytes
        self._sums["dense_bytes"] += sent.dense_bytes
        for name in (*_MEANS, *_SECONDS):
            self._sums[name] += getattr(sent, name)

    def add_all(self, other: "BucketStatistics") -> None:
        """Add the totals of another bucket."""
        for name, value in other._sums.items():
            self._sums[name] += value

    def report(self) -> dict[str, float]:
        """Return the totals by name.

        `looks` and `whole` count the sends with and without a look at the blocks. `density` and
        `union_density` are means over the looks, 0 to 1. `sent_bytes` includes whole buckets.
        `saved_bytes` is the size of all gradients less `sent_bytes`.
        """
        sums = self._sums
        return {
            **{name: sums[name] for name in ("looks", "whole")},
            **{name: sums[name] / (sums["looks"] or 1) for name in _MEANS},
            "sent_bytes": sums["sent_bytes"],
            "saved_bytes": sums["dense_bytes"] - sums["sent_bytes"],
            **{name: sums[name] for name in _SECONDS},
        }
