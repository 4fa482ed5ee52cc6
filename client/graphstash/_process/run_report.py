"""The report of a process to the server: counts and longest misses."""

import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from graphstash._compile.cache import CompileCache
from graphstash._compile.explaining import Cause
from graphstash.config import holder_name
from graphstash_schema import ManifestName
from graphstash_schema.explanation import MAX_LABEL_CHARACTERS
from graphstash_schema.key import ArtifactKind, DeviceType
from graphstash_schema.names import line_of
from graphstash_schema.run import (
    MAX_RUN_BYTES,
    MAX_RUN_COUNTS,
    MAX_RUN_MISSES,
    RunCounts,
    RunMiss,
    RunName,
    RunReport,
    RunTimes,
)

__all__ = ["RunName", "fit_to_limit", "name_of_process", "report_of", "times_of"]

_HOST_CHARACTERS: Final = 40


def report_of(
    cache: CompileCache, *, job: ManifestName | None, causes: Sequence[Cause] = ()
) -> RunReport:
    """Return the report of this process so far."""
    started = _started_at()
    report = RunReport(
        job=job,
        program=_line(Path(sys.argv[0] if sys.argv else "").name or "python"),
        producer=_line(holder_name()),
        started_at=datetime.fromtimestamp(started, UTC),
        seconds=max(0.0, time.time() - started),
        saved_wall_seconds=cache.counters.snapshot().saved_wall_seconds,
        counts=tuple(_counts(cache))[:MAX_RUN_COUNTS],
        misses=tuple(_misses(cache, causes)),
    )
    return fit_to_limit(report)


def times_of(cache: CompileCache) -> RunTimes:
    """Return when this process was ready: its first step and its last program so far."""
    age, now = max(0.0, time.time() - _started_at()), time.monotonic()

    def since_start(at: float | None) -> float | None:
        return None if at is None else max(0.0, age - (now - at))

    counters = cache.counters
    return RunTimes(
        first_step_seconds=since_start(counters.first_step_at),
        last_program_seconds=since_start(counters.last_program_at),
    )


def fit_to_limit(report: RunReport) -> RunReport:
    """Return the report. Drop its last misses while it exceeds the server's size limit."""
    while report.misses and len(report.model_dump_json().encode()) > MAX_RUN_BYTES:
        report = report.model_copy(update={"misses": report.misses[: len(report.misses) // 2]})
    return report


def name_of_process() -> RunName:
    """Return a name of this process that is unique in its run, also across hosts."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:_HOST_CHARACTERS]
    # The start time distinguishes a fork, and a process with the same pid in another container.
    return RunName(f"p{os.getpid()}-{int(_started_at() * 100) % 10**8}-{host}")


def _counts(cache: CompileCache) -> Iterator[RunCounts]:
    for (kind, device_type), counted in cache.counters.by_kind().items():
        hits = {name: int(counted.get(name, 0)) for name in ("hits_prefetched", "hits_host")}
        yield RunCounts(
            kind=ArtifactKind(kind),
            device_type=DeviceType(device_type),
            hits_server=int(counted.get("hits_server", 0) + counted.get("hits_ranks", 0)),
            **hits,
            misses=int(counted.get("misses", 0)),
            fallbacks=int(counted.get("fallbacks", 0)),
            compile_seconds=counted.get("compile_seconds", 0.0),
            saved_compile_seconds=counted.get("saved_compile_seconds", 0.0),
        )


def _misses(cache: CompileCache, causes: Sequence[Cause]) -> Iterator[RunMiss]:
    """Yield the misses that took longest to compile."""
    cause_of = {str(key): cause.text for cause in causes for key in cause.keys}
    longest = sorted(cache.log.misses, key=lambda each: -each.compile_seconds)[:MAX_RUN_MISSES]
    for miss in longest:
        described = miss.description
        cause = cause_of.get(str(described.key), "")
        if miss.trouble is not None:
            cause = cause or f"the cache could not help ({miss.trouble})"
        yield RunMiss(
            key=described.key,
            label=_line(described.label),
            seconds=miss.compile_seconds,
            cause=_line(cause),
        )


def _started_at() -> float:
    """Return when this process, or its fork, started, in seconds since 1970."""
    with suppress(OSError, ValueError, IndexError):
        # Field 22 of proc(5) holds clock ticks since boot. Skip field 2, which may contain spaces.
        fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - max(0.0, age)
    return time.time()


def _line(text: str) -> str:
    return line_of(text, most=MAX_LABEL_CHARACTERS)
