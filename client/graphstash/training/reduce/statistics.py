"""What was sent of a bucket, added up."""

from collections import defaultdict
from typing import Final

from graphstash.training.reduce.all_reduce import Sent

__all__ = ["BucketStatistics"]

_MEANS: Final = ("density", "union_density")
_SECONDS: Final = ("pack_seconds", "send_seconds", "unpack_seconds")


class BucketStatistics:
    """The sums of many `Sent`."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(int)

    def add(self, sent: Sent) -> None:
        """Takes one more; one without blocks was sent whole without a look."""
        self._sums["looks" if sent.blocks else "whole"] += 1
        self._sums["sent_bytes"] += sent.bitmap_bytes + sent.block_bytes
        self._sums["dense_bytes"] += sent.dense_bytes
        for name in (*_MEANS, *_SECONDS):
            self._sums[name] += getattr(sent, name)

    def add_all(self, other: "BucketStatistics") -> None:
        """Takes what another one took."""
        for name, value in other._sums.items():
            self._sums[name] += value

    def report(self) -> dict[str, float]:
        """Times it was sent with a look at its blocks (`looks`) and without (`whole`); mean
        `density` on this rank and of the union (`union_density`), 0 to 1; `sent_bytes` that were
        handed over, all of a bucket that went to `dense=`, and `saved_bytes` that dense gradients
        have beyond these; `pack_seconds`, `send_seconds` and `unpack_seconds`.
        """
        sums = self._sums
        return {
            **{name: sums[name] for name in ("looks", "whole")},
            **{name: sums[name] / (sums["looks"] or 1) for name in _MEANS},
            "sent_bytes": sums["sent_bytes"],
            "saved_bytes": sums["dense_bytes"] - sums["sent_bytes"],
            **{name: sums[name] for name in _SECONDS},
        }
