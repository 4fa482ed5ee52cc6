"""TwoCallCache: for compilers that look up and store a result in separate calls.

    get(key)   return the bytes, or None: the compiler compiles, perhaps under a lease
    put(key)   store the result in the background
    end()      abandon the compilations that this thread began and did not put

An error of the cache never raises, and every wait has a bound. All ranks of a distributed job get
the same answer for a key, see `RankCoordinator`.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from graphstash._compile.cache import CompileCache
from graphstash._compile.ranks import CompileTurn, CompileTurns, RankStore, no_op
from graphstash._compile.request import CompileRequest
from graphstash.errors import Reason
from graphstash_schema import ArtifactKey

__all__ = ["TwoCallCache"]


@dataclass(frozen=True, slots=True)
class _OpenTurn:
    turn: CompileTurn
    thread: int
    started: float


class TwoCallCache:
    """Gets and puts payloads in memory. Thread-safe; one instance per hook and process."""

    def __init__(self, cache: CompileCache) -> None:
        self._cache = cache
        self._turns = CompileTurns(cache)
        self._lock = threading.Lock()  # guards the table below
        self._begun: dict[ArtifactKey, _OpenTurn] = {}

    def get(
        self, request: CompileRequest, *, lease: bool = True, ranks: RankStore | None = None
    ) -> bytes | None:
        """Return the verified payload. None: the caller compiles, and calls `put` or `end`.

        Args:
            request: Request for the artifact.
            lease: Whether to request a lease, and to wait while another job holds it. Must be False
                if this job does other work before `put`, such as a training step: a waiting job
                would wait for that work.
            ranks: Store of the ranks that compile the same artifact, or None for a single process.
        """
        key = request.key
        answer = self._turns.ask(request, lambda: ranks, lease=lease)
        if isinstance(answer, bytes):
            return answer
        if answer.compilation is None and self._cache.limit is not None:
            self._cache.limit.check(request, Reason.RANKS)  # the leader's result did not arrive
        begun = _OpenTurn(answer, threading.get_ident(), monotonic())
        with self._lock:
            given_up = self._begun.get(key)
            if given_up is None or given_up.thread == begun.thread:  # equal: its compiler failed
                self._begun[key] = begun
            else:  # another thread compiles this key: the first `put` of either uses its turn
                given_up = begun
        if given_up is not None:
            self._give_up(given_up)
        return None

    def put(
        self,
        request: CompileRequest,
        payload: bytes,
        *,
        compile_seconds: float | None = None,
    ) -> None:
        """Publish the compiler's result in the background. Compiling took the time since `get`, if
        `compile_seconds` is not given.
        """
        with self._lock:
            looked_up = self._begun.pop(request.key, None)
        begun = looked_up
        if begun is None:  # a `put` without a `get`, or a second `put`
            begun = _OpenTurn(CompileTurn(self._cache.begin(request), no_op), 0, monotonic())
        seconds = monotonic() - begun.started if compile_seconds is None else compile_seconds
        compilation = begun.turn.compilation
        try:
            self._turns.announce(begun.turn, payload)
        except BaseException:  # interrupted: no other process should wait for this one
            if compilation is not None:
                compilation.abandon()
            raise
        if compilation is not None:
            if request.is_optional and looked_up and compilation.fallback_reason is None:
                self._cache.note_optional_miss(request)
            compilation.publish_bytes(payload, compile_seconds=seconds)

    def wants(self, key: ArtifactKey) -> bool:
        """Return whether a `put` of the key is useful; False if another rank publishes it."""
        begun = self._begun.get(key)
        return begun is None or begun.turn.compilation is not None

    def reject(self, key: ArtifactKey, detail: str) -> None:
        """Count a payload that the compiler could not load, and delete it from this host."""
        self._cache.reject(key, detail)

    def end(self) -> None:
        """Abandon the compilations that this thread began and did not put."""
        if self._begun:
            thread = threading.get_ident()
            self._give_up_all(lambda begun: begun.thread == thread)

    def close(self) -> None:
        """Abandon all compilations without a `put`."""
        self._give_up_all(lambda _: True)

    def _give_up_all(self, chosen: Callable[[_OpenTurn], bool]) -> None:
        with self._lock:
            ended = [key for key, begun in self._begun.items() if chosen(begun)]
            given_up = [self._begun.pop(key) for key in ended]
        for begun in given_up:
            self._give_up(begun)

    def _give_up(self, begun: _OpenTurn) -> None:
        self._turns.announce(begun.turn, None)
        if begun.turn.compilation is not None:
            begun.turn.compilation.abandon()
