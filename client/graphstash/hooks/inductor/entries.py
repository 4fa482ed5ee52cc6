"""Entries of torch's remote caches: FX graphs, AOTAutograd results and autotuning results.

torch asks by a key of its own and hands over JSON with a pickle inside. Both go through as they
are. What this adds:

* a lease, while an FX graph is compiled. An AOTAutograd entry gets none: it is put only after the
  backward was compiled, and a job that waited for it would wait for training steps of another.
* several entries under one key. Dynamic shapes make entries that differ in their guards, and torch
  asks its remote cache for one. When its guards do not fit, the next one is offered (`look_up`).
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
from graphstash.hooks.inductor.fingerprint import entry_request
from graphstash.hooks.inductor.key_info import KeyInfo
from graphstash.hooks.inductor.ranks import ranks
from graphstash_schema import ArtifactKey, ArtifactKind

__all__ = ["Entries", "offering_variants"]


_VARIANTS: Final = 4
"""Entries under one of torch's keys; what is compiled beyond them is not shared."""

_T = TypeVar("_T")


class _LookUp:
    """One look-up by torch, which may see several variants."""

    def __init__(self) -> None:
        self.variant = 0
        self.served: tuple[ArtifactKey, bytes] | None = None


class _Thread(threading.local):
    """What a thread is doing inside torch."""

    compiling = 0
    look_up: _LookUp | None = None
    traced_since: float | None = None
    traced_seconds = 0.0
    built_seconds = 0.0


class Entries:
    """Gets and puts for torch's remote caches; never raises, because a put that raises ends a job.

    `built_seconds` returns the time that this process has spent on C++ objects so far.

    Attributes:
        key_info: what is inside the keys that torch makes.
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
        self._free: dict[str, int | None] = {}  # by torch's key: where the next put goes

    def close(self) -> None:
        """Finds and publishes nothing from now on: torch may keep its objects that call this."""
        self._closed = True
        self._exchange.close()

    def backend(self, kind: ArtifactKind) -> RemoteCacheBackend[bytes]:
        """The backend of one of torch's remote caches."""
        return _Backend(self, kind)

    @property
    def is_compiling(self) -> bool:
        """Whether any thread is inside the compilation of a graph."""
        return self._compilations > 0

    @contextmanager
    def compilation(self) -> Iterator[None]:
        """The compilation of one graph, whatever its end: no lease of it is held afterwards."""
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
        """One look-up by torch: within it, every `get` offers the next variant."""
        before, self._thread.look_up = self._thread.look_up, _LookUp()
        try:
            yield self._thread.look_up
        finally:
            self._thread.look_up = before

    def get(self, kind: ArtifactKind, name: str) -> bytes | None:
        """What was put under torch's key `name`, or None."""
        return None if self._closed else self._guarded(lambda: self._get(kind, name))

    def put(self, kind: ArtifactKind, name: str, value: bytes) -> None:
        """Publishes a value in the background."""
        if not self._closed:
            self._guarded(lambda: self._put(kind, name, value))

    def did_not_fit(self, look_up: _LookUp) -> bool:
        """Torch did not take what it was served: True when there may be another variant."""
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
        if self.key_info.unshared(name):
            return
        if variant is None:  # it was served, or there are enough
            return
        self._exchange.put(
            self._request(kind, name, variant),
            value,
            compile_seconds=self._seconds(kind, value),
        )

    def _seconds(self, kind: ArtifactKind, value: bytes) -> float:
        """What making the value took, without what other artifacts account for.

        The time that torch notes in an FX graph includes its C++ objects; that in an AOTAutograd
        entry is the time of its FX graphs. The latter's own share is the tracing before the first
        of them was looked up.
        """
        if kind is ArtifactKind.AOT_AUTOGRAD:
            return self._thread.traced_seconds
        noted = json.loads(value)
        built = self._built_seconds() - self._thread.built_seconds
        if kind is ArtifactKind.INDUCTOR:
            return max(0.0, float(noted["time_taken_ms"]) / 1000 - built)
        return sum(
            float(one.get("time_taken_ms", 0)) / 1000
            for one in (noted, *noted.values())  # one kernel's, or those of a graph by file name
            if isinstance(one, dict)
        )

    def _check(self, look_up: _LookUp) -> None:
        """Whether what did not fit was an entry at all."""
        if look_up.served is None:
            return
        key, value = look_up.served
        try:
            pickle.loads(base64.b64decode(json.loads(value)["data"]))  # noqa: S301 - as torch has just done
        except Exception as error:  # noqa: BLE001 - a pickle raises what it likes
            self._exchange.reject(key, f"torch could not load {key}: {error!r}")

    def _guarded(self, work: Callable[[], _T]) -> _T | None:
        """The hook's outermost frame: none of our exceptions reaches a compilation."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - see above
            self._cache.record_fallback(error)
            return None


class _Backend(RemoteCacheBackend[bytes]):
    """The interface that torch expects."""

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
    """Wraps a look-up of torch: as long as it does not take what it is served, it looks again.

    torch evaluates an entry's guards with hints, not with symbols, so an entry that does not fit
    leaves no trace in the compilation.
    """

    def look_up(*args: Any, **kwargs: Any) -> Any:
        with entries.look_up() as one:
            while True:
                result = original(*args, **kwargs)
                if not is_miss(result) or not entries.did_not_fit(one):
                    return result

    return look_up
