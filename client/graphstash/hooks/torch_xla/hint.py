"""Hint mode: predict torch_xla's files on hosts where its look-ups cannot be intercepted.

For a dynamo graph, `_get_graph_hash` returns the file's name before `_xla_warm_up_cache` compiles
the graph. The name of a lazy step depends on buffer donors, which no Python binding exposes. For a
lazy step, the hook hashes the StableHLO of all pending operations. The hash names a hint: a small
artifact that lists the files that an earlier run compiled. A wrong hint costs bandwidth but never
correctness, because torch_xla still looks up the exact name. The lease on the hint prevents many
jobs from compiling the same step at once.

Lowering the pending operations takes 0.1 to 0.8 s, so the hook stops predicting after a few steps
without a new graph. Then each step only calls `stat` on the directory, in about 2 microseconds.
(torch_xla's counters do not work here: extracting a dynamo graph clears them.)
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final

import torch_xla

from graphstash._compile.cache import CompileCache, InFlightCompile
from graphstash._compile.request import CompileRequest
from graphstash._compile.stats import Counters
from graphstash.errors import Reason
from graphstash.hooks.patching import Patches
from graphstash.hooks.torch_xla.fingerprint import Fingerprints
from graphstash.hooks.torch_xla.written import publish_file

__all__ = ["HintMode"]


_LAZY_SEAMS: Final = ("_xla_sync_multi", "_xla_step_marker")
_DYNAMO_SEAM: Final = "_xla_warm_up_cache"

_MAX_NAMES: Final = 1000
"""Maximum number of graphs that a hint fetches. A step has a few, and each costs a look-up."""

_SETTLED_STEPS: Final = 3
"""Number of steps without a new graph after which the hook predicts nothing until the next one."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """State that a wrapper carries from before a compiling call to after it."""

    compilation: InFlightCompile | None
    name: str = ""
    changed_at: int = 0
    snapshot: object = None


class HintMode:
    """Wraps the three functions that compile, and serves one private cache directory."""

    def __init__(self, cache: CompileCache, directory: Path, fingerprints: Fingerprints) -> None:
        self._directory = directory
        self._fingerprints = fingerprints
        self._known: set[str] = set()  # graphs that this process has fetched or compiled
        self._asked: set[str] = set()  # hints that this process has looked up
        self._quiet_steps = 0
        self._patches = Patches()
        self._switch_cache(cache)
        with self._patches.all_or_none():
            for name in _LAZY_SEAMS:
                self._wrap(name, self._before_lazy, self._after_lazy)
            self._wrap(_DYNAMO_SEAM, self._before_dynamo, self._after_dynamo)

    def close(self) -> None:
        """Restore the original functions, and abandon unfinished hints."""
        self._patches.undo()
        self._hints.abandon_unfinished()  # does not drain uploads; the session does so later

    def after_fork(self, cache: CompileCache, directory: Path) -> None:
        """Continue in a forked child, with the child's cache and directory."""
        self._directory = directory
        self._switch_cache(cache)

    def _switch_cache(self, cache: CompileCache) -> None:
        self._cache = cache
        # Hits and misses count compiled graphs, so the look-up of a hint counts as neither.
        self._hints = CompileCache(
            cache.stash, counters=_FallbacksOnly(cache.counters), publisher=cache.publisher
        )
        self._hints.waits = cache.waits  # a job has one budget

    def _wrap(
        self,
        name: str,
        before: Callable[[tuple[Any, ...]], _Pending | None],
        after: Callable[[_Pending, float], None],
    ) -> None:
        original = getattr(torch_xla._XLAC, name)

        def seam(*args: Any, **kwargs: Any) -> Any:
            pending = self._run_safely(before, args)
            started = monotonic()
            try:
                return original(*args, **kwargs)
            finally:
                if pending is not None:
                    self._run_safely(after, pending, monotonic() - started)

        self._patches.replace(torch_xla._XLAC, name, seam)

    def _run_safely(self, work: Callable[..., _Pending | None], *args: Any) -> _Pending | None:
        """Run `work`. Count its exceptions as fallbacks, because none may reach a training step."""
        try:
            return work(*args)
        except Exception as error:  # noqa: BLE001 - see above
            self._cache.record_fallback(error)
            return None

    def _before_dynamo(self, args: tuple[Any, ...]) -> _Pending | None:
        """Fetch the graph by its exact name, or begin its compilation."""
        try:
            raw = torch_xla._XLAC._get_graph_hash(list(args[0]))
        except RuntimeError:  # some inputs are not on the device; torch_xla raises its own error
            return None
        name = str(int.from_bytes(raw, "little"))
        if name in self._known:
            return None
        self._known.add(name)
        request = self._request_or_refuse(name)
        if request is None:
            return None
        compilation = self._cache.fetch_or_start(request, self._directory / name)
        if compilation is None:
            return None
        with _abandon_on_error(compilation):
            return _Pending(compilation, name=name, snapshot=self._fingerprints.snapshot())

    def _after_dynamo(self, pending: _Pending, seconds: float) -> None:
        if (compilation := pending.compilation) is None:
            return
        with _abandon_on_error(compilation):
            if self._has_changed_since(pending, compilation.request):
                compilation.abandon()
                return
        self._publish(pending.name, compilation, seconds)

    def _before_lazy(self, _args: tuple[Any, ...]) -> _Pending:
        may_predict = self._quiet_steps < _SETTLED_STEPS and not self._fingerprints.why_unshared()
        hint = self._fetch_hinted() if may_predict else None
        with _abandon_on_error(hint):
            snapshot = self._fingerprints.snapshot()
            return _Pending(hint, changed_at=self._changed_at(), snapshot=snapshot)

    def _after_lazy(self, pending: _Pending, seconds: float) -> None:
        with _abandon_on_error(pending.compilation):
            new = self._new_names() if self._changed_at() != pending.changed_at else []
            for name in new:
                self._known.add(name)
                self._quiet_steps = 0
                request = self._request_or_refuse(name)
                if request is not None and not self._has_changed_since(pending, request):
                    self._cache.counters.count_miss(request.key)
                    self._publish(name, self._cache.begin(request), seconds)
        self._quiet_steps += 1
        if pending.compilation is not None and new:
            # The publisher keeps the order of uploads: a job that finds the hint finds its files.
            pending.compilation.publish_bytes(json.dumps(new).encode(), compile_seconds=0.0)
        elif pending.compilation is not None:
            pending.compilation.abandon()

    def _fetch_hinted(self) -> InFlightCompile | None:
        """Fetch the files that the hint lists. If there is no hint, return one to publish."""
        program = torch_xla._XLAC._get_stablehlo([], "", [], True)
        text = program if isinstance(program, bytes) else str(program).encode()
        hint = "hint-" + hashlib.sha256(text).hexdigest()
        if hint in self._asked:
            return None  # a repeated step: its graphs are in memory, or their upload is running
        self._asked.add(hint)
        found = self._hints.fetch_bytes_or_start(self._fingerprints.request(hint))
        if isinstance(found, InFlightCompile):
            return found
        for name in _parse_names(found):
            if name not in self._known and self._cache.try_fetch(
                self._fingerprints.request(name).key, self._directory / name
            ):
                self._known.add(name)
                self._quiet_steps = 0
        return None

    def _request_or_refuse(self, name: str) -> CompileRequest | None:
        """Return the request for a graph, or count a refusal and return None if it is unshared."""
        request = self._fingerprints.request(name)
        if reason := self._fingerprints.why_unshared():
            self._cache.refuse(request, reason)
            return None
        return request

    def _has_changed_since(self, pending: _Pending, request: CompileRequest) -> bool:
        """Return whether the compiler may have read other values than the key contains."""
        has_changed = self._fingerprints.snapshot(observe=True) != pending.snapshot
        if has_changed:
            why = "a graph is not shared: its key changed while torch_xla compiled it"
            self._cache.note_unshared(request, why)
        return has_changed

    def _changed_at(self) -> int:
        """Return the directory's mtime in ns, which changes when a file is created or removed."""
        return self._directory.stat().st_mtime_ns

    def _new_names(self) -> list[str]:
        return [path.name for path in self._directory.iterdir() if path.name not in self._known]

    def _publish(self, name: str, compilation: InFlightCompile, seconds: float) -> None:
        path = self._directory / name
        publish_file(path, compilation, compile_seconds=seconds)


@contextmanager
def _abandon_on_error(hint: InFlightCompile | None) -> Iterator[None]:
    """Abandon a hint if the block raises. Otherwise its lease would be renewed for a long time."""
    try:
        yield
    except BaseException:
        if hint is not None:
            hint.abandon()
        raise


class _FallbacksOnly(Counters):
    """Forwards fallbacks to the main counters, and discards all other counts."""

    def __init__(self, main: Counters) -> None:
        super().__init__()
        self._main = main

    def count_fallback(self, reason: Reason) -> bool:
        return self._main.count_fallback(reason)


def _parse_names(payload: bytes) -> list[str]:
    with suppress(ValueError, RecursionError):
        names = json.loads(payload)
        if isinstance(names, list):
            named = [name for name in names if isinstance(name, str) and name.isdigit()]
            return named[:_MAX_NAMES]
    return []
