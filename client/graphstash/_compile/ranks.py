"""RankCoordinator: for each key, all ranks of a job load the same executable, or all compile.

If ranks mix fetched and locally compiled executables, the job can deadlock in a collective, or the
ranks' results can diverge (openxla/xla#7716). Therefore the first rank that requests a key leads
the others. It announces one of three words, and the other ranks obey:

    artifact   load exactly these bytes, from the cache or, if that fails, from the leader
    each       compile: the cache has no artifact, and the leader shares no result
    pass       the leader cannot reach the cache: the next rank that comes leads a new round

The words travel through the job's own store: `torch.distributed`'s or JAX's coordination service.
If only one rank requests a key, it leads without waiting, or after `_PASS_SECONDS` if it cannot
reach the cache.
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
"""Maximum bytes of a value in a rank store, below the message limits of every kind of store."""

_RELAY_BYTES: Final = 256 * 1024**2
"""Maximum compressed bytes of payloads that a leader keeps in the store. It removes the oldest
payloads, which the other ranks have probably read. A late rank without the cache compiles."""

_PASS_SECONDS: Final = 1.0
"""Seconds that a rank without access to the cache waits for a new leader, or for one chunk."""

_ROUNDS: Final = 4
"""Number of ranks that try to reach the cache, in turn. The last one leads even without it."""


class RankStore(Protocol):
    """A key-value store that all ranks of a job share. Every method may raise any exception."""

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""

    @property
    def size(self) -> int:
        """Number of processes."""

    @property
    def compiles_together(self) -> bool:
        """Whether a compilation waits for data from the compilations of the other ranks.

        If so, all ranks compile after a miss, because a rank that compiled alone would hang.
        """

    def claim(self, name: str, value: bytes) -> bytes:
        """Set a value unless the name has one, and return the name's value."""

    def set(self, name: str, value: bytes) -> None:
        """Set the value of a name that has none."""

    def wait(self, name: str, *, timeout_seconds: float) -> bytes | None:
        """Wait for a name to have a value, and return it, or None after the timeout."""

    def delete(self, name: str) -> None:
        """Delete a name and its value."""


@dataclass(frozen=True, slots=True)
class CompileTurn:
    """Tells the caller to compile.

    Attributes:
        compilation: Publishes the result. None if this process must not publish it.
        announce: Sends the result to the other ranks. Call it with None after a failure.
    """

    compilation: InFlightCompile | None
    announce: Callable[[bytes | None], None]


class RankCoordinator:
    """Makes all ranks of this job agree on one answer per key."""

    def __init__(self, cache: CompileCache, store: RankStore) -> None:
        self._cache = cache
        self.store = store
        self._lock = threading.Lock()  # guards both fields below
        self._leading: dict[str, int] = {}  # leading thread by round, until its word
        self._relayed: deque[tuple[str, int, int]] = deque()  # name, chunks, bytes

    def get(self, request: CompileRequest, *, lease: bool) -> bytes | CompileTurn:
        """Return the payload that all ranks load, or a turn to compile. Without `lease`, every rank
        compiles after a miss. Exceptions of the store propagate.
        """
        key = request.key
        has_passed = False
        round_count = min(self.store.size, _ROUNDS)
        for round_ in range(round_count):
            name = f"graphstash/{key}/{round_}"
            is_last = round_ == round_count - 1  # the last round, so do not pass
            if has_passed:
                leader = self.store.wait(f"{name}/leader", timeout_seconds=_PASS_SECONDS)
                is_last = is_last or leader is None
            if self._is_led_here(name):
                answer = self._lead(request, name, lease=lease, is_last=is_last)
                has_passed = True
            else:
                answer = self._follow(request, name)
            if answer is not None:
                return answer
        self._record_disagreement(f"all ranks passed {key} on")
        return CompileTurn(None, no_op)

    def _is_led_here(self, name: str) -> bool:
        """Return whether this thread leads the round and the round has no word yet.

        A word is final. If another thread of this process leads, this thread waits for the word.
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
        self, request: CompileRequest, name: str, *, lease: bool, is_last: bool
    ) -> bytes | CompileTurn | None:
        found: bytes | InFlightCompile | None = None
        try:
            found = self._cache.fetch_bytes_or_start(request, lease=lease)
            return self._announce_found(found, name, lease=lease, is_last=is_last)
        except BaseException:  # interrupted, or the store failed: do not let the other ranks wait
            if isinstance(found, InFlightCompile):
                found.abandon()
            with suppress(Exception):
                self._send_word(name, {"word": "pass"})
            raise

    def _announce_found(
        self, found: bytes | InFlightCompile, name: str, *, lease: bool, is_last: bool
    ) -> bytes | CompileTurn | None:
        """Announce the artifact if it was found. Otherwise announce who compiles or leads."""
        if isinstance(found, bytes):
            self._announce(name, found)
            return found
        if found.fallback_reason is not None and not is_last:
            found.abandon()
            self._send_word(name, {"word": "pass"})
            return None
        is_unawaited = not lease or self._cache.config.wait_seconds == 0
        if is_unawaited or self.store.compiles_together:
            self._send_word(name, {"word": "each"})
            return CompileTurn(found, no_op)
        return CompileTurn(found, lambda payload: self._announce_compiled(name, payload))

    def _follow(self, request: CompileRequest, name: str) -> bytes | CompileTurn | None:
        # The leader may fetch, wait for another job's compilation, and then compile the artifact.
        config = self._cache.config
        budget = config.fetch_seconds + 2 * config.wait_seconds
        encoded = self.store.wait(f"{name}/word", timeout_seconds=budget)
        if encoded is None:
            self._record_disagreement(f"the leader of {request.key} said nothing for {budget:g} s")
            return CompileTurn(None, no_op)
        word = json.loads(encoded)
        self._cache.waits.share(word["wait_left"], word.get("server_waits", {}))
        match word["word"]:
            case "artifact":
                payload = self._obtain(request, name, word)
                return CompileTurn(None, no_op) if payload is None else payload
            case "each":
                return CompileTurn(None, no_op)
            case _:
                return None

    def _obtain(self, request: CompileRequest, name: str, word: dict[str, Any]) -> bytes | None:
        """Return the bytes with the leader's digest, from the cache or the store, or None."""
        began, key = monotonic(), request.key
        found = self._cache.get(key, max_bytes=request.max_bytes)
        if found is not None and hashlib.sha256(found).hexdigest() == word["sha256"]:
            return found
        chunks = []
        for number in range(word["chunks"]):
            chunk = self.store.wait(f"{name}/chunk/{number}", timeout_seconds=_PASS_SECONDS)
            if chunk is None:  # the leader removes old payloads
                break
            chunks.append(chunk)
        compressed = b"".join(chunks)
        payload = b""
        with suppress(zstandard.ZstdError):
            # zstandard allocates the size that the frame claims, even above `max_output_size`.
            if zstandard.frame_content_size(compressed) == word["size"]:
                payload = zstandard.decompress(compressed)
        if hashlib.sha256(payload).hexdigest() == word["sha256"]:
            self._cache.counters.count_hit(key, "ranks", began=began, compile_seconds=0.0)
            return payload
        self._record_disagreement(
            f"neither the cache nor the leader gives the {word['size']} bytes of {key}"
        )
        return None

    def _announce_compiled(self, name: str, payload: bytes | None) -> None:
        """Announce the result. If that fails and no word is set, announce `each`."""
        try:
            self._announce(name, payload)
        except BaseException:  # interrupted, or the store failed: do not let the other ranks wait
            with suppress(Exception):
                self.store.claim(f"{name}/word", self._encode({"word": "each"}))
            raise

    def _announce(self, name: str, payload: bytes | None) -> None:
        """Store a payload for ranks that cannot reach the cache, and announce it. None: `each`."""
        if payload is None:
            self._send_word(name, {"word": "each"})
            return
        compressed = zstandard.compress(payload)
        chunks = [
            compressed[start : start + _CHUNK_BYTES]
            for start in range(0, len(compressed), _CHUNK_BYTES)
        ]
        if len(compressed) > _RELAY_BYTES:
            chunks = []  # too large for the store: ranks without the cache compile
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
        with suppress(Exception):  # the word is set, so chunks may be left behind
            self._forget_relayed(name, len(chunks), sum(map(len, chunks)))

    def _forget_relayed(self, name: str, chunk_count: int, size_bytes: int) -> None:
        """Remove the oldest payloads beyond `_RELAY_BYTES`."""
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
        self.store.set(f"{name}/word", self._encode(word))

    def _encode(self, word: dict[str, Any]) -> bytes:
        waits = self._cache.waits
        shared = {"wait_left": waits.left, "server_waits": waits.server_waits}
        return json.dumps(word | shared).encode()

    def _record_disagreement(self, detail: str) -> None:
        self._cache.record_fallback(CacheError(Reason.RANKS, detail))


class CompileTurns:
    """Finds artifacts or assigns turns to compile, for the ranks of a job or for one process.

    Never raises.
    """

    def __init__(self, cache: CompileCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()  # guards the field below
        self._coordinator: RankCoordinator | None = None

    def ask(
        self, request: CompileRequest, ranks: Callable[[], RankStore | None], *, lease: bool = True
    ) -> bytes | CompileTurn:
        """Return the payload, or a turn to compile.

        `ranks` returns the store of the ranks that request the artifact, or None if only this
        process requests it.
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
    """The `announce` of a turn for whose result no rank waits."""
