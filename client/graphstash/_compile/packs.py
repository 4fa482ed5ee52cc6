"""Packs: one artifact with the results of many programs that compile fast.

Requests for the look-up, lease and upload of such a "small" program would take half as long as its
compilation. Therefore a job fetches a pack before its first small program, and publishes one later.

    get        return a program from the packs that earlier runs of this job have published
    put        add a result to the next pack, unless it is large or its compilation was slow
    flush      publish that pack, 30 s after its first result and at the end of the job

Like any other artifact, a pack is verified before use and never overwritten. The packs of a job
form a chain, numbered from 0, which ends at the first missing pack. Small programs become
artifacts of their own, like large ones, if a pack is unusable, the server refuses the next one, or
the chain has its maximum length.

Packs have no lease. Jobs that start at the same time each compile a small program, and the first to
publish wins. A pack lists a large or slow result without its payload, so that the next job looks up
the program's own artifact.

If the server does not answer, `get` returns only programs of packs that this host has. The results
of a pack that could not be stored go into the next upload.
"""

import json
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
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
"""Maximum compile time of a program in a pack. A slower program is worth its own requests."""

_MAX_PACKS: Final = 8
_MAX_ENTRIES: Final = 256
_MAX_BYTES: Final = 8 * 1024**2
_MAX_ENTRY_BYTES: Final = 1024**2
"""Limits of a chain, a pack and an entry, because a job keeps its chain in memory."""

_FLUSH_SECONDS: Final = 30.0
"""Maximum seconds from a result to its upload. A job may run for weeks after it, or be killed."""


_MAX_CONFLICTS: Final = 3
"""Maximum attempts to publish a pack, while other jobs publish packs with the same number."""

_RequestFor: TypeAlias = Callable[[int], CompileRequest]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A program in a pack. Without a payload, it has an artifact of its own."""

    payload: bytes | None
    compile_seconds: float
    source: Source = "host"
    is_fetched: bool = False


class Packs:
    """The small programs of one job. Thread-safe.

    `request_for` returns the request for the pack with a number, the same in every run of a job.
    """

    def __init__(self, cache: CompileCache, request_for: _RequestFor) -> None:
        self.request_for = request_for
        self._cache = cache
        # Held while a thread reads or extends the chain. Guards `_unsent` and the fields from
        # `_is_read` to `_packed`. Reentrant, because a signal handler in the same thread may
        # compile meanwhile.
        self._reading = threading.RLock()
        self._is_read = False
        self._read_at = monotonic()
        self._withdrawals = cache.withdrawals
        self._trouble: Reason | None = None  # reason why the chain could not be read to its end
        self._next = 0  # number of the first missing pack
        # Number of the pack that is being uploaded or could not be stored, else `_MAX_PACKS`. This
        # host may have a copy of this pack, which is no part of the chain yet.
        self._end = _MAX_PACKS
        self._packed: set[ArtifactKey] = set()  # keys in the packs before `_next`
        self._lock = threading.Lock()  # guards the other fields below
        self._entries: dict[ArtifactKey, _Entry] = {}
        self._started_at: dict[ArtifactKey, float] = {}
        self._pending: dict[ArtifactKey, _Entry] = {}
        self._pending_bytes = 0
        self._unsent: dict[ArtifactKey, _Entry] = {}  # entries of a pack that could not be stored
        self._timer: threading.Timer | None = None

    def get(self, key: ArtifactKey) -> bytes | None:
        """Return the payload. None: look up the artifact if `has_own_artifact`, else compile."""
        began = monotonic()
        is_counted = False  # whether this call has counted the trouble
        if began - self._read_at > RECHECK_SECONDS or self._cache.withdrawals != self._withdrawals:
            self._forget_fetched()
        if key not in self._entries and not self._is_read:
            is_counted = self._read_for(key)
        entry = self._entries.get(key)
        if entry is None and not self.has_own_artifact(key):
            if self._trouble is None:
                self._cache.counters.count_miss(key)
            else:
                self._cache.counters.count_uncached(key)
                if not is_counted:
                    self._cache.counters.count_fallback(self._trouble)
            if self._cache.limit is not None:
                self._cache.limit.check(CompileRequest(key), self._trouble)
            with self._lock:
                self._started_at[key] = monotonic()
        if entry is None or entry.payload is None:
            return None
        self._cache.counters.count_hit(
            key, entry.source, began=began, compile_seconds=entry.compile_seconds
        )
        return entry.payload

    def log_miss(self, request: CompileRequest) -> None:
        """Log a program for which `get` has found nothing, to explain it. Never raises."""

        def details() -> Mapping[str, str]:
            from graphstash_schema.explanation import PACK_PART  # only a job with misses needs it

            return {**request.details(), PACK_PART: self.request_for(0).label}

        self._cache.log.add(replace(request, details=details), reason=self._trouble)

    def has_own_artifact(self, key: ArtifactKey) -> bool:
        """Return whether the program has, or will have, an artifact of its own."""
        entry = self._entries.get(key)
        if entry is not None:
            return entry.payload is None
        return self._next >= _MAX_PACKS or self._cache.is_on_this_host(key)

    def put(self, key: ArtifactKey, payload: bytes) -> float | None:
        """Add a result that the caller has compiled after `get`.

        Returns:
            None if the next pack will contain the result. Otherwise it is too large or too slow for
            a pack: its compile time in seconds, with which the caller must publish it.
        """
        with self._lock:
            now = monotonic()
            seconds = now - self._started_at.pop(key, now)
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
                self._cache.publisher.start()  # an exiting process cannot start its thread
        if not fits:
            return seconds
        self._cache.waits.add_compilation(seconds)
        self._cache.count_compilation(key, seconds=seconds)
        self._cache.log.record_compilation(key, seconds=seconds, is_published=False)
        return None

    def reject(self, key: ArtifactKey) -> None:
        """Drop a payload of `get` that the compiler could not load."""
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
        if pending:
            self._cache.publish_later(lambda: self._publish(pending))

    def _publish(self, pending: dict[ArtifactKey, _Entry]) -> None:
        taken: int | None = None
        for _ in range(_MAX_CONFLICTS):
            with self._reading:
                pending, self._unsent = self._unsent | pending, {}
                self._read_chain()  # other jobs may have published the pending programs
                entries = {key: pending[key] for key in pending if key not in self._packed}
                if self._next == taken and self._trouble is None:
                    self._next = _MAX_PACKS  # this pack is withheld, so the chain cannot grow
                if not entries or self._next >= _MAX_PACKS:
                    return
                number = self._end = self._next
            request = self.request_for(number)
            payload = _pack(entries)
            metadata = request.metadata(
                compile_seconds=sum(each.compile_seconds for each in entries.values()),
                raw_size_bytes=len(payload),
            )
            count = sum(each.payload is not None for each in entries.values())
            # Without the lock: the upload may wait for a busy server, but `get` must not.
            outcome = self._cache.store_pack(request.key, payload, metadata, artifact_count=count)
            with self._reading:
                self._end = _MAX_PACKS
                if outcome is PackOutcome.TAKEN:
                    taken = number
                    continue
                if outcome is PackOutcome.STORED:
                    self._cache.log.describe_pack(request)
                    if self._next == number:  # otherwise `get` reads the chain again
                        self._packed |= entries.keys()
                        self._next += 1
                elif outcome is PackOutcome.REFUSED:
                    self._next = _MAX_PACKS
                elif len(entries) < _MAX_ENTRIES and len(payload) < _MAX_BYTES:
                    # Retry this number: a chain ends at its first gap.
                    self._unsent, self._end = entries, number
                return

    def _forget_fetched(self) -> None:
        """Drop the fetched entries, because packs may be withdrawn. `get` reads the chain again."""
        with self._reading, self._lock:
            self._entries = {
                key: entry for key, entry in self._entries.items() if not entry.is_fetched
            }
            self._is_read, self._next, self._packed = False, 0, set()
            self._read_at, self._withdrawals = monotonic(), self._cache.withdrawals

    def _read_for(self, key: ArtifactKey) -> bool:
        """Read the chain only up to the pack with the key, to save the requests for later packs.
        Return False if another thread has read the chain meanwhile.
        """
        with self._reading:
            if self._is_read:
                return False
            self._is_read = not self._read_chain(until=key)
            return True

    def _read_chain(self, until: ArtifactKey | None = None) -> bool:
        """Read the chain up to its end (False), or to the pack with the key `until` or the pack
        `_end` (True).
        """
        while self._next < self._end and (until is None or until not in self._entries):
            number = self._next
            key = self.request_for(number).key
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
    """Return a pack: table length, JSON table, payloads. Equal entries give equal bytes."""
    ordered = sorted(entries.items(), key=lambda item: str(item[0]))
    table = [
        (str(key), None if each.payload is None else len(each.payload)) for key, each in ordered
    ]
    head = json.dumps(table).encode()
    payloads = [each.payload for _, each in ordered if each.payload is not None]
    return b"".join((struct.pack(">I", len(head)), head, *payloads))


def _check_entry_size(size: int) -> int:
    """Check a size from a pack's table. Negative sizes would let entries overlap."""
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
                end = start + _check_entry_size(size)
                start, part = end, payload[start:end]
            entries[key] = _Entry(
                part, pack.compile_seconds / len(table), pack.source, is_fetched=True
            )
    except (struct.error, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a pack: {error}") from None
    if start != len(payload):
        raise ValueError(f"a pack of {len(payload)} bytes whose table names {start}")
    return entries
