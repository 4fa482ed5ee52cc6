"""CompileLimit: ends a job before it spends hours on compiling, where its user has asked for that.

    GRAPHSTASH_FAIL_ON_MISS          before anything is compiled at all
    GRAPHSTASH_MAX_COMPILE_SECONDS   when what the run compiled on this host has taken so long

This is the one thing in the client that ends a job, and only by these two settings. A cache that
cannot help is no miss, but the job would compile all the same: it ends, too, with another status.
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
"""Exit status of a job that would have compiled, or has compiled for too long."""

STATUS_NO_CACHE: Final = 75
"""Exit status of a job that would have compiled because the cache could not help: a later try may
succeed (EX_TEMPFAIL of sysexits.h)."""

_LABEL_CHARACTERS: Final = 80
_LOOK_SECONDS: Final = 5.0


class End(Protocol):
    """Ends the process, and the run that it is part of."""

    def __call__(self, why: str, *, status: int) -> None:
        """Does not return, unless the process is about to end anyway."""


class CompileLimit:
    """Watches the compilations of one process; safe for many threads.

    Args:
        config: the two settings.
        end: is called once, in the thread that would compile or in a thread of its own.
        shared: file in which the processes of a run add up their seconds; None for one process.
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
        """Something is about to be compiled, because of a reason or because nobody has it."""
        what = self._name(request)
        if self._fails_on_miss:
            why = "nobody has it" if reason is None else f"the cache could not help ({reason})"
            status = STATUS_WOULD_COMPILE if reason is None else STATUS_NO_CACHE
            self._end(f"{what} would be compiled: {why} (GRAPHSTASH_FAIL_ON_MISS)", status=status)
        if self._most and (spent := self._spent_in_run()) >= self._most:
            self._end_at_limit(spent, what)

    def begin(self, request: CompileRequest, reason: Reason | None) -> None:
        """As `check`; and until `compiled` or `ended` the time counts."""
        self.check(request, reason)
        if not self._most:
            return
        with self._changed:
            self._running[request.key] = monotonic()
            if self._watcher is None:
                watcher = threading.Thread(
                    target=self._watch, name="graphstash-compile-limit", daemon=True
                )
                with suppress(RuntimeError):  # no thread can be started: the next one may
                    watcher.start()
                    self._watcher = watcher
            self._changed.notify_all()

    def compiled(self, seconds: float) -> None:
        """A compilation has taken so long."""
        with self._changed:
            self._spent += seconds
            self._last_end = monotonic()
            if self._shared is not None and self._most:
                # One write of one line: several processes append.
                with suppress(OSError), self._shared.open("ab", buffering=0) as file:
                    file.write(f"{seconds:.3f}\n".encode())

    def ended(self, key: ArtifactKey) -> None:
        """Nothing is compiled under the key any more."""
        with self._changed:
            if self._running.pop(key, None) is not None:
                self._last_end = monotonic()
                self._changed.notify_all()

    def _watch(self) -> None:
        """Ends a job whose compilation does not end."""
        with self._changed:
            while True:
                if not self._running:
                    self._changed.wait()
                    continue
                # One may be part of another: what runs counts from the last one's end.
                since = max(min(self._running.values()), self._last_end)
                left = self._most - self._spent_in_run() - (monotonic() - since)
                if left <= 0:
                    break
                self._changed.wait(min(left, _LOOK_SECONDS))  # others of the run may add to it
        self._end_at_limit(self._most, "a compilation that has not ended")

    def _spent_in_run(self) -> float:
        """Of all processes of the run on this host that have said so."""
        if self._shared is not None:
            with suppress(OSError, ValueError):
                return max(self._spent, sum(map(float, self._shared.read_text("ascii").split())))
        return self._spent

    def _end_at_limit(self, spent: float, what: str) -> None:
        told = f"{what} comes after {spent:.0f} s of compiling, and the limit is {self._most:g} s"
        self._end(f"{told} (GRAPHSTASH_MAX_COMPILE_SECONDS)", status=STATUS_WOULD_COMPILE)

    def _name(self, request: CompileRequest) -> str:
        key = f"{request.key.kind} {request.key.fingerprint[:12]}"
        label = printable(request.label, most=_LABEL_CHARACTERS)
        return f"{label} ({key})" if label else key
