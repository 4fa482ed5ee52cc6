"""CompileLimit: end a job that compiles too much, if the user has set a limit.

    GRAPHSTASH_FAIL_ON_MISS          end the job before its first compilation
    GRAPHSTASH_MAX_COMPILE_SECONDS   end it at this sum of the run's compile times on this host

Without these two settings, the client never ends a job. With the first one, the client also ends a
job that would compile because the cache cannot help, with another exit status.
"""

import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Final, Protocol

from graphstash._compile.request import CompileRequest
from graphstash.config import ClientConfig
from graphstash.errors import Reason
from graphstash_schema import ArtifactKey
from graphstash_schema.names import printable

__all__ = ["STATUS_NO_CACHE", "STATUS_WOULD_COMPILE", "CompileLimit", "End"]

STATUS_WOULD_COMPILE: Final = 86
"""Exit status of a job that would compile after a miss, or has compiled for too long."""

STATUS_NO_CACHE: Final = 75
"""Exit status of a job that would compile because the cache cannot help. A retry may succeed
(EX_TEMPFAIL of sysexits.h)."""

_LABEL_CHARACTERS: Final = 80
_LOOK_SECONDS: Final = 5.0


class End(Protocol):
    """Ends the process and its run."""

    def __call__(self, why: str, *, status: int) -> None:
        """End the process. Return only if the process is exiting already."""


class CompileLimit:
    """Limits the compilations of one process. Thread-safe.

    Args:
        end: Called in the thread that would compile, or in a thread that watches compilations.
        shared: File in which all processes of the run record their compile times. Default: count
            only this process.
    """

    def __init__(self, config: ClientConfig, end: End, *, shared: Path | None = None) -> None:
        self._fails_on_miss = config.fail_on_miss
        self._most = config.max_compile_seconds
        self._end = end
        self._shared = shared
        self._changed = threading.Condition()  # guards the fields below
        self._spent = 0.0
        self._running: dict[ArtifactKey, float] = {}
        self._last_end = 0.0
        self._watcher: threading.Thread | None = None

    def check(self, request: CompileRequest, reason: Reason | None) -> None:
        """End the job if it may not compile now. `reason` is None for a miss."""
        if not request.is_compiled:
            return
        what = self._name(request)
        if self._fails_on_miss:
            why, status = "the cache does not have it", STATUS_WOULD_COMPILE
            if reason is not None:
                why, status = f"the cache could not help ({reason})", STATUS_NO_CACHE
            self._end(f"{what} would be compiled: {why} (GRAPHSTASH_FAIL_ON_MISS)", status=status)
        if self._most and (spent := self._spent_in_run()) >= self._most:
            self._end_at_limit(spent, f"{what} would be compiled")

    def begin(self, request: CompileRequest, reason: Reason | None) -> None:
        """Call `check`, then count the time of this compilation until `end`."""
        self.check(request, reason)
        if not self._most or not request.is_compiled:
            return
        with self._changed:
            self._running[request.key] = monotonic()
            if self._watcher is None:
                watcher = threading.Thread(
                    target=self._watch, name="graphstash-compile-limit", daemon=True
                )
                with suppress(RuntimeError):  # at the thread limit; the next call tries again
                    watcher.start()
                    self._watcher = watcher
            self._changed.notify_all()

    def add_compilation(self, seconds: float) -> None:
        """Add the time of a finished compilation."""
        with self._changed:
            self._spent += seconds
            self._last_end = monotonic()
            if self._shared is not None and self._most:
                # Append one line with one write, because several processes write to the file.
                with suppress(OSError), self._shared.open("ab", buffering=0) as file:
                    file.write(f"{seconds:.3f}\n".encode())

    def end(self, key: ArtifactKey) -> None:
        """Stop counting the time of the compilation of a key."""
        with self._changed:
            if self._running.pop(key, None) is not None:
                self._last_end = monotonic()
                self._changed.notify_all()

    def _watch(self) -> None:
        """End the job when a running compilation exceeds the limit."""
        with self._changed:
            while True:
                if not self._running:
                    self._changed.wait()
                    continue
                # Compilations may nest or overlap. Count no time twice: start at the last end.
                since = max(min(self._running.values()), self._last_end)
                left = self._most - self._spent_in_run() - (monotonic() - since)
                if left <= 0:
                    break
                self._changed.wait(min(left, _LOOK_SECONDS))  # other processes may add time
        self._end_at_limit(self._most, "a compilation has not ended")

    def _spent_in_run(self) -> float:
        """Return the recorded compile time of all processes of the run on this host."""
        if self._shared is not None:
            with suppress(OSError, ValueError):
                return max(self._spent, sum(map(float, self._shared.read_text("ascii").split())))
        return self._spent

    def _end_at_limit(self, spent: float, what: str) -> None:
        limit = f"the limit is {self._most:g} s (GRAPHSTASH_MAX_COMPILE_SECONDS)"
        self._end(f"{what} after {spent:.0f} s of compiling; {limit}", status=STATUS_WOULD_COMPILE)

    def _name(self, request: CompileRequest) -> str:
        label = printable(request.label, most=_LABEL_CHARACTERS)
        return f"{label} ({request.key.short})" if label else request.key.short
