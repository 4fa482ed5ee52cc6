"""Exact mode: fetch the artifact of a graph when torch_xla looks the graph up.

The gate reports every file that torch_xla does not find in the private directory. At the first
report of a name, torch_xla is about to compile the graph. The hook fetches its artifact into the
directory, or records that a compilation begins. At the second report, torch_xla has compiled the
graph and is about to write the file. When torch_xla closes the file, the hook publishes it. A warm
loop has its graphs in memory and causes no reports.
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
from graphstash.hooks.torch_xla.written import WrittenFileWatcher, publish_file

__all__ = ["ExactMode"]

_MAX_REJECTIONS = 2
"""Failed loads, before any successful one, after which fetching stops. Such a runtime cannot load
executables."""


@dataclass(slots=True)
class _Running:
    """A graph between the first report of its name and its finished file."""

    compilation: InFlightCompile
    announced: float  # monotonic time of the last report
    seconds: float = 0.0  # compile time
    is_current: bool = True  # whether the key is the same as at the look-up


class ExactMode:
    """Serves the look-ups of one private cache directory.

    Args:
        known_as: Path by which torch_xla opens the directory.
        library: Path of the loaded `_XLAC` extension.

    Raises:
        GateUnavailable: The gate cannot intercept look-ups in this process.
        OSError: The kernel cannot watch the directory.
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
        self._lock = threading.Lock()  # guards the fields below: two threads run the callbacks
        self._running: dict[str, _Running] = {}
        self._delivered: set[str] = set()
        self._loaded = 0
        self._rejected = 0
        self._give_ups = 0
        self._gate = StatGate(library, f"{known_as}/", self._handle_report)
        try:
            self._gate.open()
            self._watcher = WrittenFileWatcher(directory, self._publish)
        except BaseException:
            self._gate.close()
            raise

    def close(self) -> None:
        """Publish the finished graphs, close the gate and abandon unfinished compilations."""
        self._gate.close()
        self._watcher.close()
        self._count_give_ups()
        with self._lock:
            running, self._running = list(self._running.values()), {}
        for each in running:
            each.compilation.abandon()

    def after_fork(self, cache: CompileCache, directory: Path) -> None:
        """Continue in a forked child, with the child's cache, directory and new threads."""
        self._cache = cache
        self._directory = directory
        self._lock = threading.Lock()
        self._running.clear()
        self._delivered.clear()
        self._give_ups = 0
        self._gate.reopen_in_child()
        self._watcher.close_in_child()
        self._watcher = WrittenFileWatcher(self._directory, self._publish)

    def _handle_report(self, path: str) -> None:
        """Handle a report of the gate, while torch_xla holds the mutex of its cache."""
        name = Path(path).name
        now = monotonic()
        with self._lock:
            running = self._running.get(name)
            if running is not None:
                # torch_xla has compiled the graph, or compiles it again after an error. Either way,
                # the time since the last report is the best measure of the compile time.
                running.seconds, running.announced = now - running.announced, now
                running.compilation.is_compiling = False
            else:
                rejected = self._settle_deliveries(name)
                failed = [each for each in self._running.values() if each.compilation.is_compiling]
        if running is not None:
            # XLA reads files and variables after the look-up.
            running.is_current &= self._fingerprints.request(name).key == running.compilation.key
            return
        for each in failed:
            # torch_xla starts another graph before it has finished this one: the job probably
            # caught a compile error. If another thread still compiles this graph, another host may
            # now also compile it.
            each.compilation.abandon()
        request = self._fingerprints.request(name)
        if why := self._fingerprints.why_unshared():
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
        """Count delivered artifacts as loaded, but `name` as rejected. Return whether it was one.

        At a new look-up, torch_xla has read all of them. It looks a delivered name up again because
        it could not load the artifact, and has removed it.
        """
        rejected = name in self._delivered
        self._rejected += rejected
        self._loaded += len(self._delivered) - rejected
        for delivered in self._delivered:
            # torch_xla has the program in memory. If it drops the program, it looks up the name.
            with suppress(OSError):
                (self._directory / delivered).unlink()
        self._delivered.clear()
        return rejected

    def _publish(self, name: str) -> None:
        with self._lock:
            running = self._running.pop(name, None)
        self._count_give_ups()
        if running is None:
            return  # a graph whose artifact was rejected, or that was not fetched
        if not running.is_current:
            why = "a graph is not shared: its key changed while torch_xla compiled it"
            self._cache.note_unshared(running.compilation.request, why)
            running.compilation.abandon()
            return
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
