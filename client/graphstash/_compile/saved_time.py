"""SavedTime: an estimate of the wall time that a process saves through its hits.

A hit replaces a compilation, whose time its publisher has measured. Without the cache, the thread
would have compiled for that time, and its later work would have started later. So each thread has a
hypothetical time line, on which each hit takes as long as its compilation:

    real            look-up A | look-up B | ...
    as if compiled  [---- compilation A ----)[-- compilation B --) ...

The estimate is the union of these hypothetical compilations over all threads, so parallel
compilations count once. It excludes the time of the look-ups, and the time when another thread has
really compiled, because the process was busy in that time even with the cache.

At each hit and each compilation, a thread's time line is delayed at least as much as that of the
main thread, which usually starts the work. Otherwise time lines are independent. If a worker thread
compiles, and then hands work to another worker thread that compiles, the estimate may treat both
compilations as parallel, and is then too low.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["SavedTime"]

_Interval: TypeAlias = tuple[float, float]


@dataclass(slots=True)
class _TimeLine:
    """Hypothetical time line of a thread, in seconds.

    Attributes:
        ahead: Delay of the time line relative to real time.
        avoided: Hypothetical intervals of the compilations that hits have replaced.
        compiled: Intervals of real compilations, delayed by `ahead`.
    """

    ahead: float = 0.0
    avoided: list[_Interval] = field(default_factory=list)
    compiled: list[_Interval] = field(default_factory=list)


class SavedTime:
    """Estimates the time that hits save. Not thread-safe: the caller serializes all calls."""

    def __init__(self) -> None:
        self._lines: dict[int, _TimeLine] = {}
        self._looked_up: list[_Interval] = []

    def add_hit(self, began: float, ended: float, *, compile_seconds: float) -> None:
        """Add a hit of this thread: start and end of its look-up, and the compile time saved."""
        line = self._line()
        start = began + line.ahead
        line.avoided.append((start, start + compile_seconds))
        line.ahead += max(0.0, compile_seconds - (ended - began))
        self._looked_up.append((began, ended))

    def add_compilation(self, ended: float, *, seconds: float) -> None:
        """Add a real compilation of this thread."""
        line = self._line()
        line.compiled.append((ended - seconds + line.ahead, ended + line.ahead))

    @property
    def wall_seconds(self) -> float:
        """Estimated seconds saved so far, at least 0."""
        lines = list(self._lines.values())
        saved: list[_Interval] = []
        for line in lines:
            busy = _union(each for other in lines if other is not line for each in other.compiled)
            saved += _without(_union(line.avoided), busy)
        return max(0.0, _length(_union(saved)) - _length(_union(self._looked_up)))

    def _line(self) -> _TimeLine:
        line = self._lines.setdefault(threading.get_ident(), _TimeLine())
        main = self._lines.get(threading.main_thread().ident or 0)
        if main is not None:
            line.ahead = max(line.ahead, main.ahead)
        return line


def _union(intervals: Iterable[_Interval]) -> list[_Interval]:
    """Merge intervals that overlap or touch, and return them in order."""
    merged: list[_Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _without(intervals: list[_Interval], busy: list[_Interval]) -> list[_Interval]:
    """Subtract `busy` from `intervals`. Both must be sorted and must not overlap."""
    left: list[_Interval] = []
    at = 0
    for first, last in intervals:
        while at < len(busy) and busy[at][1] <= first:
            at += 1
        begin = first
        for start, end in busy[at:]:
            if start >= last:
                break
            if begin < start:
                left.append((begin, start))
            begin = max(begin, end)
        if begin < last:
            left.append((begin, last))
    return left


def _length(intervals: Iterable[_Interval]) -> float:
    return sum(end - start for start, end in intervals)
