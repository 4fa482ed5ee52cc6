"""Packs: one artifact with the results of many programs that compile fast.

For such a program, the requests for look-up, lease and upload take half as long as the compilation.
Therefore a job fetches one pack before its first small program, and publishes one after its last.

    get        return a program from the packs that earlier runs of this job have published
    put        add a result to the next pack, unless its compilation was slow
    flush      publish that pack, 30 s after the first result and at the end of the job

Like any other artifact, a pack is verified before use and never overwritten. The packs of a job
form a chain, `name(0)`, `name(1)`, ..., which ends at the first missing pack. If a pack is unusable
or the chain has its maximum length, small programs travel alone, like large ones.

Packs have no lease. Jobs that start at the same time each compile such a program, and the first to
publish wins. If a small program compiles slowly, the pack lists it without a payload, so that the
next job looks it up alone.
"""

import json
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Final, TypeAlias

from graphstash._artifacts.run_downloads import Source
from graphstash._artifacts.standing import RECHECK_SECONDS
from graphstash._compile.cache import CompileCache, FetchedPack, PackOutcome
from graphstash._compile.request import CompileRequest
from graphstash.errors import CacheError, Reason
from graphstash_schema import ArtifactKey

__all__ = ["MAX_PACKED_SECONDS", "Packs"]

MAX_PACKED_SECONDS: Final = 0.25
"""Maximum compile time in a pack. A slower program is worth its own requests."""

_MAX_PACKS: Final = 8
_MAX_ENTRIES: Final = 256
_MAX_BYTES: Final = 8 * 1024**2
_MAX_ENTRY_BYTES: Final = 1024**2
"""Limits of a chain, a pack and an entry, because a job keeps its chain in memory."""

_FLUSH_SECONDS: Final = 30.0
"""Seconds from a result to its upload. A job may run for weeks after it, or be killed."""


_MAX_CONFLICTS: Final = 3
"""Number of attempts to publish a pack, if other jobs publish the same number first."""

_Name: TypeAlias = Callable[[int], CompileRequest]


@dataclass(frozen=True, slots=True)
class _Entry:
    """An artifact in a pack. Without a payload, the artifact is stored alone."""

    payload: bytes | None
    compile_seconds: float
    source: Source = "host"
    is_fetched: bool = False


class Packs:
    """The small programs of one job. Thread-safe.

    Args:
        cache: Cache of this process.
        name: Returns the request for the pack with a number; the same one in every run of a job.
    """

    def __init__(self, cache: CompileCache, name: _Name) -> None:
        self.name = name
        self._cache = cache
        # Held while a thread reads the chain; guards the next five fields. Reentrant, because a
        # signal handler in the same thread may compile meanwhile.
        self._reading = threading.RLock()
        self._is_read = False
        self._read_at = monotonic()
        self._withdrawals = cache.withdrawals
        self._trouble: Reason | None = None  # why the chain could not be read to its end
        self._next = 0  # number of the first missing pack
        self._packed: set[ArtifactKey] = set()  # keys in the packs before it
        self._lock = threading.Lock()  # guards the fields below
        self._entries: dict[ArtifactKey, _Entry] = {}
        self._begun: dict[ArtifactKey, float] = {}
        self._pending: dict[ArtifactKey, _Entry] = {}
        self._pending_bytes = 0
        self._unsent: dict[ArtifactKey, _Entry] = {}  # of a pack that could not be stored
        self._timer: threading.Timer | None = None

    def get(self, key: ArtifactKey) -> bytes | None:
        """Return the payload. None: the caller looks it up alone if `is_alone`, else compiles."""
        began = monotonic()
        if began - self._read_at > RECHECK_SECONDS or self._cache.withdrawals != self._withdrawals:
            self._forget_fetched()
        if key not in self._entries and not self._is_read:
            self._read_for(key)
        entry = self._entries.get(key)
        if entry is None and not self.is_alone(key):
            if self._trouble is None:
                self._cache.counters.miss(key)
            else:
                self._cache.counters.uncached(key)
            if self._cache.limit is not None:
                self._cache.limit.check(CompileRequest(key), self._trouble)
            with self._lock:
                self._begun[key] = monotonic()
        if entry is None or entry.payload is None:
            return None
        self._cache.counters.hit(
            key, entry.source, began=began, compile_seconds=entry.compile_seconds
        )
        return entry.payload

    def is_alone(self, key: ArtifactKey) -> bool:
        """Return whether an artifact is stored, or will be stored, outside the packs."""
        entry = self._entries.get(key)
        if entry is not None:
            return entry.payload is None
        return self._next >= _MAX_PACKS or self._cache.is_on_this_host(key)

    def put(self, key: ArtifactKey, payload: bytes) -> float | None:
        """Add a result that the caller has compiled after `get`.

        Returns:
            None if the next pack contains the result. Otherwise it is too large or too slow for a
            pack: the caller must publish it alone, with this compile time in seconds.
        """
        with self._lock:
            now = monotonic()
            seconds = now - self._begun.pop(key, now)
            fits = seconds <= MAX_PACKED_SECONDS and len(payload) <= _MAX_ENTRY_BYTES
            entry = _Entry(payload if fits else None, seconds)
            self._entries[key] = self._pending[key] = entry
            self._pending_bytes += len(payload) if fits else 0
            if len(self._pending) >= _MAX_ENTRIES or self._pending_bytes >= _MAX_BYTES:
                self._submit()
            elif self._timer is None:
                timer = threading.Timer(_FLUSH_SECONDS, self.flush)
                timer.daemon = True
                with suppress(RuntimeError):  # no thread available; the next `put` tries again
                    timer.start()
                    self._timer = timer
                self._cache.publisher.start()  # at exit, no thread can start for the last pack
        if not fits:
            return seconds
        self._cache.waits.compiled(seconds)
        self._cache.compiled(key, seconds=seconds)
        return None

    def reject(self, key: ArtifactKey) -> None:
        """Drop an entry from `get` that the compiler could not load."""
        with self._lock:
            self._entries.pop(key, None)
        if self._cache.limit is not None:
            self._cache.limit.check(CompileRequest(key), Reason.REJECTED)

    def flush(self) -> None:
        """Publish the results since the last pack, in the background."""
        with self._lock:
            self._submit()

    def _submit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending, self._pending, self._pending_bytes = self._pending, {}, 0
        if pending and not self._cache.publisher.submit(lambda: self._publish(pending)):
            self._cache.record_fallback(
                CacheError(Reason.QUEUE_FULL, "too many artifacts wait for their upload")
            )

    def _publish(self, pending: dict[ArtifactKey, _Entry]) -> None:
        with self._reading:
            unsent, self._unsent = self._unsent, {}
            pending = unsent | pending
            for attempt in range(_MAX_CONFLICTS):
                if attempt or not unsent:  # else the chain ends with this host's copy of the pack
                    self._read_chain()  # other jobs may have published the pending programs
                entries = {key: pending[key] for key in pending if key not in self._packed}
                if not entries or self._next >= _MAX_PACKS:
                    return
                request = self.name(self._next)
                payload = _pack(entries)
                metadata = request.metadata(
                    compile_seconds=sum(each.compile_seconds for each in entries.values()),
                    raw_size_bytes=len(payload),
                )
                count = sum(each.payload is not None for each in entries.values())
                outcome = self._cache.store_pack(
                    request.key, payload, metadata, artifact_count=count
                )
                if outcome is PackOutcome.TAKEN:
                    continue
                if outcome is PackOutcome.STORED:
                    self._packed |= entries.keys()
                    self._next += 1
                elif len(entries) < _MAX_ENTRIES and len(payload) < _MAX_BYTES:
                    self._unsent = entries  # a pack after a gap in the chain would never be read
                return

    def _forget_fetched(self) -> None:
        """Drop the fetched entries and read the chain again, since packs may be withdrawn."""
        with self._reading, self._lock:
            self._entries = {
                key: entry for key, entry in self._entries.items() if not entry.is_fetched
            }
            self._is_read, self._next, self._packed = False, 0, set()
            self._read_at, self._withdrawals = monotonic(), self._cache.withdrawals

    def _read_for(self, key: ArtifactKey) -> None:
        """Read the chain up to the pack with a key, to avoid requests for further packs."""
        with self._reading:
            if not self._is_read:
                self._is_read = not self._read_chain(until=key)

    def _read_chain(self, until: ArtifactKey | None = None) -> bool:
        """Read the chain up to its end (False) or to the pack with the key `until` (True)."""
        while self._next < _MAX_PACKS and (until is None or until not in self._entries):
            number = self._next
            key = self.name(number).key
            fetched = self._cache.fetch_pack(key)
            self._trouble = None if fetched is None else fetched.trouble
            if fetched is None or fetched.payload is None:
                if fetched is not None and fetched.is_damaged:
                    self._next = _MAX_PACKS
                return False
            try:
                entries = _unpack(fetched, fetched.payload)
            except ValueError as error:
                self._next = _MAX_PACKS
                self._cache.record_fallback(CacheError(Reason.CORRUPT, f"{key}: {error}"))
                return False
            self._next = max(self._next, number + 1)
            self._packed |= entries.keys()
            with self._lock:
                self._entries = entries | self._entries
        return self._next < _MAX_PACKS


def _pack(entries: Mapping[ArtifactKey, _Entry]) -> bytes:
    """Return the pack: length of the table, the table as JSON, the payloads. Deterministic."""
    ordered = sorted(entries.items(), key=lambda item: str(item[0]))
    table = [
        (str(key), None if each.payload is None else len(each.payload)) for key, each in ordered
    ]
    head = json.dumps(table).encode()
    payloads = [each.payload for _, each in ordered if each.payload is not None]
    return b"".join((struct.pack(">I", len(head)), head, *payloads))


def _entry_bytes(size: int) -> int:
    """Return a size from the table of a pack. Negative ones would let entries overlap."""
    if not 0 <= size <= _MAX_ENTRY_BYTES:
        raise ValueError(f"an entry of {size} bytes; at most {_MAX_ENTRY_BYTES}")
    return size


def _unpack(pack: FetchedPack, payload: bytes) -> dict[ArtifactKey, _Entry]:
    """Return the entries of a pack.

    Raises:
        ValueError: The payload is not a valid pack.
    """
    entries: dict[ArtifactKey, _Entry] = {}
    try:
        (start,) = struct.unpack_from(">I", payload)
        table = json.loads(payload[4 : 4 + start])
        start += 4
        for name, size in table:
            key, part = ArtifactKey.parse(*name.split("/")), None
            if size is not None:
                end = start + _entry_bytes(size)
                start, part = end, payload[start:end]
            entries[key] = _Entry(
                part, pack.compile_seconds / len(table), pack.source, is_fetched=True
            )
    except (struct.error, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a pack: {error}") from None
    if start != len(payload):
        raise ValueError(f"a pack of {len(payload)} bytes whose table names {start}")
    return entries
