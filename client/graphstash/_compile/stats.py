"""Counters of the cache's hits, misses and fallbacks in this process."""

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from time import monotonic
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from graphstash._compile.saved_time import SavedTime
from graphstash.errors import Reason
from graphstash_schema.display import plural

if TYPE_CHECKING:
    from graphstash_schema import ArtifactKey

__all__ = ["Counters", "HitSource", "Stats", "format_seconds"]

HitSource: TypeAlias = Literal["server", "prefetched", "host", "ranks"]
"""Source of a hit's bytes, as in the fields of `Stats`."""

_SOURCES: Final[Mapping[HitSource, str]] = {
    "server": "server",
    "prefetched": "prefetched",
    "host": "this host",
    "ranks": "another rank",
}


@dataclass(frozen=True)
class Stats:
    """A snapshot of the counters of this process. Each hit counts once, by the source of its bytes.

    Attributes:
        hits_server: Hits that a process of this `graphstash run` downloaded when it needed them.
        hits_prefetched: Hits that this run downloaded before a process needed them.
        hits_host: Hits that an earlier run left on this host, or that this run compiled.
        hits_ranks: Hits whose bytes another rank of the job sent.
        unsigned: Hits without a valid signature, if the settings prefer signatures.
        misses: Artifacts that this process had to compile because the cache did not contain them.
        waits: Hits after waiting for another job's compilation.
        wait_seconds: Time spent in these waits.
        published: Artifacts that this process stored on the server.
        conflicts: Uploads that the server refused because it has other bytes under the key.
        fetched_bytes: Compressed bytes downloaded on demand.
        prefetched_bytes: Compressed bytes downloaded in advance, used or not.
        published_bytes: Compressed bytes uploaded.
        fetch_seconds: Time from look-up to verified bytes, summed over hits from server and disk.
        compile_seconds: Time spent compiling after misses and fallbacks.
        saved_compile_seconds: Sum of the compile times that publishers measured for the hits.
        saved_wall_seconds: Estimated wall time that the hits saved, see `_compile.saved_time`.
        fallbacks: Compilations and uploads without the cache's help, by reason.
        uncached: Compilations without the cache's help.
    """

    hits_server: int = 0
    hits_prefetched: int = 0
    hits_host: int = 0
    hits_ranks: int = 0
    unsigned: int = 0
    misses: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    published: int = 0
    conflicts: int = 0
    fetched_bytes: int = 0
    prefetched_bytes: int = 0
    published_bytes: int = 0
    fetch_seconds: float = 0.0
    compile_seconds: float = 0.0
    saved_compile_seconds: float = 0.0
    saved_wall_seconds: float = 0.0
    fallbacks: dict[str, int] = field(default_factory=dict)
    uncached: int = 0

    @property
    def hits(self) -> int:
        """Number of hits from all sources."""
        return sum(self.hits_by_source.values())

    @property
    def hits_by_source(self) -> Mapping[HitSource, int]:
        """Number of hits by source, without zeros."""
        counts = {source: int(getattr(self, f"hits_{source}")) for source in _SOURCES}
        return {source: count for source, count in counts.items() if count}

    def scalars(self) -> dict[str, float]:
        """Return metrics to log during training, such as `graphstash/hits`."""
        metrics = {
            "hits": self.hits,
            **{f"hits_{source}": getattr(self, f"hits_{source}") for source in _SOURCES},
            "misses": self.misses,
            "fallbacks": sum(self.fallbacks.values()),
            "compile_seconds": self.compile_seconds,
            "saved_compile_seconds": self.saved_compile_seconds,
            "saved_wall_seconds": self.saved_wall_seconds,
        }
        return {f"graphstash/{name}": float(value) for name, value in metrics.items()}

    def __str__(self) -> str:
        """Return a table of a few lines."""
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _repr_html_(self) -> str:
        """Return an HTML table for notebooks."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in self._rows()
        )
        return f"<table>{rows}</table>"

    def _rows(self) -> list[tuple[str, str]]:
        """Return names and values to display. Most zeros are left out."""
        sources = [f"{count} {_SOURCES[name]}" for name, count in self.hits_by_source.items()]
        rows = [("hits", f"{self.hits}" + (f" ({', '.join(sources)})" if sources else ""))]
        compiled = f" ({format_seconds(self.compile_seconds)} of compiling)"
        rows.append(("misses", f"{self.misses}" + (compiled if self.compile_seconds else "")))
        if self.waits:
            rows.append(("waits", f"{self.waits} ({format_seconds(self.wait_seconds)})"))
        if self.hits:
            rows.append(("compiling saved", format_seconds(self.saved_compile_seconds)))
            rows.append(("wall time saved", f"about {format_seconds(self.saved_wall_seconds)}"))
        others = {name: getattr(self, name) for name in ("published", "conflicts", "unsigned")}
        rows += [(name, f"{count}") for name, count in others.items() if count]
        if self.fallbacks:
            rows.append(("fallbacks", f"{self.uncached}{self._reasons()}"))
        return rows

    def _reasons(self) -> str:
        """Return what else failed besides compilations, such as an upload, and all reasons."""
        others = sum(self.fallbacks.values()) - self.uncached
        reasons = ", ".join(f"{name} {n}" for name, n in sorted(self.fallbacks.items()))
        other = "other " if self.uncached else ""
        failed = f" and {plural(others, f'{other}failure')}" if others > 0 else ""
        return f"{failed} ({reasons})"

    def summary(self) -> str:
        """Return a one-line summary.

        Example: `12 hits, 1 miss, 8 min 20 s of compiling saved (about 2 min 5 s of wall time);
        hits: 2 server, 10 this host`.
        """
        parts = [plural(self.hits, "hit"), plural(self.misses, "miss")]
        if self.unsigned:
            parts.append(f"{self.unsigned} unsigned")
        if self.waits:
            parts.append(plural(self.waits, "wait"))
        if self.published:
            parts.append(f"{self.published} published")
        if self.fallbacks:
            parts.append(f"{plural(self.uncached, 'fallback')}{self._reasons()}")
        if self.hits:
            parts.append(
                f"{format_seconds(self.saved_compile_seconds)} of compiling saved "
                f"(about {format_seconds(self.saved_wall_seconds)} of wall time); hits: "
                + ", ".join(
                    f"{count} {_SOURCES[name]}" for name, count in self.hits_by_source.items()
                )
            )
        return ", ".join(parts)


class Counters:
    """The counters of this process. Thread-safe.

    Attributes:
        first_step_at: `time.monotonic` after the first step of the training loop, or None.
        last_program_at: `time.monotonic` after the last hit or compilation, or None.
        program_ready: called after each hit and compilation. Must return at once.
    """

    def __init__(self) -> None:
        self.program_ready: Callable[[], None] = lambda: None
        self.first_step_at: float | None = None
        self.last_program_at: float | None = None
        self._lock = threading.RLock()  # guards the fields below, also against signal handlers
        self._sums: Counter[str] = Counter()
        self._by_kind: dict[tuple[str, str], Counter[str]] = {}
        self._fallbacks: Counter[str] = Counter()
        self._saved = SavedTime()

    def add(self, **amounts: float) -> None:
        """Add amounts to the fields of `Stats` with these names."""
        with self._lock:
            self._sums.update(amounts)

    def count_hit(
        self, key: "ArtifactKey", source: HitSource, *, began: float, compile_seconds: float
    ) -> None:
        """Count a hit of the calling thread, whose look-up began at this `time.monotonic`."""
        with self._lock:
            self._count(key, **{f"hits_{source}": 1}, saved_compile_seconds=compile_seconds)
            self.last_program_at = ended = monotonic()
            self._saved.add_hit(began, ended, compile_seconds=compile_seconds)
        self.program_ready()

    def count_miss(self, key: "ArtifactKey") -> None:
        with self._lock:
            self._count(key, misses=1)

    def count_uncached(self, key: "ArtifactKey") -> None:
        """Count by kind a compilation without the cache. `count_fallback` counts the reason."""
        with self._lock:
            self._kind(key)["fallbacks"] += 1

    def count_compilation(self, key: "ArtifactKey", *, seconds: float) -> None:
        """Count a compilation that the calling thread has just finished."""
        with self._lock:
            self._count(key, compile_seconds=seconds)
            self.last_program_at = ended = monotonic()
            self._saved.add_compilation(ended, seconds=seconds)
        self.program_ready()

    def record_step(self) -> None:
        """Record the time of a step, if it is the first one."""
        with self._lock:
            if self.first_step_at is None:
                self.first_step_at = monotonic()

    def count_fallback(self, reason: Reason) -> bool:
        """Count a fallback and return whether it is the first one for this reason."""
        with self._lock:
            self._fallbacks[reason.value] += 1
            return self._fallbacks[reason.value] == 1

    def snapshot(self) -> Stats:
        """Return the current values."""
        with self._lock:
            sums: dict[str, float] = dict(self._sums)
            fallbacks = dict(self._fallbacks)
            sums["saved_wall_seconds"] = self._saved.wall_seconds
            sums["uncached"] = sum(counts["fallbacks"] for counts in self._by_kind.values())
        return dataclasses.replace(Stats(fallbacks=fallbacks), **sums)  # type: ignore[arg-type] # fields by name

    def by_kind(self) -> Mapping[tuple[str, str], Mapping[str, float]]:
        """Return the fields of `RunCounts` (hits, misses, ...) by kind and device type."""
        with self._lock:
            return {pair: dict(counts) for pair, counts in self._by_kind.items()}

    def _count(self, key: "ArtifactKey", **amounts: float) -> None:
        self._sums.update(amounts)
        self._kind(key).update(amounts)

    def _kind(self, key: "ArtifactKey") -> Counter[str]:
        return self._by_kind.setdefault((key.kind, key.device_type), Counter())


def format_seconds(seconds: float) -> str:
    """Return a duration for display: `4.2 s`, `8 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
