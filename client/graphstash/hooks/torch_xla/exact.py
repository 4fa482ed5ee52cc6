"""Exact mode: torch_xla's own look-up of a graph is where the artifact is fetched.

The gate announces every file that torch_xla misses in this process's private directory, whichever
way the step ran. Announced for the first time, a name is a graph about to be compiled: its
artifact is put there, or the compilation begins. Announced again while it is being compiled, it has
been compiled and is about to be written; when the file is closed it is published. A graph that
torch_xla has in memory is not looked up at all: a warm training loop never comes here.
"""

import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from graphstash._compile.cache import CompileCache, InFlightCompile
from graphstash.errors import CacheError, Reason
from graphstash.hooks.torch_xla.fingerprint import Fingerprints
from graphstash.hooks.torch_xla.gate import StatGate
from graphstash.hooks.torch_xla.written import WrittenFiles, publish_file

__all__ = ["ExactMode"]

_MAX_REJECTIONS = 2
"""After so many artifacts that the runtime could not load, and none that it could, fetching is a
waste of time: this runtime does not load executables back."""


@dataclass(slots=True)
class _Running:
    """A graph between its look-up and its finished file."""

    compilation: InFlightCompile
    announced: float
    seconds: float = 0.0


class ExactMode:
    """Serves the look-ups of one private cache directory.

    Args:
        cache: finds artifacts and publishes them.
        directory: torch_xla's persistent cache, used by this process alone.
        fingerprints: of this process.
        known_as: the name of the directory that torch_xla uses.
        library: the loaded `_XLAC` extension.

    Raises:
        GateUnavailable: look-ups cannot be intercepted on this host.
        OSError: the directory cannot be watched.
    """

    def __init__(
        self,
        cache: CompileCache,
        directory: Path,
        fingerprints: Fingerprints,
        *,
        known_as: Path,
        library: Path,
    ) -> None:
        self._cache = cache
        self._directory = directory
        self._fingerprints = fingerprints
        self._lock = threading.Lock()  # guards the fields below, between the two threads
        self._running: dict[str, _Running] = {}
        self._delivered: set[str] = set()
        self._loaded = 0
        self._rejected = 0
        self._give_ups = 0
        self._gate = StatGate(library, f"{known_as}/", self._answer)
        try:
            self._gate.open()
            self._written = WrittenFiles(directory, self._publish)
        except BaseException:
            self._gate.close()
            raise

    def close(self) -> None:
        """Publishes what is finished and leaves torch_xla as it was."""
        self._gate.close()
        self._written.close()
        self._count_give_ups()
        with self._lock:
            running, self._running = list(self._running.values()), {}
        for each in running:
            each.compilation.abandon()

    def after_fork(self, cache: CompileCache, directory: Path) -> None:
        """Goes on in a forked child, with threads, a cache and a directory of its own."""
        self._cache = cache
        self._directory = directory
        self._lock = threading.Lock()
        self._running.clear()
        self._delivered.clear()
        self._give_ups = 0
        self._gate.reopen_in_child()
        # The old watch is the parent's, on a descriptor that both hold: it is left alone.
        self._written = WrittenFiles(self._directory, self._publish)

    def _answer(self, path: str) -> None:
        """Runs while torch_xla holds the mutex of its cache; see `StatGate`."""
        name = Path(path).name
        now = monotonic()
        with self._lock:
            running = self._running.get(name)
            if running is not None:
                # Compiled, or compiled again after an error: the last stretch is what it took.
                running.seconds, running.announced = now - running.announced, now
                running.compilation.is_compiling = False
                return
            rejected = self._settle_deliveries(name)
            failed = [each for each in self._running.values() if each.compilation.is_compiling]
        for each in failed:
            # The compiler started another graph without having finished this one: the job caught
            # an error. (With several compiling threads it may only be slow; then another host may
            # compile it as well.)
            each.compilation.abandon()
        request = self._fingerprints.request(name)
        if why := self._fingerprints.unshared():
            self._cache.refuse(request, why)
            return
        if rejected:
            key = request.key
            self._cache.reject(key, f"torch_xla could not load {key}; it compiled instead")
            return
        if self._rejected >= _MAX_REJECTIONS and not self._loaded:
            return
        compilation = self._cache.fetch_or_start(request, self._directory / name)
        with self._lock:
            if compilation is None:
                self._delivered.add(name)
            else:
                self._running[name] = _Running(compilation, monotonic())

    def _settle_deliveries(self, name: str) -> bool:
        """Looks back at what was delivered: a new look-up means that it has been read by now.

        Returns:
            True when `name` itself was delivered: torch_xla misses it again because it could not
            load it, and removed it.
        """
        rejected = name in self._delivered
        self._rejected += rejected
        self._loaded += len(self._delivered) - rejected
        for delivered in self._delivered:
            # torch_xla keeps the loaded program in memory and asks again if it drops it.
            with suppress(OSError):
                (self._directory / delivered).unlink()
        self._delivered.clear()
        return rejected

    def _publish(self, name: str) -> None:
        with self._lock:
            running = self._running.pop(name, None)
        self._count_give_ups()
        if running is None:
            return  # rejected, or fetching was given up: nothing to publish
        publish_file(
            self._directory / name,
            running.compilation,
            compile_seconds=running.seconds or monotonic() - running.announced,
        )

    def _count_give_ups(self) -> None:
        for _ in range(self._gate.give_ups - self._give_ups):
            self._give_ups += 1
            self._cache.record_fallback(
                CacheError(Reason.GATE_TIMEOUT, "Python was busy; torch_xla did not wait for it")
            )
