"""NamedCounts: counters whose names come from requests, in memory that all workers share.

Each worker has its own counters, so they need no lock.
"""

import mmap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

__all__ = ["MAX_NAMES", "OTHER", "NamedCounts"]

MAX_NAMES: Final = 32
"""Maximum names of one worker, because callers choose them. Further names count as `OTHER`."""

OTHER: Final = "(other)"
"""Not a valid name of a namespace or a header."""

_NAME_BYTES: Final = 64
_NAMES_AT: Final = 8 * (MAX_NAMES + 1)


class NamedCounts:
    """The counters of one worker, created before the fork. A replacement worker continues them."""

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, _NAMES_AT + _NAME_BYTES * (MAX_NAMES + 1)))
        self._counts = memory[:_NAMES_AT].cast("q")
        self._names = memory[_NAMES_AT:]
        self._slots: dict[bytes, int] | None = None

    def count(self, name: str) -> None:
        """Add 1 to the counter of a name. Names with the same first 64 bytes share a counter."""
        if self._slots is None:  # continue the counters of an earlier worker
            self._slots = {used: slot for slot, used, _ in self.used()}
        encoded = name.encode(errors="replace")[:_NAME_BYTES]
        slot = self._slots.get(encoded)
        if slot is None:
            if len(self._slots) >= MAX_NAMES:
                encoded = OTHER.encode()
            slot = self._slots.setdefault(encoded, len(self._slots))
            start = slot * _NAME_BYTES
            self._names[start : start + len(encoded)] = encoded
        self._counts[slot] += 1

    def used(self) -> Iterator[tuple[int, bytes, int]]:
        """Yield slot, name and count of each counter above 0."""
        for slot, count in enumerate(self._counts):
            if count:
                start = slot * _NAME_BYTES
                yield slot, bytes(self._names[start : start + _NAME_BYTES]).rstrip(b"\0"), count

    @staticmethod
    def sums(workers: Iterable["NamedCounts"]) -> dict[str, int]:
        """Return the count of each name, summed over the workers."""
        sums: Counter[str] = Counter()
        for each in workers:
            for _, name, count in each.used():
                sums[name.decode(errors="replace")] += count
        return dict(sums)
