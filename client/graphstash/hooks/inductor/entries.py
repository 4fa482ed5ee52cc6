"""Entries of torch's remote caches: FX graphs, AOTAutograd results and autotuning results.

torch asks by its own key and passes JSON with a pickle inside. Both pass through unchanged. This
module adds:

* a lease while an FX graph is compiled. An AOTAutograd entry takes no lease: torch puts the entry
  only after it compiled the backward, so a waiter would wait for training steps of another job.
* several entries under one key. With dynamic shapes, entries differ in their guards, and torch asks
  its remote cache for one entry. If its guards do not fit, `look_up` offers the next entry.
"""

import base64
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any, Final, TypeVar

from torch._inductor.remote_cache import RemoteCacheBackend

from graphstash._compile.cache import CompileCache
from graphstash._compile.request import CompileRequest
from graphstash._compile.two_call import TwoCallCache
from graphstash.errors import Reason
from graphstash.hooks.inductor.fingerprint import entry_request
from graphstash.hooks.inductor.key_info import KeyInfo
from graphstash.hooks.inductor.ranks import ranks
from graphstash_schema import ArtifactKey, ArtifactKind

__all__ = ["Entries", "offering_variants"]


_VARIANTS: Final = 4
"""Limit of entries under one of torch's keys. Further entries are not shared."""

_NOT_STORED: Final = (
    "torch stored no result of AOTAutograd: it does so when it has compiled the backward pass, "
    "unless its AOTAutograd cache refuses the graph"
)

_T = TypeVar("_T")


class _LookUp:
    """One look-up by torch, which may be offered several variants."""

    def __init__(self) -> None:
        self.variant = 0
        self.served: tuple[ArtifactKey, bytes] | None = None


class _Thread(threading.local):
    """State of a thread inside torch."""

    compiling = 0
    look_up: _LookUp | None = None
    traced_since: float | None = None
    traced_seconds = 0.0
    built_seconds = 0.0


class Entries:
    """Get and put for torch's remote caches. Never raises, because an error in a put ends the job.

    `built_seconds` returns the seconds that this process has spent on C++ objects.

    Attributes:
        key_info: contents of torch's keys.
    """

    def __init__(self, cache: CompileCache, *, built_seconds: Callable[[], float]) -> None:
        self.key_info = KeyInfo()
        self._built_seconds = built_seconds
        self._closed = False
        self.use(cache)

    def use(self, cache: CompileCache) -> None:
        """Switches to another cache: a forked child has its own."""
        self._cache = cache
        self._exchange = TwoCallCache(cache)
        self._thread = _Thread()
        self._lock = threading.Lock()  # guards the count below
        self._compilations = 0
        self._free: dict[str, int | None] = {}  # by torch's key: number of the next put
        self._traced: dict[str, CompileRequest] = {}  # by torch's key: misses without a put

    def close(self) -> None:
        """Stop finding and publishing. torch may keep objects that call this one.

        Count each graph whose tracing torch has not stored: every job traces the graph again.
        """
        self._closed = True
        self._exchange.close()
        traced, self._traced = self._traced, {}
        for request in traced.values():
            self._guarded(partial(self._cache.note_unshared, request, _NOT_STORED))

    def backend(self, kind: ArtifactKind) -> RemoteCacheBackend[bytes]:
        """Return the backend of one of torch's remote caches."""
        return _Backend(self, kind)

    @property
    def is_compiling(self) -> bool:
        """Return whether any thread compiles a graph."""
        return self._compilations > 0

    @contextmanager
    def compilation(self) -> Iterator[None]:
        """Enclose the compilation of one graph. Its lease ends here, even if the call fails."""
        self._thread.compiling += 1
        self._count(1)
        try:
            yield
        finally:
            self._thread.compiling -= 1
            self._count(-1)
            if not self._thread.compiling:
                self._guarded(self._exchange.end)

    @contextmanager
    def look_up(self) -> Iterator[_LookUp]:
        """Enclose one look-up by torch. Each `get` within it offers the next variant."""
        before, self._thread.look_up = self._thread.look_up, _LookUp()
        try:
            yield self._thread.look_up
        finally:
            self._thread.look_up = before

    def get(self, kind: ArtifactKind, name: str) -> bytes | None:
        """Return the value under torch's key `name`, or None."""
        return None if self._closed else self._guarded(lambda: self._get(kind, name))

    def put(self, kind: ArtifactKind, name: str, value: bytes) -> None:
        """Publish a value in the background."""
        if not self._closed:
            self._guarded(lambda: self._put(kind, name, value))

    def check_bypass(self, reason: str) -> None:
        """End the job if torch compiles an FX graph without a look-up, and the settings say so."""
        if (limit := self._cache.limit) is not None:
            request = self._request(ArtifactKind.INDUCTOR, reason, 0)
            self._guarded(lambda: limit.check(request, Reason.UNSHAREABLE))

    def did_not_fit(self, look_up: _LookUp) -> bool:
        """Record that torch rejected an entry. Return True if there may be another variant."""
        if look_up.served is None:
            return False
        self._guarded(lambda: self._check(look_up))
        look_up.served = None
        look_up.variant += 1
        return look_up.variant < _VARIANTS

    def _get(self, kind: ArtifactKind, name: str) -> bytes | None:
        if why := self.key_info.unshared(name):
            self._cache.refuse(self._request(kind, name, 0), f"a graph is not shared: {why}")
            return None
        look_up = self._thread.look_up or _LookUp()
        request = self._request(kind, name, look_up.variant)
        # A look-up on behalf of an AOTAutograd entry takes none: torch looks again before it
        # compiles the graph.
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

    def _count(self, number: int) -> None:
        with self._lock:
            self._compilations += number

    def _put(self, kind: ArtifactKind, name: str, value: bytes) -> None:
        variant = self._free.pop(name, 0)
        request = self._traced.pop(name, None)
        if self.key_info.unshared(name):
            return
        if kind is ArtifactKind.AOT_AUTOGRAD:  # the entry names its FX graphs by their keys
            entry = base64.b64decode(json.loads(value)["data"]).decode("latin-1")
            if why := self.key_info.unshared(entry):
                request = request or self._request(kind, name, 0)
                self._cache.note_unshared(request, f"an FX graph is not shared: {why}")
                return
        if variant is None:  # an entry was served, or the limit is reached
            return
        self._exchange.put(
            self._request(kind, name, variant),
            value,
            compile_seconds=self._seconds(kind, value),
        )

    def _seconds(self, kind: ArtifactKind, value: bytes) -> float:
        """Return the seconds to make the value, without those counted for other artifacts.

        torch's time in an FX graph includes its C++ objects, and its time in an AOTAutograd entry
        is that of its FX graphs. An AOTAutograd entry itself took the tracing before the first
        look-up of its FX graphs.
        """
        if kind is ArtifactKind.AOT_AUTOGRAD:
            return self._thread.traced_seconds
        noted = json.loads(value)
        built = self._built_seconds() - self._thread.built_seconds
        if kind is ArtifactKind.INDUCTOR:
            return max(0.0, float(noted["time_taken_ms"]) / 1000 - built)
        return sum(
            float(one.get("time_taken_ms", 0)) / 1000
            for one in (noted, *noted.values())  # of one kernel, or of a graph by file name
            if isinstance(one, dict)
        )

    def _check(self, look_up: _LookUp) -> None:
        """Reject an unusable entry if torch could not load it at all."""
        if look_up.served is None:
            return
        key, value = look_up.served
        try:
            pickle.loads(base64.b64decode(json.loads(value)["data"]))  # noqa: S301 - as torch has just done
        except Exception as error:  # noqa: BLE001 - a pickle may raise any exception
            self._exchange.reject(key, f"torch could not load {key}: {error!r}")

    def _guarded(self, work: Callable[[], _T]) -> _T | None:
        """Run `work` in the hook's outermost frame. No exception reaches a compilation."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - see above
            self._cache.record_fallback(error)
            return None


class _Backend(RemoteCacheBackend[bytes]):
    """A backend with the interface that torch expects."""

    def __init__(self, entries: Entries, kind: ArtifactKind) -> None:
        super().__init__()
        self._entries = entries
        self._kind = kind

    def _get(self, key: str) -> bytes | None:
        return self._entries.get(self._kind, key)

    def _put(self, key: str, data: bytes) -> None:
        self._entries.put(self._kind, key, data)


def offering_variants(
    original: Callable[..., Any], entries: Entries, *, is_miss: Callable[[Any], bool]
) -> Callable[..., Any]:
    """Wrap a look-up of torch: repeat it while torch rejects the offered entry.

    torch evaluates guards with hints instead of symbols, so a rejected entry leaves no trace in the
    compilation.
    """

    def look_up(*args: Any, **kwargs: Any) -> Any:
        with entries.look_up() as one:
            while True:
                result = original(*args, **kwargs)
                if not is_miss(result) or not entries.did_not_fit(one):
                    return result

    return look_up
