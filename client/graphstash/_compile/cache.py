"""Fetch an artifact or compile it: the path that all hooks use. It fails open.

    local tier -> server -> lease: granted   compile here, publish in the background
                                   ready     fetch the artifact
                                   held      wait, as long as `WaitBudget` allows
    the server is busy                       wait in the same budget, then retry, unless
                                             compiling is expected to be quicker
    any other error                          compile here, and count the reason

Errors of the cache never reach the hooks, and every wait is bounded.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final, TypeVar

import graphstash_schema as schema
from graphstash._artifacts.run_downloads import Source
from graphstash._artifacts.stash import Destination, Fetched, Memory, Stash, is_temporary
from graphstash._compile.compile_limit import CompileLimit
from graphstash._compile.in_flight import HeldLease, InFlightCompile
from graphstash._compile.misses import MissLog
from graphstash._compile.request import CompileRequest
from graphstash._compile.stats import Counters
from graphstash._compile.waiting import Wait, WaitBudget
from graphstash._executor import BoundedExecutor
from graphstash._forking import forkable, unforked
from graphstash.config import ClientConfig
from graphstash.errors import (
    BusyError,
    CacheError,
    ConflictError,
    Reason,
    RefusedError,
    VerificationError,
)
from graphstash_schema import ArtifactKey, ErrorCode
from graphstash_schema.names import printable

if TYPE_CHECKING:
    from graphstash_schema import ArtifactMetadata, LeaseReply

__all__ = ["CompileCache", "FetchedPack", "InFlightCompile", "PackOutcome"]

_log = logging.getLogger("graphstash")

_MIN_POLL_SECONDS: Final = 0.5
_POLL_SHARE: Final = 0.1
"""Minimum seconds from one request for a lease to the next: as a number, and as a share of the time
that the process has waited so far, up to the seconds that it asked to wait. A server replies at
once if it is closing or has too many waiters. The share lets many processes poll it without
lengthening a wait by more than a tenth."""

_SIGNAL_SECONDS: Final = 1.0
"""Maximum seconds between two signals to the processes of this host that wait for a download."""

_FULL_SECONDS: Final = 30.0
"""Seconds without a call to a server that has no free connection, once the job must not wait for it
any longer. Otherwise each call would wait a second for its refusal."""

_MAX_POLL_SECONDS: Final = 20.0
"""Maximum seconds of one call in a longer wait, below the idle timeouts of common proxies."""

_HOLDER_CHARACTERS: Final = 128
"""Maximum length of a holder's name, as in `LeaseRequest`. `WaitBudget` stores the names, and a
malicious server may return a new name in each reply."""

_OWN_COMPILE: Final = "this process is compiling, and the other one may wait for its result"
"""Reason not to wait: two processes could wait for each other, see `InFlightCompile.is_awaited`."""

_DAMAGED: Final = (
    *(Reason.DIGEST_MISMATCH, Reason.CORRUPT, Reason.WRONG_KEY, Reason.TOO_LARGE),
    *(Reason.BAD_SIGNATURE, Reason.UNKNOWN_KEY, Reason.REVOKED_KEY, Reason.UNSIGNED),
)
"""Reasons for which this job cannot use an artifact. Another job may be able to, for example if it
trusts the signing key."""

_RELEASE_SECONDS: Final = 2.0
"""Maximum seconds that an exiting job waits for the release of its leases."""

_READY_WITHOUT_ARTIFACT: Final = 3
"""The process compiles after this many "ready" replies without an artifact."""

_T = TypeVar("_T")


class PackOutcome(Enum):
    """Outcome of publishing a pack."""

    STORED = auto()
    """The server stores it. In a read-only job, only this host stores it."""
    TAKEN = auto()
    """The server stores another pack under the key, or withholds the key."""
    FAILED = auto()
    """The server confirmed no upload, and the reason was counted. This host may store the pack."""
    REFUSED = auto()
    """Like `FAILED`, but the server would refuse the pack again, for example as too large."""


@dataclass(frozen=True, slots=True)
class FetchedPack:
    """A look-up of a pack that was not a miss, see `Packs`. If the cache could not fetch the pack,
    `payload` is None, and `trouble` is the reason.
    """

    payload: bytes | None
    compile_seconds: float = 0.0
    source: Source = "host"
    trouble: Reason | None = None

    @property
    def is_damaged(self) -> bool:
        """Whether this job can never use the pack. A digest mismatch does not count: the server has
        not found its bytes damaged, so the next download may be intact.
        """
        return self.trouble in _DAMAGED and self.trouble is not Reason.DIGEST_MISMATCH


class CompileCache:
    """Fetches artifacts or starts compilations; one instance per process.

    The caller closes `stash`, and drains and closes `publisher`, the executor of the uploads.

    Attributes:
        waits: Remaining budget for waits for other jobs' compilations and for a busy server.
        log: Programs that this process had to compile.
        limit: Limit of compilations, or None if the user has set none.
    """

    def __init__(self, stash: Stash, *, counters: Counters, publisher: BoundedExecutor) -> None:
        self.stash = stash
        self.counters = counters
        self.publisher = publisher
        self.waits = WaitBudget(stash.config.wait_seconds)
        self._upload_waits = WaitBudget(stash.config.wait_seconds)  # of background threads
        self.log = MissLog()
        self.limit: CompileLimit | None = None
        # Threads change these without a lock: each change is one atomic operation.
        self._open: set[InFlightCompile] = set()
        self._leases: set[HeldLease] = set()
        self._used: dict[ArtifactKey, None] = {}
        self._refused: dict[ArtifactKey, Reason] = {}  # bad artifacts in `read_namespaces`
        self._count_tier_errors()

    @property
    def config(self) -> ClientConfig:
        """Settings of this job."""
        return self.stash.config

    @property
    def used(self) -> tuple[ArtifactKey, ...]:
        """Keys of the artifacts that this process has fetched or published, or that the server has
        with other bytes, in order of first use.
        """
        return tuple(self._used)

    def get_or_compile(
        self,
        key: ArtifactKey,
        compile_payload: Callable[[], bytes],
        *,
        parts: Mapping[str, str] | None = None,
        toolchain: str = "",
        label: str = "",
    ) -> bytes:
        """Return the artifact's payload. If the cache cannot deliver it, compile and publish it.

        Args:
            key: Key of the artifact.
            compile_payload: Compiles the payload. Its exceptions propagate.
            parts: Parts of the fingerprint, for explanations of misses.
            toolchain: Versions of the compiler, for display and retention rules.
            label: The user's name for the program, e.g. `jit(train_step)`.
        """
        found = self.fetch_bytes_or_start(CompileRequest(key, parts or {}, toolchain, label))
        if isinstance(found, bytes):
            return found
        started = monotonic()
        try:
            compiled = compile_payload()
        except BaseException:
            found.abandon()
            raise
        found.publish_bytes(compiled, compile_seconds=monotonic() - started)
        return compiled

    def fetch_bytes_or_start(
        self, request: CompileRequest, *, lease: bool = True
    ) -> bytes | InFlightCompile:
        """Return the verified payload, or start its compilation, see `fetch_or_start`."""
        payload = Memory(request.max_bytes)
        compilation = self.fetch_or_start(request, payload, lease=lease)
        return payload.getvalue() if compilation is None else compilation

    def fetch_or_start(
        self, request: CompileRequest, destination: Destination, *, lease: bool = True
    ) -> InFlightCompile | None:
        """Write the artifact's payload to `destination`, or start its compilation.

        Return None if the verified payload is at `destination`. With `lease`, request a lease, and
        wait within the `WaitBudget` while another job holds it. Raises only a signal's exception.
        """
        key = request.key
        fallback_reason: Reason | None = None
        refused: Reason | None = None
        wanted = True
        held: HeldLease | None = None
        try:
            is_found = self._fetch_and_count(key, destination, since=monotonic()) is not None
            if not is_found and lease and not self.stash.server.is_read_only:
                is_found, held = self._wait_if_allowed(key, destination)
            if is_found:
                return None
            refused = self._refused.pop(key, None)
            count = self.counters.count_miss if refused is None else self.counters.count_uncached
            if not request.is_optional:
                count(key)
        except CacheError as error:
            self.record_fallback(error)
            self.counters.count_uncached(key)
            fallback_reason = error.reason
            # The server refuses an upload while it stores the artifact that failed verification.
            # It removes the artifact only if it finds that its own bytes are damaged.
            wanted = error.reason not in _DAMAGED or self._verify_on_server(key, error.reason)
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: training goes on
            self.record_fallback(error)
            self.counters.count_uncached(key)
            fallback_reason = Reason.INTERNAL
        try:
            reason = fallback_reason or refused
            if reason is not None or not request.is_optional:
                self.log.add(request, reason=reason)
            return self._begin(request, lease=held, fallback_reason=fallback_reason, wanted=wanted)
        except BaseException:  # a signal: no process should wait for the lease
            if held is not None:
                held.release(schema.LeaseOutcome.FAILED)
            raise

    def begin(self, request: CompileRequest) -> InFlightCompile:
        """Start a compilation without a look-up or lease."""
        self.log.add(request, reason=None)
        return self._begin(request)

    def note_optional_miss(self, request: CompileRequest) -> None:
        """Count the miss of an `is_optional` request, when the compiler stores the artifact."""
        self.counters.count_miss(request.key)
        self.log.add(request, reason=None)

    def refuse(self, request: CompileRequest, why: str) -> None:
        """Count an unshareable program before its compilation, and check the compile limit."""
        self.note_unshared(request, why)
        if self.limit is not None:
            self.limit.check(request, Reason.UNSHAREABLE)

    def note_unshared(self, request: CompileRequest, why: str) -> None:
        """Count an unshareable program, which `explain` and `doctor` show."""
        error = CacheError(Reason.UNSHAREABLE, why)
        self.record_fallback(error)
        self.counters.count_uncached(request.key)
        self.log.add(request, reason=error.reason, detail=error.detail)

    def reject(self, key: ArtifactKey, detail: str) -> None:
        """Count an artifact that the compiler could not load, and delete this host's copy."""
        self.stash.forget(key)
        self.record_fallback(CacheError(Reason.REJECTED, detail))
        self.counters.count_uncached(key)
        if self.limit is not None:
            self.limit.check(CompileRequest(key), Reason.REJECTED)

    def get(self, key: ArtifactKey, *, max_bytes: int | None = None) -> bytes | None:
        """Return the stored payload, or None if it is absent, bad or too large. Never raises."""
        payload = Memory(max_bytes)
        return payload.getvalue() if self.try_fetch(key, payload) else None

    def try_fetch(self, key: ArtifactKey, destination: Destination) -> bool:
        """Write the payload to `destination`. Return False on a miss or failure. Never raises."""
        try:
            return self._fetch_and_count(key, destination, since=monotonic()) is not None
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: training goes on
            self.record_fallback(error)
        return False

    def store(
        self, key: ArtifactKey, payload: Path, metadata: "ArtifactMetadata", *, local_only: bool
    ) -> bool:
        """Publish an artifact. Return whether the server has an artifact of this key now, perhaps
        with other bytes. Never raises.
        """
        self.waits.add_compilation(metadata.compile_seconds)
        is_published = self._store(key, payload, metadata, local_only=local_only)
        self.log.record_compilation(
            key, seconds=metadata.compile_seconds, is_published=is_published
        )
        if self.log.is_full:
            self.log.send(self.stash.server)
        return is_published

    def _store(
        self, key: ArtifactKey, payload: Path, metadata: "ArtifactMetadata", *, local_only: bool
    ) -> bool:
        try:
            description = self.log.description_of(key)
            sent = self._put(key, payload, metadata, local_only=local_only, description=description)
        except ConflictError as error:
            if error.code is ErrorCode.WITHHELD:
                self.record_fallback(error)
                return False
            self.counters.add(conflicts=1)
            self._used[key] = None
            return True
        except Exception as error:  # noqa: BLE001 - a background thread's outermost frame
            self.record_fallback(error)
            self.log.record_failed_upload(key, str(error))
            return False
        self._count_tier_errors()
        if sent:
            self.counters.add(published=1, published_bytes=sent)
            self._used[key] = None
        return bool(sent)

    @property
    def withdrawals(self) -> int:
        """A counter that increases when an artifact may have been withdrawn, see `Standing`."""
        return self.stash.standing.changes

    def is_on_this_host(self, key: ArtifactKey) -> bool:
        """Return whether the local tier has an artifact under the key."""
        return self.stash.is_on_this_host(key)

    def fetch_pack(self, key: ArtifactKey, *, max_bytes: int | None = None) -> FetchedPack | None:
        """Fetch a pack, or return None if there is none. Never raises, and counts no hit. A pack
        larger than `max_bytes` counts as damaged.
        """
        payload = Memory(max_bytes)
        try:
            fetched = self._fetch(key, payload)
        except CacheError as error:
            self.record_fallback(error)
            is_gone = self._verify_on_server(key, error.reason)
            return None if is_gone else FetchedPack(None, trouble=error.reason)
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: training goes on
            self.record_fallback(error)
            return FetchedPack(None, trouble=Reason.INTERNAL)
        if fetched is None:
            return None
        source = self._source_of(key, fetched)
        return FetchedPack(payload.getvalue(), fetched.compile_seconds, source)

    def store_pack(
        self, key: ArtifactKey, payload: bytes, metadata: "ArtifactMetadata", *, artifact_count: int
    ) -> PackOutcome:
        """Publish a pack of `artifact_count` artifacts. Never raises."""
        try:
            sent = self._put(key, payload, metadata)
        except ConflictError as error:
            if error.code is ErrorCode.WITHHELD:
                self.record_fallback(error)
            return PackOutcome.TAKEN
        except Exception as error:  # noqa: BLE001 - a background thread's outermost frame
            self.record_fallback(error)
            is_final = isinstance(error, RefusedError) and not is_temporary(error)
            return PackOutcome.REFUSED if is_final else PackOutcome.FAILED
        if not sent and not self.is_on_this_host(key):
            self._count_tier_errors()
            return PackOutcome.FAILED
        if sent:
            self.counters.add(published=artifact_count, published_bytes=sent)
            self._used[key] = None
        self._count_tier_errors()
        return PackOutcome.STORED

    def _put(self, *artifact: Any, **options: Any) -> int:
        with self._upload_waits.wait() as wait, unforked():
            sent = self.stash.put(*artifact, **options, when_busy=partial(self._pause, wait))
            wait.saved_seconds = 0.0  # not None: the wait was not in vain
            return sent

    def publish_later(self, work: Callable[[], None]) -> bool:
        """Run `work` in the background. Return False, and count a fallback, if too much waits."""
        if self.publisher.submit(work):
            return True
        what = "too many artifacts wait for their upload"
        self.record_fallback(CacheError(Reason.QUEUE_FULL, what))
        return False

    def record_fallback(self, error: Exception) -> None:
        """Count a fallback, and log the first one of each reason. Any error other than `CacheError`
        is a fault of the cache and counts as internal.
        """
        if not isinstance(error, CacheError):
            _log.debug("the cache failed", exc_info=error)
            error = CacheError(Reason.INTERNAL, repr(error))
        self._count_fallback(error)

    def _count_fallback(self, error: CacheError) -> None:
        if self.counters.count_fallback(error.reason):
            _log.warning(
                "graphstash: %s; the job goes on (further %r errors are counted, not logged)",
                error,
                error.reason.value,
            )

    def forget(self, compilation: InFlightCompile) -> None:
        """Remove a compilation that has ended."""
        self._open.discard(compilation)
        if self.limit is not None:
            self.limit.end(compilation.key)

    def count_compilation(self, key: ArtifactKey, *, seconds: float) -> None:
        """Count a compilation that this thread has just finished."""
        self.counters.count_compilation(key, seconds=seconds)
        if self.limit is not None:
            self.limit.add_compilation(seconds)
            self.limit.end(key)

    def abandon_unfinished(self) -> None:
        """Release the leases of running compilations. Uploads continue."""
        for compilation in tuple(self._open):
            if compilation.is_compiling:
                with suppress(Exception):
                    compilation.abandon()

    def abandon_all(self) -> None:
        """Release all leases, so that no job waits for this exiting process."""
        for compilation in tuple(self._open):
            with suppress(Exception):
                compilation.abandon()
        deadline = monotonic() + _RELEASE_SECONDS
        for lease in tuple(self._leases):
            lease.join(max(0.0, deadline - monotonic()))

    def _begin(
        self,
        request: CompileRequest,
        *,
        lease: HeldLease | None = None,
        fallback_reason: Reason | None = None,
        wanted: bool = True,
    ) -> InFlightCompile:
        with unforked():  # importing pydantic, which publishing needs, must not race with a fork
            import graphstash_schema.lease
            import graphstash_schema.metadata  # noqa: F401 - the first compilation imports it

        compilation = InFlightCompile(
            self, request, lease=lease, fallback_reason=fallback_reason, wanted=wanted
        )
        self._open.add(compilation)
        if self.limit is not None:
            self.limit.begin(request, fallback_reason)
        return compilation

    def _verify_on_server(self, key: ArtifactKey, reason: Reason) -> bool:
        """After a digest mismatch, let the server check its bytes. Return whether it drops them."""
        if reason is not Reason.DIGEST_MISMATCH or self.stash.server.is_read_only:
            return False
        try:
            return self.stash.server.verify(key).healed
        except Exception as error:  # noqa: BLE001 - an error handler of the hook calls this
            _log.debug("the server cannot verify %s: %r", key, error)
            return False

    def _fetch_and_count(
        self, key: ArtifactKey, destination: Destination, *, since: float
    ) -> Fetched | None:
        """Fetch the artifact and count a hit. `since` is the start of this thread's look-up."""
        fetched = self._fetch(key, destination)
        if fetched is not None:
            self.counters.count_hit(
                key,
                self._source_of(key, fetched),
                began=since,
                compile_seconds=fetched.compile_seconds,
            )
        return fetched

    def _retry_while_busy(self, call: Callable[[], _T]) -> _T:
        """Call the server, and retry while it is busy and the budget allows a wait."""
        with self.waits.wait() as wait:
            while True:
                try:
                    with unforked():
                        result = call()
                except BusyError as error:
                    if not self._pause(wait, error):
                        raise
                else:
                    wait.saved_seconds = 0.0  # not None: the wait was not in vain
                    return result

    def _fetch_when_free(self, key: ArtifactKey, destination: Destination) -> Fetched | None:
        """Fetch an artifact. While the server is busy, retry if the budget allows a wait and
        compiling is not expected to be quicker.
        """
        known = self.stash.server.compile_seconds(key)
        with self.waits.wait() as wait, unforked():
            fetched = self.stash.fetch(
                key,
                destination,
                when_busy=lambda busy, signal: self._pause(
                    wait, busy, compile_seconds=known, signal_progress=signal
                ),
            )
            # A miss saves no time, but the wait for the server was not in vain (None).
            wait.saved_seconds = 0.0 if fetched is None else fetched.compile_seconds
            return fetched

    def _pause(
        self,
        wait: Wait,
        busy: BusyError,
        *,
        compile_seconds: float | None = None,
        signal_progress: Callable[[], None] = lambda: None,
    ) -> bool:
        """Sleep until the job may call a busy server again, or return False if it must not wait."""
        seconds = wait.pause_seconds(busy, compile_seconds=compile_seconds)
        if seconds is None:
            if busy.is_full and wait.left < busy.retry_after_seconds:
                self.stash.server.pause(_FULL_SECONDS)
            return False
        with forkable():
            while seconds > 0.0:
                signal_progress()
                sleep(min(seconds, _SIGNAL_SECONDS))
                seconds -= _SIGNAL_SECONDS
        wait.deduct()
        return True

    def _source_of(self, key: ArtifactKey, fetched: Fetched) -> Source:
        return "server" if fetched.source == "remote" else self.stash.downloads.source_of(key)

    def _fetch(self, key: ArtifactKey, destination: Destination) -> Fetched | None:
        started = monotonic()
        try:
            fetched = self._copy_unsent(key, destination) or self._fetch_when_free(key, destination)
        except VerificationError as error:
            for refused in error.earlier:
                self.record_fallback(refused)
            if error.namespace in (None, self.config.namespace):
                raise
            # This job can still publish its own artifact in its own namespace.
            self.record_fallback(error)
            self._refused[key] = error.reason
            return None
        if fetched is None:
            return None
        for refused in fetched.refused:
            self.record_fallback(refused)
        self._count_tier_errors()
        self._used[key] = None
        self.counters.add(
            unsigned=int(fetched.is_unsigned),
            fetched_bytes=fetched.size_bytes,
            fetch_seconds=monotonic() - started,
        )
        return fetched

    def _count_tier_errors(self) -> None:
        while self.stash.local.troubles:
            self.record_fallback(self.stash.local.troubles.popleft())

    def _copy_unsent(self, key: ArtifactKey, destination: Destination) -> Fetched | None:
        """Copy a result of this process whose upload is pending."""
        for compilation in tuple(self._open):
            if compilation.key == key and (copied := compilation.copy_unsent(destination)):
                return copied
        return None

    def _hold(self, key: ArtifactKey, reply: "LeaseReply") -> HeldLease | None:
        try:
            lease = HeldLease(
                self.stash.server,
                key,
                token=reply.token or "",
                ttl_seconds=reply.ttl_seconds or self.config.lease_seconds,
                budget_seconds=max(self.config.wait_seconds, self.config.lease_seconds),
            )
        except RuntimeError:  # no thread is available to renew the lease
            self.stash.server.release(key, reply.token or "", schema.LeaseOutcome.FAILED)
            return None
        self._leases.add(lease)
        for held in tuple(self._leases):
            if held.is_over:
                self._leases.discard(held)
        return lease

    def _wait_if_allowed(
        self, key: ArtifactKey, destination: Destination
    ) -> tuple[bool, HeldLease | None]:
        """Return what `_wait_or_start` does. If the token only reads, the look-up was a miss."""
        try:
            return self._wait_or_start(key, destination)
        except RefusedError as error:
            if error.reason is not Reason.FORBIDDEN:
                raise
            self.record_fallback(error)
            return False, None

    def _wait_or_start(
        self, key: ArtifactKey, destination: Destination
    ) -> tuple[bool, HeldLease | None]:
        """Wait for the artifact. Return whether it is at `destination`, and any granted lease."""
        is_awaited = any(each.is_awaited for each in tuple(self._open))
        started = monotonic()
        empty_replies = 0
        with self.waits.wait() as wait:
            while True:
                requested_at, seconds = monotonic(), min(_MAX_POLL_SECONDS, wait.left)
                reply = self._retry_while_busy(
                    partial(self.stash.server.acquire, key, wait_seconds=seconds)
                )
                match reply.state:
                    case schema.LeaseState.GRANTED:
                        return False, self._hold(key, reply)
                    case schema.LeaseState.READY:
                        if (
                            found := self._fetch_and_count(key, destination, since=started)
                        ) is not None:
                            wait.saved_seconds = found.compile_seconds
                            if wait.has_begun:
                                self.counters.add(waits=1, wait_seconds=monotonic() - started)
                            return True, None
                        empty_replies += 1
                        if empty_replies >= _READY_WITHOUT_ARTIFACT:
                            return False, None
                    case schema.LeaseState.HELD:
                        holder = printable(reply.holder or "another job", most=_HOLDER_CHARACTERS)
                        reason_to_skip = _OWN_COMPILE if is_awaited else wait.reason_to_skip(holder)
                        if reason_to_skip is not None:
                            detail = f"{holder} still compiles {key}: {reason_to_skip}"
                            raise CacheError(Reason.WAIT_BUDGET, detail)
                        if seconds:
                            share = _POLL_SHARE * (requested_at - started)
                            until = requested_at + min(seconds, max(_MIN_POLL_SECONDS, share))
                            pause = min(until - monotonic(), wait.left)
                            with forkable():
                                sleep(max(0.0, pause))
