"""Hint mode: where torch_xla's look-ups cannot be caught, its files are predicted.

A dynamo graph announces itself: `_get_graph_hash` before `_xla_warm_up_cache` is the file's name.
A lazy step does not: its name mixes in buffer donors that no binding shows. There the StableHLO
of everything pending is hashed into a hint, and a small artifact under the hint says which files
the earlier run compiled. A wrong hint costs bandwidth, never correctness, because torch_xla still
looks the name up itself. The lease on the hint keeps a herd from compiling the same step.

Lowering the pending graph costs 0.1 to 0.8 s, so it is done only until the loop has settled: after
a few steps without a new graph, a step costs one `stat` of the directory, about 2 microseconds.
(torch_xla's counters would tell as well, but extracting a dynamo graph clears them.)
"""

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Final

import torch_xla

from graphstash._compile import Compilation, CompileCache
from graphstash._errors import CacheError, Reason
from graphstash._stats import Counters
from graphstash.hooks.torch_xla.fingerprint import Fingerprints

__all__ = ["HintMode"]

_log = logging.getLogger("graphstash")

_LAZY_SEAMS: Final = ("_xla_sync_multi", "_xla_step_marker")
_DYNAMO_SEAM: Final = "_xla_warm_up_cache"

_SETTLED_STEPS: Final = 3
"""So many steps without a new graph end the predictions, until a new graph appears."""


class HintMode:
    """Wraps the three calls that compile; serves one private cache directory.

    Args:
        cache: finds artifacts and publishes them.
        directory: torch_xla's persistent cache, used by this process alone.
    """

    def __init__(self, cache: CompileCache, directory: Path) -> None:
        self._directory = directory
        self._fingerprints = Fingerprints()
        self._known: set[str] = set()
        self._quiet_steps = 0
        self._originals: dict[str, Callable[..., Any]] = {}
        self._use(cache)
        for name in _LAZY_SEAMS:
            self._wrap(name, self._around_lazy)
        self._wrap(_DYNAMO_SEAM, self._around_dynamo)

    def close(self) -> None:
        """Puts the original calls back."""
        for name, original in self._originals.items():
            setattr(torch_xla._XLAC, name, original)
        self._fingerprints.close()

    def after_fork(self, cache: CompileCache) -> None:
        """Goes on in a forked child with a cache of its own."""
        self._use(cache)

    def _use(self, cache: CompileCache) -> None:
        self._cache = cache
        # Finding a hint is neither a hit nor a miss: those are counted per compiled graph.
        self._hints = CompileCache(
            cache.stash, counters=_FallbacksOnly(cache.counters), publisher=cache.publisher
        )

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        original = getattr(torch_xla._XLAC, name)
        self._originals[name] = original

        def seam(*args: Any, **kwargs: Any) -> Any:
            return around(lambda: original(*args, **kwargs), args)

        setattr(torch_xla._XLAC, name, seam)

    def _around_dynamo(self, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """The name is known exactly before the compile."""
        try:
            raw = torch_xla._XLAC._get_graph_hash(list(args[0]))
        except RuntimeError:  # not all inputs are on the device: torch_xla will say so itself
            return call()
        name = str(int.from_bytes(raw, "little"))
        if name in self._known:
            return call()
        compilation = self._cache.find_or_begin(
            self._fingerprints.key(name), self._directory / name
        )
        self._known.add(name)
        started = monotonic()
        try:
            return call()
        finally:
            if compilation is not None:
                self._publish(name, compilation, monotonic() - started)

    def _around_lazy(self, call: Callable[[], Any], _args: tuple[Any, ...]) -> Any:
        fetched, hint = self._begin() if self._quiet_steps < _SETTLED_STEPS else (0, None)
        before = self._changed_at()
        started = monotonic()
        try:
            return call()
        finally:
            seconds = monotonic() - started
            new = self._new_names() if self._changed_at() != before else []
            self._quiet_steps = 0 if new or fetched else self._quiet_steps + 1
            self._publish_new(new, hint, seconds)

    def _begin(self) -> tuple[int, Compilation | None]:
        """Fetches what the hint names, or begins to find out what it should name.

        Returns:
            How many graphs were fetched, and the hint's compilation when nobody has one.
        """
        try:
            pending = torch_xla._XLAC._get_stablehlo([], "", [], True)
        except RuntimeError:
            return 0, None
        text = pending if isinstance(pending, bytes) else str(pending).encode()
        key = self._fingerprints.key("hint-" + hashlib.sha256(text).hexdigest())
        with tempfile.TemporaryDirectory(prefix="graphstash-") as directory:
            payload = Path(directory) / "names"
            compilation = self._hints.find_or_begin(key, payload)
            if compilation is not None:
                return 0, compilation
            names = _read_names(payload)
        fetched = 0
        for name in names:
            if name not in self._known:
                graph = self._cache.find_or_begin(
                    self._fingerprints.key(name), self._directory / name
                )
                if graph is not None:
                    graph.abandon()  # nobody waits for it: the hint's lease is what a herd takes
                else:
                    self._known.add(name)
                    fetched += 1
        return fetched, None

    def _publish_new(self, new: list[str], hint: Compilation | None, seconds: float) -> None:
        for name in new:
            self._known.add(name)
            self._cache.counters.add(misses=1)
            self._publish(name, Compilation(self._cache, self._fingerprints.key(name)), seconds)
        if hint is not None and new:
            self._publish_hint(hint, new)
        elif hint is not None:
            hint.abandon()

    def _changed_at(self) -> int:
        """Moves when a file was made or removed in the directory."""
        return self._directory.stat().st_mtime_ns

    def _new_names(self) -> list[str]:
        return [path.name for path in self._directory.iterdir() if path.name not in self._known]

    def _publish(self, name: str, compilation: Compilation, seconds: float) -> None:
        path = self._directory / name
        if not path.exists() or path.stat().st_size == 0:
            compilation.abandon()
            return
        compilation.publish(
            path,
            compile_seconds=seconds,
            parts=self._fingerprints.parts(name),
            toolchain=self._fingerprints.toolchain(),
            done=lambda: path.unlink(missing_ok=True),
        )

    def _publish_hint(self, hint: Compilation, names: list[str]) -> None:
        try:
            with tempfile.NamedTemporaryFile(prefix="graphstash-", delete=False) as file:
                path = Path(file.name)
                file.write(json.dumps(names).encode())
        except OSError as error:
            self._cache.trouble(CacheError(Reason.LOCAL_IO, str(error)))
            hint.abandon()
            return
        # Uploads keep their order: whoever finds the hint finds what it names.
        hint.publish(
            path,
            compile_seconds=0.0,
            parts={"hint": hint.key.fingerprint},
            toolchain=self._fingerprints.toolchain(),
            done=lambda: path.unlink(missing_ok=True),
        )


class _FallbacksOnly(Counters):
    """Passes fallbacks on and counts nothing else."""

    def __init__(self, main: Counters) -> None:
        super().__init__()
        self._main = main

    def add(self, **_amounts: float) -> None:
        """Counts nothing."""

    def fallback(self, reason: Reason) -> bool:
        return self._main.fallback(reason)


def _read_names(payload: Path) -> list[str]:
    with suppress(ValueError):
        names = json.loads(payload.read_bytes())
        if isinstance(names, list):
            return [name for name in names if isinstance(name, str) and name.isdigit()]
    return []
