"""NamedCounts: counters whose names come from requests, in memory that all workers share.

Each worker writes to counters of its own, so no lock is needed. The number of names is bounded,
because callers choose them.
"""

import mmap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

__all__ = ["MAX_NAMES", "OTHER", "NamedCounts"]

MAX_NAMES: Final = 32
"""Maximum names of one worker. Further names share the counter `OTHER`."""

OTHER: Final = "(other)"
"""Label of the sum over all other names. It is not a valid name of a namespace or a header."""

_NAME_BYTES: Final = 64
_NAMES_AT: Final = 8 * (MAX_NAMES + 1)


class NamedCounts:
    """The counters of one worker. Create them before the workers are forked. The next worker with
    the same counters continues them.
    """

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, _NAMES_AT + _NAME_BYTES * (MAX_NAMES + 1)))
        self._counts = memory[:_NAMES_AT].cast("q")
        self._names = memory[_NAMES_AT:]
        self._slots: dict[bytes, int] | None = None

    def count(self, name: str) -> None:
        """Count one occurrence of a name, whose first 64 bytes distinguish it."""
        if self._slots is None:  # the names of an earlier worker
            self._slots = {given: slot for slot, given, _ in self.used()}
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
        """Yield the number, the name and the value of each counter."""
        for slot, count in enumerate(self._counts):
            if count:
                start = slot * _NAME_BYTES
                yield slot, bytes(self._names[start : start + _NAME_BYTES]).rstrip(b"\0"), count

    @staticmethod
    def sums(workers: Iterable["NamedCounts"]) -> dict[str, int]:
        """Return the sum over all workers for each name."""
        sums: Counter[str] = Counter()
        for each in workers:
            for _, name, count in each.used():
                sums[name.decode(errors="replace")] += count
        return dict(sums)
