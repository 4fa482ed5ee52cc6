"""RankCoordinator: for each key, all ranks of a job load the same executable, or all compile.

Ranks must not mix fetched and locally compiled executables. Otherwise the job can deadlock in a
collective, or the ranks' results can diverge (openxla/xla#7716). Therefore the first rank that
requests a key leads. It announces one of three words, and the other ranks follow it:

    artifact   load exactly these bytes, from the cache or, if that fails, from the leader
    each       every rank compiles: the cache has no artifact, and the leader will share none
    pass       the leader cannot reach the cache, so another rank that can reach it leads

The words travel through the job's own store: `torch.distributed`'s or JAX's coordination service.
If only one rank requests a key, that rank leads and waits for no other rank.
"""

import hashlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final, Protocol

import zstandard

from graphstash._compile.cache import CompileCache, InFlightCompile
from graphstash._compile.request import CompileRequest
from graphstash.errors import CacheError, Reason

__all__ = ["CompileTurn", "CompileTurns", "RankCoordinator", "RankStore", "no_op"]

_log = logging.getLogger("graphstash")

_CHUNK_BYTES: Final = 1024**2
"""Maximum bytes of a value in a rank store, below the message limits of all stores."""

_RELAY_BYTES: Final = 256 * 1024**2
"""Maximum bytes that a leader keeps in the store. It removes the oldest payload first, which the
other ranks have read by then."""

_PASS_SECONDS: Final = 1.0
"""Seconds that a rank without access to the cache waits for a new leader, before it compiles."""

_ROUNDS: Final = 4
"""Number of ranks that try to reach the cache in turn. The last one leads without the cache."""


class RankStore(Protocol):
    """A key-value store that all ranks of one job share. Each method may raise any exception."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""

    @property
    def size(self) -> int:
        """Number of processes."""

    @property
    def compiles_together(self) -> bool:
        """Whether the compiler exchanges data with the other ranks during a compilation.

        If so, a rank that compiles alone waits forever. Therefore all ranks compile after a miss.
        """

    def claim(self, name: str, value: bytes) -> bytes:
        """Set a value unless one exists, and return the value in the store."""

    def set(self, name: str, value: bytes) -> None:
        """Set a value that does not exist yet."""

    def wait(self, name: str, *, timeout_seconds: float) -> bytes | None:
        """Wait for a value and return it, or None after the timeout."""

    def delete(self, name: str) -> None:
        """Delete a value."""


@dataclass(frozen=True, slots=True)
class CompileTurn:
    """The turn of this process to compile.

    Attributes:
        compilation: Publishes the result. None if another rank publishes it.
        announce: Sends the result to the other ranks. Call it with None after a failure.
    """

    compilation: InFlightCompile | None
    announce: Callable[[bytes | None], None]


class RankCoordinator:
    """Makes all ranks of this job agree on one answer per key.

    Args:
        cache: Cache of this rank.
        store: Store that the ranks share.
    """

    def __init__(self, cache: CompileCache, store: RankStore) -> None:
        self._cache = cache
        self.store = store
        self._lock = threading.Lock()  # guards both fields below
        self._leading: dict[str, int] = {}  # thread that leads a round, until its announcement
        self._relayed: deque[tuple[str, int, int]] = deque()  # name, chunks, bytes

    def get(self, request: CompileRequest, *, lease: bool) -> bytes | CompileTurn:
        """Return the payload that all ranks load, or the turn of this rank to compile.

        Args:
            request: Request for the artifact.
            lease: See `CompileCache.fetch_or_start`. If False, the ranks do not wait for the
                leader's compilation.

        Raises:
            Exception: Any exception of the store.
        """
        key = request.key
        has_passed = False
        round_count = min(self.store.size, _ROUNDS)
        for round_ in range(round_count):
            name = f"graphstash/{key}/{round_}"
            alone = round_ == round_count - 1  # enough ranks have passed the key on
            if has_passed:
                leader = self.store.wait(f"{name}/leader", timeout_seconds=_PASS_SECONDS)
                alone = alone or leader is None
            if self._is_led_here(name):
                answer = self._lead(request, name, lease=lease, alone=alone)
                has_passed = True
            else:
                answer = self._follow(request, name)
            if answer is not None:
                return answer
        self._disagree(f"all ranks passed {key} on")
        return CompileTurn(None, no_op)

    def _is_led_here(self, name: str) -> bool:
        """Return whether this thread leads the round and the round has no word yet.

        An announced word is valid until the job ends. If another thread of this process leads, this
        thread follows it like a leader in another process.
        """
        rank = str(self.store.rank).encode()
        if self.store.claim(f"{name}/leader", rank) != rank:
            return False
        if self.store.wait(f"{name}/word", timeout_seconds=0) is not None:
            return False
        thread = threading.get_ident()
        with self._lock:
            return self._leading.setdefault(name, thread) == thread

    def _lead(
        self, request: CompileRequest, name: str, *, lease: bool, alone: bool
    ) -> bytes | CompileTurn | None:
        found: bytes | InFlightCompile | None = None
        try:
            found = self._cache.fetch_bytes_or_start(request, lease=lease)
            return self._tell(found, name, lease=lease, alone=alone)
        except BaseException:  # interrupted, or the store failed: no rank should wait for this one
            if isinstance(found, InFlightCompile):
                found.abandon()
            with suppress(Exception):
                self._send_word(name, {"word": "pass"})
            raise

    def _tell(
        self, found: bytes | InFlightCompile, name: str, *, lease: bool, alone: bool
    ) -> bytes | CompileTurn | None:
        """Announce the artifact, or which ranks compile."""
        if isinstance(found, bytes):
            self._announce(name, found)
            return found
        if found.fallback_reason is not None and not alone:
            found.abandon()
            self._send_word(name, {"word": "pass"})
            return None
        nobody_waits = not lease or self._cache.config.wait_seconds == 0
        if nobody_waits or self.store.compiles_together:
            self._send_word(name, {"word": "each"})
            return CompileTurn(found, no_op)
        return CompileTurn(found, lambda payload: self._announce_compiled(name, payload))

    def _follow(self, request: CompileRequest, name: str) -> bytes | CompileTurn | None:
        # The leader may fetch, then wait for another job's compilation, and then compile itself.
        config = self._cache.config
        budget = config.fetch_seconds + 2 * config.wait_seconds
        said = self.store.wait(f"{name}/word", timeout_seconds=budget)
        if said is None:
            self._disagree(f"the leader of {request.key} said nothing for {budget:g} s")
            return CompileTurn(None, no_op)
        word = json.loads(said)
        self._cache.waits.share(word["wait_left"])
        match word["word"]:
            case "artifact":
                payload = self._artifact(request, name, word)
                return CompileTurn(None, no_op) if payload is None else payload
            case "each":
                return CompileTurn(None, no_op)
            case _:
                return None

    def _artifact(self, request: CompileRequest, name: str, word: dict[str, Any]) -> bytes | None:
        """Return the bytes that the leader loads, from the cache or from the store."""
        began, key = monotonic(), request.key
        found = self._cache.get(key, max_bytes=request.max_bytes)
        if found is not None and hashlib.sha256(found).hexdigest() == word["sha256"]:
            return found
        chunks = []
        for number in range(word["chunks"]):
            chunk = self.store.wait(f"{name}/chunk/{number}", timeout_seconds=_PASS_SECONDS)
            if chunk is None:  # the leader has removed this chunk and all later ones
                break
            chunks.append(chunk)
        compressed = b"".join(chunks)
        payload = b""
        with suppress(zstandard.ZstdError):
            # zstandard allocates the size in the frame, even above `max_output_size`. Check it.
            if zstandard.frame_content_size(compressed) == word["size"]:
                payload = zstandard.decompress(compressed)
        if hashlib.sha256(payload).hexdigest() == word["sha256"]:
            self._cache.counters.hit(key, "ranks", began=began, compile_seconds=0.0)
            return payload
        self._disagree(f"neither the cache nor the leader gives the {word['size']} bytes of {key}")
        return None

    def _announce_compiled(self, name: str, payload: bytes | None) -> None:
        """Announce the result. If that fails, let the other ranks compile, unless a word is set."""
        try:
            self._announce(name, payload)
        except BaseException:  # interrupted, or the store failed: no rank should wait for this one
            with suppress(Exception):
                self.store.claim(f"{name}/word", self._encoded({"word": "each"}))
            raise

    def _announce(self, name: str, payload: bytes | None) -> None:
        """Announce a payload, and store it for ranks that cannot reach the cache."""
        if payload is None:
            self._send_word(name, {"word": "each"})
            return
        compressed = zstandard.compress(payload)
        chunks = [
            compressed[start : start + _CHUNK_BYTES]
            for start in range(0, len(compressed), _CHUNK_BYTES)
        ]
        if len(compressed) > _RELAY_BYTES:
            chunks = []  # too large for the store: a rank without the cache has to compile
        for number, chunk in enumerate(chunks):
            self.store.set(f"{name}/chunk/{number}", chunk)
        self._send_word(
            name,
            {
                "word": "artifact",
                "sha256": hashlib.sha256(payload).hexdigest(),
                "size": len(payload),
                "chunks": len(chunks),
            },
        )
        with suppress(Exception):  # the ranks have their word, so old chunks may stay
            self._forget_relayed(name, len(chunks), sum(map(len, chunks)))

    def _forget_relayed(self, name: str, chunk_count: int, size_bytes: int) -> None:
        """Remove the oldest payloads, so that the store does not grow during the job."""
        with self._lock:
            self._relayed.append((name, chunk_count, size_bytes))
            over = sum(size for _, _, size in self._relayed) - _RELAY_BYTES
            while over > 0:
                old, count, size = self._relayed.popleft()
                over -= size
                for number in range(count):
                    self.store.delete(f"{old}/chunk/{number}")

    def _send_word(self, name: str, word: dict[str, Any]) -> None:
        with self._lock:
            self._leading.pop(name, None)
        self.store.set(f"{name}/word", self._encoded(word))

    def _encoded(self, word: dict[str, Any]) -> bytes:
        return json.dumps({**word, "wait_left": self._cache.waits.left}).encode()

    def _disagree(self, detail: str) -> None:
        self._cache.record_fallback(CacheError(Reason.RANKS, detail))


class CompileTurns:
    """Assigns turns to compile, among the ranks of a job or for a single process. Never raises.

    Args:
        cache: Cache of this process.
    """

    def __init__(self, cache: CompileCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()  # guards the coordinator
        self._coordinator: RankCoordinator | None = None

    def ask(
        self, request: CompileRequest, ranks: Callable[[], RankStore | None], *, lease: bool = True
    ) -> bytes | CompileTurn:
        """Return the payload, or the turn of this process to compile.

        Args:
            request: Request for the artifact.
            ranks: Returns the store of the ranks that request the same artifact, or None if only
                this process requests it.
            lease: See `CompileCache.fetch_or_start`.
        """
        try:
            if (store := ranks()) is not None:
                with self._lock:
                    if self._coordinator is None or self._coordinator.store is not store:
                        self._coordinator = RankCoordinator(self._cache, store)
                    coordinator = self._coordinator
                return coordinator.get(request, lease=lease)
        except Exception as error:  # noqa: BLE001 - a hook's outermost frame: training goes on
            self._record_fallback(error)
        found = self._cache.fetch_bytes_or_start(request, lease=lease)
        return found if isinstance(found, bytes) else CompileTurn(found, no_op)

    def announce(self, turn: CompileTurn, payload: bytes | None) -> None:
        """Send the result of a turn to the other ranks, or None after a failure."""
        try:
            turn.announce(payload)
        except Exception as error:  # noqa: BLE001 - a hook's outermost frame: training goes on
            self._record_fallback(error)

    def _record_fallback(self, error: Exception) -> None:
        _log.debug("the ranks cannot agree", exc_info=True)
        self._cache.record_fallback(CacheError(Reason.RANKS, repr(error)))


def no_op(_payload: bytes | None) -> None:
    """Announce nothing: the `announce` of a turn without other ranks."""
