"""Packs: artifacts of programs that compile in no time travel together.

Asking for such a program, leasing it and publishing it costs a job half of what compiling it does.
So a job asks for one pack before the first of them, and publishes one after the last.

    get        from the packs that earlier runs of this job have published
    put        takes a result for the next pack, unless it took long to compile
    flush      publishes that pack, after a while and at the end of the job

A pack is an artifact like any other, and what is said of those holds for it: verified before use,
never overwritten. The packs of a job form a chain, `name(0)`, `name(1)`, ..., whose end is the
first that is absent. Where one is of no use, or all are there, programs travel alone, like those
that are not small. There is no lease: jobs that start at once compile such a program each, and
the first to publish wins. What took longer than it looked is named in the pack, so that the next
job looks it up alone.
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
from graphstash._compile.cache import CompileCache, FetchedPack
from graphstash._compile.request import CompileRequest
from graphstash.errors import CacheError, Reason
from graphstash_schema import ArtifactKey, InvalidValueError

__all__ = ["MAX_PACKED_SECONDS", "Packs"]

MAX_PACKED_SECONDS: Final = 0.25
"""What takes longer to compile is worth requests of its own."""

_MAX_PACKS: Final = 8
_MAX_ENTRIES: Final = 256
_MAX_BYTES: Final = 8 * 1024**2
_MAX_ENTRY_BYTES: Final = 1024**2
"""Limits of a chain, of a pack and of what is in it: a job keeps all of it in memory."""

_FLUSH_SECONDS: Final = 30.0
"""A job may run for weeks after its last program, or be killed."""


_MAX_CONFLICTS: Final = 3
"""How often another job may publish the pack of this number first."""

_Name: TypeAlias = Callable[[int], CompileRequest]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A packed artifact; without a payload, one that is stored alone."""

    payload: bytes | None
    compile_seconds: float
    source: Source = "host"
    is_fetched: bool = False


class Packs:
    """The small programs of one job; for many threads.

    Attributes:
        name: the request of the pack with a number.

    Args:
        cache: finds and publishes the packs.
        name: see the attribute; the same in every run of a job.
    """

    def __init__(self, cache: CompileCache, name: _Name) -> None:
        self.name = name
        self._cache = cache
        # Held while the chain is read; guards the next five. A signal handler may compile in the
        # same thread meanwhile.
        self._reading = threading.RLock()
        self._is_read = False
        self._read_at = monotonic()
        self._trouble: Reason | None = None  # why the chain could not be read to its end
        self._next = 0  # number of the first pack that was absent
        self._packed: set[ArtifactKey] = set()  # what the packs before it hold
        self._lock = threading.Lock()  # guards the fields below
        self._entries: dict[ArtifactKey, _Entry] = {}
        self._begun: dict[ArtifactKey, float] = {}
        self._pending: dict[ArtifactKey, _Entry] = {}
        self._pending_bytes = 0
        self._timer: threading.Timer | None = None

    def get(self, key: ArtifactKey) -> bytes | None:
        """The payload; None when the caller compiles, or looks it up alone: see `is_alone`."""
        began = monotonic()
        if began - self._read_at > RECHECK_SECONDS:
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
        """Whether an artifact is stored alone, or would be."""
        entry = self._entries.get(key)
        if entry is not None:
            return entry.payload is None
        return self._next >= _MAX_PACKS or self._cache.is_on_this_host(key)

    def put(self, key: ArtifactKey, payload: bytes) -> float | None:
        """Takes what was compiled after `get`.

        Returns:
            The seconds that it took when that is too long for a pack: it is to be published alone.
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
                with suppress(RuntimeError):  # no thread can be started: the next one may
                    timer.start()
                    self._timer = timer
                self._cache.publisher.start()  # for the last pack
        if not fits:
            return seconds
        self._cache.waits.compiled(seconds)
        self._cache.compiled(key, seconds=seconds)
        return None

    def reject(self, key: ArtifactKey) -> None:
        """The compiler could not load what `get` gave."""
        with self._lock:
            self._entries.pop(key, None)
        if self._cache.limit is not None:
            self._cache.limit.check(CompileRequest(key), Reason.REJECTED)

    def flush(self) -> None:
        """Publishes in the background what was put since the last time."""
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
            for _ in range(_MAX_CONFLICTS):
                self._read_chain()  # others may have published what is pending
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
                if self._cache.store_pack(request.key, payload, metadata, artifact_count=count):
                    self._packed |= entries.keys()
                    self._next += 1
                    return

    def _forget_fetched(self) -> None:
        """Reads the chain anew from now on: a pack in it may have been withdrawn."""
        with self._reading, self._lock:
            self._entries = {
                key: entry for key, entry in self._entries.items() if not entry.is_fetched
            }
            self._is_read, self._next, self._packed = False, 0, set()
            self._read_at = monotonic()

    def _read_for(self, key: ArtifactKey) -> None:
        """Reads the chain, no further than needed: what this host has needs no server."""
        with self._reading:
            if not self._is_read:
                self._is_read = not self._read_chain(until=key)

    def _read_chain(self, until: ArtifactKey | None = None) -> bool:
        """Reads on in the chain to its end, or to the pack with a key; False at the end."""
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
    """Length of the table, the table as JSON, the payloads; equal for equal entries."""
    ordered = sorted(entries.items(), key=lambda item: str(item[0]))
    table = [
        (str(key), None if each.payload is None else len(each.payload)) for key, each in ordered
    ]
    head = json.dumps(table).encode()
    payloads = [each.payload for _, each in ordered if each.payload is not None]
    return b"".join((struct.pack(">I", len(head)), head, *payloads))


def _unpack(pack: FetchedPack, payload: bytes) -> dict[ArtifactKey, _Entry]:
    """The entries of a pack.

    Raises:
        ValueError: it is not one.
    """
    entries: dict[ArtifactKey, _Entry] = {}
    try:
        (start,) = struct.unpack_from(">I", payload)
        table = json.loads(payload[4 : 4 + start])
        start += 4
        for name, size in table:
            key, part = ArtifactKey.parse(*name.split("/")), None
            if size is not None:
                start, part = start + size, payload[start : start + size]
            entries[key] = _Entry(
                part, pack.compile_seconds / len(table), pack.source, is_fetched=True
            )
    except (struct.error, AttributeError, TypeError, ValueError, InvalidValueError) as error:
        raise ValueError(f"not a pack: {error}") from None
    if start != len(payload):
        raise ValueError(f"a pack of {len(payload)} bytes whose table names {start}")
    return entries
