"""SavedTime: an estimate of how much earlier a process gets on because of its hits.

A hit stands for the compilation that its publisher has measured. Without the cache the thread would
have been busy for that long, and everything that it did afterwards would have come so much later.
So each thread has a time line on which hits last as long as the compilations that they stand for:

    real            look-up A | look-up B | ...
    as if compiled  [---- compilation A ----)[-- compilation B --) ...

Time is saved where at least one thread would have compiled: the union of these intervals over all
threads, so that what compiles side by side counts once. What another thread has really compiled at
that time is left out, because the process would have been busy with it anyway, and so is the time
that the look-ups took.

A worker thread begins where the main thread is: what the main thread saved before it handed over
the work is not saved a second time at the same place. In other respects threads know nothing of
each other, so that work which one thread hands to the next may be counted as if it had been done
side by side: the estimate is then too low.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["SavedTime"]

_Interval: TypeAlias = tuple[float, float]


@dataclass(slots=True)
class _TimeLine:
    """Of one thread, as if it had compiled everything; in seconds.

    Attributes:
        ahead: how much later it would be by now.
        avoided: when it would have compiled what it found.
        compiled: when it compiled.
    """

    ahead: float = 0.0
    avoided: list[_Interval] = field(default_factory=list)
    compiled: list[_Interval] = field(default_factory=list)


class SavedTime:
    """Adds up what hits save; not safe for many threads at once, the caller has a lock."""

    def __init__(self) -> None:
        self._lines: dict[int, _TimeLine] = {}
        self._looked_up: list[_Interval] = []

    def hit(self, began: float, ended: float, *, compile_seconds: float) -> None:
        """This thread has found something between two times, which had taken so long to compile."""
        line = self._line()
        start = began + line.ahead
        line.avoided.append((start, start + compile_seconds))
        line.ahead += max(0.0, compile_seconds - (ended - began))
        self._looked_up.append((began, ended))

    def compiled(self, ended: float, *, seconds: float) -> None:
        """This thread has compiled something that nobody had."""
        line = self._line()
        line.compiled.append((ended - seconds + line.ahead, ended + line.ahead))

    @property
    def wall_seconds(self) -> float:
        """The estimate so far; never negative."""
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
    """The same times in intervals that do not touch, in order."""
    merged: list[_Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _without(intervals: list[_Interval], busy: list[_Interval]) -> list[_Interval]:
    """What of the first is in none of the second; both are in order and do not overlap."""
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
