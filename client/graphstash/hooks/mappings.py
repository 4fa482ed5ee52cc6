"""The memory of this process, as Linux lists it: what is mapped where, and from which file."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["MemoryMapping", "memory_mappings"]

_MAPS: Final = Path("/proc/self/maps")


class MemoryMapping(NamedTuple):
    """Consecutive pages: first address, address after the last, `rwxp`, and the path or ""."""

    start: int
    end: int
    permissions: str
    path: str


def memory_mappings() -> Iterator[MemoryMapping]:
    """Yield the mappings of this process by address."""
    for line in os.fsdecode(_MAPS.read_bytes()).split("\n")[:-1]:  # a path may contain "\r"
        span, permissions, *rest = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in span.split("-"))
        yield MemoryMapping(start, end, permissions, rest[3] if len(rest) > 3 else "")
