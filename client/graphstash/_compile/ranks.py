"""RankCoordinator: all ranks of a distributed job run one executable per key, or all compile.

A mixed set of ranks, some with a fetched and some with a locally compiled executable, can deadlock
in a collective or drift apart (openxla/xla#7716). So the first rank that asks for a key leads, and
the others follow its word:

    artifact   exactly these bytes, from the cache or, where that fails, from the leader
    each       nobody has it, and the leader's result cannot be shared: everybody compiles
    pass       the leader cannot reach the cache: whoever can leads instead

The words go through the job's own store (`torch.distributed`'s, or JAX's coordination service). A
key that only one rank asks for is led by that rank: nobody waits for a rank that never comes.
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
"""Largest value in a rank store: below the message limits of all of them."""

_RELAY_BYTES: Final = 256 * 1024**2
"""What a leader leaves in the store at most; the oldest goes, which everybody has taken by then."""

_PASS_SECONDS: Final = 1.0
"""How long a rank that cannot reach the cache waits for one that can, before it compiles."""

_ROUNDS: Final = 4
"""How many ranks try to reach the cache, one after another; the last one leads without it."""


class RankStore(Protocol):
    """Small values that all ranks of one job see; every call may raise whatever it likes."""

    @property
    def rank(self) -> int:
        """This process, from 0."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    @property
    def compiles_together(self) -> bool:
        """Whether the compiler talks with the other ranks while it compiles.

        Then one rank alone would wait for the others for ever: on a miss all of them compile.
        """

    def claim(self, name: str, value: bytes) -> bytes:
        """Sets a value where there is none; gives the one that is there afterwards."""

    def set(self, name: str, value: bytes) -> None:
        """Sets a value for the first time."""

    def wait(self, name: str, *, timeout_seconds: float) -> bytes | None:
        """The value as soon as it is there; None when the time is over."""

    def delete(self, name: str) -> None:
        """Removes a value."""


@dataclass(frozen=True, slots=True)
class CompileTurn:
    """It is this process's turn to compile.

    Attributes:
        compilation: publishes the result; None where another rank does.
        announce: tells the other ranks the result, or None when there is none.
    """

    compilation: InFlightCompile | None
    announce: Callable[[bytes | None], None]


class RankCoordinator:
    """Finds one answer per key for all ranks of this job.

    Attributes:
        store: what the ranks share.

    Args:
        cache: finds the artifacts; each rank has its own.
        store: see the attribute.
    """

    def __init__(self, cache: CompileCache, store: RankStore) -> None:
        self._cache = cache
        self.store = store
        self._lock = threading.Lock()  # guards both fields below
        self._leading: dict[str, int] = {}  # round without its word: thread of this process
        self._relayed: deque[tuple[str, int, int]] = deque()  # name, chunks, bytes

    def get(self, request: CompileRequest, *, lease: bool) -> bytes | CompileTurn:
        """The payload that all ranks load, or this rank's turn to compile.

        Args:
            request: what is wanted.
            lease: as for `CompileCache.fetch_or_start`; without one the ranks do not wait for the
                leader's compilation either.

        Raises:
            Exception: whatever the store raises.
        """
        key = request.key
        has_passed = False
        round_count = min(self.store.size, _ROUNDS)
        for round_ in range(round_count):
            name = f"graphstash/{key}/{round_}"
            alone = round_ == round_count - 1  # enough others have passed
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
        """Whether this thread leads the round, which has no word yet.

        What was said holds as long as the job does. Where another thread of this process leads, it
        is followed as a leader in another process is.
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
        except BaseException:  # interrupted, or the store failed: nobody is to wait for this rank
            if isinstance(found, InFlightCompile):
                found.abandon()
            with suppress(Exception):
                self._say(name, {"word": "pass"})
            raise

    def _tell(
        self, found: bytes | InFlightCompile, name: str, *, lease: bool, alone: bool
    ) -> bytes | CompileTurn | None:
        """Says what was found, or who is going to compile."""
        if isinstance(found, bytes):
            self._announce(name, found)
            return found
        if found.fallback_reason is not None and not alone:
            found.abandon()
            self._say(name, {"word": "pass"})
            return None
        nobody_waits = not lease or self._cache.config.wait_seconds == 0
        if nobody_waits or self.store.compiles_together:
            self._say(name, {"word": "each"})
            return CompileTurn(found, no_op)
        return CompileTurn(found, lambda payload: self._announce_compiled(name, payload))

    def _follow(self, request: CompileRequest, name: str) -> bytes | CompileTurn | None:
        # The leader looks it up, may wait for a colleague's compilation, and compile then.
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
        """The bytes that the leader loads, wherever they are to be had."""
        began, key = monotonic(), request.key
        found = self._cache.get(key, max_bytes=request.max_bytes)
        if found is not None and hashlib.sha256(found).hexdigest() == word["sha256"]:
            return found
        chunks = []
        for number in range(word["chunks"]):
            chunk = self.store.wait(f"{name}/chunk/{number}", timeout_seconds=_PASS_SECONDS)
            if chunk is None:  # forgotten, like those after it
                break
            chunks.append(chunk)
        compressed = b"".join(chunks)
        payload = b""
        with suppress(zstandard.ZstdError):
            # What the frame says of its size is what it unfolds to, whatever the limit given.
            if zstandard.frame_content_size(compressed) == word["size"]:
                payload = zstandard.decompress(compressed)
        if hashlib.sha256(payload).hexdigest() == word["sha256"]:
            self._cache.counters.hit(key, "ranks", began=began, compile_seconds=0.0)
            return payload
        self._disagree(f"neither the cache nor the leader gives the {word['size']} bytes of {key}")
        return None

    def _announce_compiled(self, name: str, payload: bytes | None) -> None:
        """As `_announce`; where that fails, all others compile as well, unless it was said."""
        try:
            self._announce(name, payload)
        except BaseException:  # interrupted, or the store failed: nobody is to wait for this rank
            with suppress(Exception):
                self.store.claim(f"{name}/word", self._encoded({"word": "each"}))
            raise

    def _announce(self, name: str, payload: bytes | None) -> None:
        """Says what was found or compiled, and leaves it for ranks without a cache."""
        if payload is None:
            self._say(name, {"word": "each"})
            return
        compressed = zstandard.compress(payload)
        chunks = [
            compressed[start : start + _CHUNK_BYTES]
            for start in range(0, len(compressed), _CHUNK_BYTES)
        ]
        if len(compressed) > _RELAY_BYTES:
            chunks = []  # a rank without a cache compiles then
        for number, chunk in enumerate(chunks):
            self.store.set(f"{name}/chunk/{number}", chunk)
        self._say(
            name,
            {
                "word": "artifact",
                "sha256": hashlib.sha256(payload).hexdigest(),
                "size": len(payload),
                "chunks": len(chunks),
            },
        )
        with suppress(Exception):  # the word has been said; what cannot be removed stays
            self._forget_relayed(name, len(chunks), sum(map(len, chunks)))

    def _forget_relayed(self, name: str, chunk_count: int, size_bytes: int) -> None:
        """Removes what was relayed long ago, so that the store does not grow with the job."""
        with self._lock:
            self._relayed.append((name, chunk_count, size_bytes))
            over = sum(size for _, _, size in self._relayed) - _RELAY_BYTES
            while over > 0:
                old, count, size = self._relayed.popleft()
                over -= size
                for number in range(count):
                    self.store.delete(f"{old}/chunk/{number}")

    def _say(self, name: str, word: dict[str, Any]) -> None:
        with self._lock:
            self._leading.pop(name, None)
        self.store.set(f"{name}/word", self._encoded(word))

    def _encoded(self, word: dict[str, Any]) -> bytes:
        return json.dumps({**word, "wait_left": self._cache.waits.left}).encode()

    def _disagree(self, detail: str) -> None:
        self._cache.record_fallback(CacheError(Reason.RANKS, detail))


class CompileTurns:
    """Whose turn it is to compile, among the ranks of this job or alone; never raises.

    Args:
        cache: finds and publishes.
    """

    def __init__(self, cache: CompileCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()  # guards the coordinator
        self._coordinator: RankCoordinator | None = None

    def ask(
        self, request: CompileRequest, ranks: Callable[[], RankStore | None], *, lease: bool = True
    ) -> bytes | CompileTurn:
        """The payload, or this process's turn.

        Args:
            request: what is wanted.
            ranks: gives what the ranks share that all want it; None where this process is alone.
            lease: as for `CompileCache.fetch_or_start`.
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
        """Tells the other ranks what came of a turn, or None."""
        try:
            turn.announce(payload)
        except Exception as error:  # noqa: BLE001 - a hook's outermost frame: training goes on
            self._record_fallback(error)

    def _record_fallback(self, error: Exception) -> None:
        _log.debug("the ranks cannot agree", exc_info=True)
        self._cache.record_fallback(CacheError(Reason.RANKS, repr(error)))


def no_op(_payload: bytes | None) -> None:
    """Announces to nobody."""
