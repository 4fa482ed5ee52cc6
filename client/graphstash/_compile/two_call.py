"""TwoCallCache: for compilers that look up in one call and store the result in another.

    get(key)   bytes, or None: the compiler compiles; a lease may have been granted
    put(key)   stores what it compiled, in the background
    end()      abandons what this thread began and never put

Nothing in here raises, and nothing waits without a bound. The ranks of a distributed job get the
same answer for the same key, see `RankCoordinator`.
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
class _Begun:
    turn: CompileTurn
    thread: int
    started: float


class TwoCallCache:
    """Gets and puts whole payloads in memory; one per hook and process, for many threads.

    Args:
        cache: finds and publishes.
    """

    def __init__(self, cache: CompileCache) -> None:
        self._cache = cache
        self._turns = CompileTurns(cache)
        self._lock = threading.Lock()  # guards the table below
        self._begun: dict[ArtifactKey, _Begun] = {}

    def get(
        self, request: CompileRequest, *, lease: bool = True, ranks: RankStore | None = None
    ) -> bytes | None:
        """The verified payload, or None: then the caller compiles, and calls `put` or `end`.

        Args:
            request: what is wanted.
            lease: whether to ask for the right to compile it, and to wait while a colleague has
                it. False where the result comes only after other work of the job, for which
                somebody else might wait.
            ranks: what the ranks share that all compile it; None where this process is alone.
        """
        key = request.key
        answer = self._turns.ask(request, lambda: ranks, lease=lease)
        if isinstance(answer, bytes):
            return answer
        if answer.compilation is None and self._cache.limit is not None:
            self._cache.limit.check(request, Reason.RANKS)  # what its leader made has not come
        begun = _Begun(answer, threading.get_ident(), monotonic())
        with self._lock:
            before = self._begun.get(key)
            if before is None or before.thread == begun.thread:
                self._begun[key] = begun
            else:  # another thread compiles it; the first of the two that is done puts it
                before = begun
        if before is not None:  # asked again, never put: its compiler failed
            self._give_up(before)
        return None

    def put(
        self,
        request: CompileRequest,
        payload: bytes,
        *,
        compile_seconds: float | None = None,
    ) -> None:
        """Publishes in the background what the compiler made.

        Args:
            request: what was compiled.
            payload: what the compiler wants to see again.
            compile_seconds: wall time it took; by default the time since `get`.
        """
        with self._lock:
            begun = self._begun.pop(request.key, None)
        if begun is None:  # never asked for, or put twice
            begun = _Begun(CompileTurn(self._cache.begin(request), no_op), 0, monotonic())
        seconds = monotonic() - begun.started if compile_seconds is None else compile_seconds
        compilation = begun.turn.compilation
        try:
            self._turns.announce(begun.turn, payload)
        except BaseException:  # interrupted: nobody is to wait for this process
            if compilation is not None:
                compilation.abandon()
            raise
        if compilation is not None:
            compilation.publish_bytes(payload, compile_seconds=seconds)

    def wants(self, key: ArtifactKey) -> bool:
        """Whether a `put` of the key is of use to anybody: not where another rank publishes."""
        begun = self._begun.get(key)
        return begun is None or begun.turn.compilation is not None

    def reject(self, key: ArtifactKey, detail: str) -> None:
        """Counts that the compiler could not load what `get` gave it; this host forgets it."""
        self._cache.reject(key, detail)

    def end(self) -> None:
        """Gives up what this thread began and never put."""
        if self._begun:
            thread = threading.get_ident()
            self._give_up_all(lambda begun: begun.thread == thread)

    def close(self) -> None:
        """Gives up everything that was begun."""
        self._give_up_all(lambda _: True)

    def _give_up_all(self, chosen: Callable[[_Begun], bool]) -> None:
        with self._lock:
            ended = [key for key, begun in self._begun.items() if chosen(begun)]
            given_up = [self._begun.pop(key) for key in ended]
        for begun in given_up:
            self._give_up(begun)

    def _give_up(self, begun: _Begun) -> None:
        self._turns.announce(begun.turn, None)
        if begun.turn.compilation is not None:
            begun.turn.compilation.abandon()
