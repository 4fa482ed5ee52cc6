"""Entries of torch's remote caches: FX graphs, AOTAutograd results and autotuning results.

torch's keys, and its values of JSON with a pickle inside, pass through unchanged. This module adds:

* a lease while an FX graph is compiled. An AOTAutograd entry takes no lease: torch puts the entry
  only after it compiled the backward, so a waiter would wait for training steps of another job.
* variants of an entry. With dynamic shapes, one key has entries with different guards, but torch
  asks for a single entry. If its guards do not fit, `offer_variants` offers the next one.
"""

import base64
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from time import monotonic
from typing import Any, Final, TypeVar

from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._inductor.codecache import BypassFxGraphCache
from torch._inductor.remote_cache import RemoteCacheBackend

from graphstash._compile.cache import CompileCache
from graphstash._compile.request import CompileRequest
from graphstash._compile.two_call import TwoCallCache
from graphstash.errors import CacheError, Reason
from graphstash.hooks.inductor.fingerprint import entry_request
from graphstash.hooks.inductor.key_info import KeyInfo, State, current_state, options_of_compilation
from graphstash.hooks.inductor.ranks import ranks
from graphstash_schema import ArtifactKey, ArtifactKind

__all__ = ["Entries", "offer_variants"]


_MAX_VARIANTS: Final = 4
"""Entries that are shared under one of torch's keys."""

_NOT_STORED: Final = (
    "torch stored no result of AOTAutograd: it does so when it has compiled the backward pass, "
    "unless its AOTAutograd cache refuses the graph"
)

_CHANGED_SETTINGS: Final = (
    "the program changes settings of torch between a forward pass and its backward pass. A "
    "backward graph from the cache was compiled with the settings of its forward pass; results of "
    "AOTAutograd are not shared from now on"
)

_T = TypeVar("_T")


class _LookUp:
    def __init__(self) -> None:
        self.variant = 0
        self.served: tuple[ArtifactKey, bytes] | None = None


class _ThreadState(threading.local):
    compiling = 0
    look_up: _LookUp | None = None
    traced_since: float | None = None
    traced_seconds = 0.0
    built_seconds = 0.0


class Entries:
    """Get and put for torch's remote caches. Never raises: an error in a put would end the job.

    `built_seconds` returns the seconds that this process has spent on C++ objects.
    """

    def __init__(self, cache: CompileCache, *, built_seconds: Callable[[], float]) -> None:
        self.key_info = KeyInfo()
        self._built_seconds = built_seconds
        self._closed = False
        self._changes_settings = False
        self.switch_cache(cache)

    def switch_cache(self, cache: CompileCache) -> None:
        """Switch to a forked child's own cache."""
        self._cache = cache
        self._exchange = TwoCallCache(cache)
        self._thread = _ThreadState()
        self._lock = threading.Lock()  # guards the count below
        self._compilations = 0
        self._free: dict[str, int | None] = {}  # by torch's key: the variant to put
        self._traced: dict[str, CompileRequest] = {}  # AOTAutograd's misses before their put

    def close(self) -> None:
        """Stop finding and publishing, although torch may keep objects that call this one.

        Record AOTAutograd's misses without a put as unshared: every job traces these graphs again.
        """
        self._closed = True
        self._exchange.close()
        traced, self._traced = self._traced, {}
        for request in traced.values():
            self._run_safely(partial(self._cache.note_unshared, request, _NOT_STORED))

    def backend(self, kind: ArtifactKind) -> RemoteCacheBackend[bytes]:
        """Return the backend of one of torch's remote caches."""
        return _Backend(self, kind)

    @property
    def is_compiling(self) -> bool:
        """Whether any thread compiles a graph."""
        return self._compilations > 0

    @contextmanager
    def compilation(self) -> Iterator[None]:
        """Enclose the compilation of a graph. The outermost one releases leases without a put."""
        self._thread.compiling += 1
        self._add_compilations(1)
        try:
            yield
        finally:
            self._thread.compiling -= 1
            self._add_compilations(-1)
            if not self._thread.compiling:
                self._run_safely(self._exchange.end)

    @contextmanager
    def look_up(self) -> Iterator[_LookUp]:
        """Enclose one look-up by torch. `try_next_variant` makes `get` ask for the next variant."""
        before, self._thread.look_up = self._thread.look_up, _LookUp()
        try:
            yield self._thread.look_up
        finally:
            self._thread.look_up = before

    def get(self, kind: ArtifactKind, name: str) -> bytes | None:
        """Return the value under torch's key `name`, or None."""
        return None if self._closed else self._run_safely(lambda: self._get(kind, name))

    def put(self, kind: ArtifactKind, name: str, value: bytes) -> None:
        """Publish a value in the background."""
        if not self._closed:
            self._run_safely(lambda: self._put(kind, name, value))

    def check_bypass(self, reason: str) -> None:
        """Apply the compile limit to an FX graph that torch does not cache. May end the job."""
        if (limit := self._cache.limit) is not None:
            request = self._request(ArtifactKind.INDUCTOR, reason, 0)
            self._run_safely(lambda: limit.check(request, Reason.UNSHAREABLE))

    def try_next_variant(self, look_up: _LookUp) -> bool:
        """Record that torch rejected an entry. Return whether to look up the next variant."""
        if look_up.served is None:
            return False
        self._run_safely(lambda: self._reject_if_damaged(look_up))
        look_up.served = None
        look_up.variant += 1
        return look_up.variant < _MAX_VARIANTS

    def reject_unloadable(self, look_up: _LookUp, error: Exception) -> bool:
        """Reject the entry that torch failed to load. False if torch failed without an entry, or if
        all ranks compile together: a rank that compiled alone would hang.
        """
        store = ranks()
        if look_up.served is None or (store is not None and store.compiles_together):
            return False
        key, _ = look_up.served
        self._run_safely(lambda: self._reject(key, error))
        return True

    def watch(self, graph: Any) -> None:
        """Report if settings have changed when a loaded backward graph runs for the first time.

        torch loads a backward graph with a result of AOTAutograd, before the forward pass. Without
        the result, torch would compile it at the first backward pass, with the settings then.
        """
        if not self._thread.compiling:
            self._run_safely(lambda: self._watch(graph))

    def _watch(self, graph: Any) -> None:
        if not graph.fx_kwargs.get("is_backward"):
            return
        run = graph.current_callable
        # Without the cache, torch would compile the backward graph with these options, even if the
        # program had changed the settings by then.
        options = options_of_compilation()
        loaded: State | None = self.key_info.state_of_key(options)

        @wraps(run)
        def run_checked(inputs: Any) -> Any:
            nonlocal loaded
            before, loaded = loaded, None
            if before is not None:
                self._run_safely(lambda: self._report_changed_settings(before, options))
            return run(inputs)

        graph.current_callable = run_checked

    def _report_changed_settings(self, loaded: State, options: frozenset[str]) -> None:
        if not self._closed and not current_state(options).equals(loaded):
            self._changes_settings = True
            self._cache.record_fallback(CacheError(Reason.UNSHAREABLE, _CHANGED_SETTINGS))

    def _get(self, kind: ArtifactKind, name: str) -> bytes | None:
        if why := self.key_info.why_unshared(name):
            self._cache.refuse(self._request(kind, name, 0), f"a graph is not shared: {why}")
            return None
        if kind is ArtifactKind.AOT_AUTOGRAD and self._changes_settings:
            self._cache.refuse(self._request(kind, name, 0), _CHANGED_SETTINGS)
            return None
        look_up = self._thread.look_up or _LookUp()
        if kind is ArtifactKind.AUTOTUNE:  # torch looks results up while it loads a graph
            look_up = _LookUp()
        request = self._request(kind, name, look_up.variant)
        # To load an AOTAutograd entry, torch looks up its FX graphs. This takes no lease, because
        # torch looks a missing graph up again before compiling it.
        lease = kind is ArtifactKind.INDUCTOR and self._thread.compiling > 0
        value = self._exchange.get(request, lease=lease, ranks=ranks())
        self._free[name] = look_up.variant if value is None else None
        if value is not None:
            look_up.served = (request.key, value)
        elif kind is ArtifactKind.AOT_AUTOGRAD:
            self._traced[name] = request
            self._thread.traced_since = monotonic()
        elif kind is ArtifactKind.INDUCTOR:
            self._thread.built_seconds = self._built_seconds()
            if self._thread.traced_since is not None:
                self._thread.traced_seconds = monotonic() - self._thread.traced_since
                self._thread.traced_since = None
        return value

    def _request(self, kind: ArtifactKind, name: str, variant: int) -> CompileRequest:
        details = partial(self.key_info.details, name)
        return entry_request(kind, name, variant=variant, details=details)

    def _add_compilations(self, number: int) -> None:
        with self._lock:
            self._compilations += number

    def _put(self, kind: ArtifactKind, name: str, value: bytes) -> None:
        variant = self._free.pop(name, 0)
        request = self._traced.pop(name, None)
        if self.key_info.why_unshared(name):
            return
        if kind is ArtifactKind.AOT_AUTOGRAD:  # the entry names its FX graphs by their keys
            entry = base64.b64decode(json.loads(value)["data"]).decode("latin-1")
            why = self.key_info.why_unshared(entry)
            if not why and not self.key_info.is_of_one_state(entry):
                why = "settings changed between its forward and its backward"
            if why:
                request = request or self._request(kind, name, 0)
                self._cache.note_unshared(request, f"an FX graph is not shared: {why}")
                return
        if variant is None:  # torch got an entry, or rejected all variants
            return
        self._exchange.put(
            self._request(kind, name, variant),
            value,
            compile_seconds=self._compile_seconds(kind, value),
        )

    def _compile_seconds(self, kind: ArtifactKind, value: bytes) -> float:
        """Return the seconds to make the value, without the seconds counted for other artifacts.

        The time in an FX graph's entry includes its C++ objects. The time in an AOTAutograd entry
        is the time of its FX graphs, so count only the tracing before their first look-up.
        """
        if kind is ArtifactKind.AOT_AUTOGRAD:
            return self._thread.traced_seconds
        stored = json.loads(value)
        built = self._built_seconds() - self._thread.built_seconds
        if kind is ArtifactKind.INDUCTOR:
            return max(0.0, float(stored["time_taken_ms"]) / 1000 - built)
        return sum(
            float(result.get("time_taken_ms", 0)) / 1000
            for result in (stored, *stored.values())  # one kernel's, or a graph's by file name
            if isinstance(result, dict)
        )

    def _reject_if_damaged(self, look_up: _LookUp) -> None:
        """Reject a damaged entry. A sound one only failed its guards."""
        if look_up.served is None:
            return
        key, value = look_up.served
        try:
            pickle.loads(base64.b64decode(json.loads(value)["data"]))  # noqa: S301 - as torch has just done
        except Exception as error:  # noqa: BLE001 - a pickle may raise any exception
            self._reject(key, error)

    def _reject(self, key: ArtifactKey, error: Exception) -> None:
        self._exchange.reject(key, f"torch could not load {key}: {error!r}")

    def _run_safely(self, work: Callable[[], _T]) -> _T | None:
        """Run `work` and record its exception: none reaches a compilation."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - see above
            self._cache.record_fallback(error)
            return None


class _Backend(RemoteCacheBackend[bytes]):
    def __init__(self, entries: Entries, kind: ArtifactKind) -> None:
        super().__init__()
        self._entries = entries
        self._kind = kind

    def _get(self, key: str) -> bytes | None:
        return self._entries.get(self._kind, key)

    def _put(self, key: str, data: bytes) -> None:
        self._entries.put(self._kind, key, data)


def offer_variants(
    original: Callable[..., Any],
    entries: Entries,
    *,
    is_miss: Callable[[Any], bool],
    make_miss: Callable[[], Any],
    on_hit: Callable[[Any], None] = lambda _: None,
) -> Callable[..., Any]:
    """Wrap a look-up of torch: repeat it while torch rejects the offered variant.

    torch evaluates guards on hints, not symbols, so a rejected entry leaves no trace. If torch
    fails to load an entry, `make_miss` returns the miss that makes torch compile.
    """

    def look_up(*args: Any, **kwargs: Any) -> Any:
        with entries.look_up() as current:
            while True:
                try:
                    result = original(*args, **kwargs)
                except (BypassFxGraphCache, BypassAOTAutogradCache):  # torch compiles
                    raise
                except Exception as error:
                    if not entries.reject_unloadable(current, error):
                        raise
                    return make_miss()
                if not is_miss(result):
                    on_hit(result)
                    return result
                if not entries.try_next_variant(current):
                    return result

    return look_up
