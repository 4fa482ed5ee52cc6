"""Counters: everything the cache did for, or could not do for, this process."""

import dataclasses
import threading
from collections import Counter
from dataclasses import dataclass, field

from graphstash.errors import Reason

__all__ = ["Counters", "Stats", "format_seconds", "plural"]


@dataclass(frozen=True)
class Stats:
    """A snapshot of the counters.

    Attributes:
        hits_local: artifacts taken from this host's disk.
        hits_remote: artifacts fetched from the server.
        hits_ranks: artifacts taken from another rank of the same job.
        unsigned: hits that nobody vouches for, where signatures are preferred.
        misses: artifacts that had to be compiled because nobody had them.
        waits: hits that came from waiting for somebody else's compilation.
        wait_seconds: time spent waiting for them.
        published: artifacts stored on the server by this process.
        conflicts: uploads refused because other bytes were there first.
        fetched_bytes: received, compressed.
        published_bytes: sent, compressed.
        fetch_seconds: time from asking to verified bytes, over all hits.
        compile_seconds: time spent compiling after misses and fallbacks.
        saved_seconds: what the compilations behind the hits had taken.
        fallbacks: compilations or uploads without the cache's help, by reason.
    """

    hits_local: int = 0
    hits_remote: int = 0
    hits_ranks: int = 0
    unsigned: int = 0
    misses: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    published: int = 0
    conflicts: int = 0
    fetched_bytes: int = 0
    published_bytes: int = 0
    fetch_seconds: float = 0.0
    compile_seconds: float = 0.0
    saved_seconds: float = 0.0
    fallbacks: dict[str, int] = field(default_factory=dict)

    @property
    def hits(self) -> int:
        """All hits, wherever they came from."""
        return self.hits_local + self.hits_remote + self.hits_ranks

    def summary(self) -> str:
        """One line for people, e.g. `12 hits (10 local), 1 miss, 8 min 20 s of compiling saved`."""
        local = f" ({self.hits_local} local)" if self.hits_local else ""
        told = [f"{plural(self.hits, 'hit')}{local}", plural(self.misses, "miss")]
        if self.unsigned:
            told.append(f"{self.unsigned} unsigned")
        if self.waits:
            told.append(plural(self.waits, "wait"))
        if self.published:
            told.append(f"{self.published} published")
        if self.fallbacks:
            reasons = ", ".join(f"{name} {n}" for name, n in sorted(self.fallbacks.items()))
            told.append(f"{plural(sum(self.fallbacks.values()), 'fallback')} ({reasons})")
        told.append(f"{format_seconds(self.saved_seconds)} of compiling saved")
        return ", ".join(told)


class Counters:
    """Counts from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both fields below
        self._sums: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()

    def add(self, **amounts: float) -> None:
        """Adds to fields of `Stats` by name."""
        with self._lock:
            self._sums.update(amounts)

    def fallback(self, reason: Reason) -> bool:
        """Counts one fallback; True when it is the first for this reason."""
        with self._lock:
            self._fallbacks[reason.value] += 1
            return self._fallbacks[reason.value] == 1

    def snapshot(self) -> Stats:
        """The present state."""
        with self._lock:
            sums = dict(self._sums)
            fallbacks = dict(self._fallbacks)
        return dataclasses.replace(Stats(fallbacks=fallbacks), **sums)  # type: ignore[arg-type] # fields by name


def plural(count: int, noun: str) -> str:
    """A count with its noun: `1 hit`, `2 misses`."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending}"


def format_seconds(seconds: float) -> str:
    """A duration for people: `4.2 s`, `8 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
