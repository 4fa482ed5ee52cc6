"""Fetch an artifact or compile it: the one path that every hook takes. It fails open.

    local tier -> server -> lease: granted   compile here, publish in the background
                                   ready     fetch it
                                   held      wait, as long as `WaitBudget` allows
    any error on the way                     compile here, counted under its reason

Nothing in here raises because of the cache, and nothing waits without a bound.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from graphstash._artifacts.run_downloads import Source
from graphstash._artifacts.stash import Destination, Fetched, Memory, Stash
from graphstash._compile.compile_limit import CompileLimit
from graphstash._compile.in_flight import HeldLease, InFlightCompile
from graphstash._compile.misses import MissLog
from graphstash._compile.request import CompileRequest
from graphstash._compile.stats import Counters
from graphstash._compile.waiting import WaitBudget
from graphstash._executor import BoundedExecutor
from graphstash.config import ClientConfig
from graphstash.errors import CacheError, ConflictError, Reason, VerificationError
from graphstash_schema import (
    ArtifactKey,
    ArtifactMetadata,
    LeaseOutcome,
    LeaseReply,
    LeaseState,
)
from graphstash_schema.names import printable

__all__ = ["CompileCache", "FetchedPack", "InFlightCompile"]

_log = logging.getLogger("graphstash")

_MIN_POLL_SECONDS: Final = 0.5

_MAX_POLL_SECONDS: Final = 20.0
"""One call's share of a longer wait: shorter than the idle time-outs of common proxies."""

_HOLDER_CHARACTERS: Final = 128
"""Of a holder's name, as in `LeaseRequest`. All are kept, and a server may make up one for every
answer."""

_OWN_COMPILE: Final = "this process compiles something itself, which that one may wait for"
"""See `InFlightCompile.is_awaited`."""

_DAMAGED: Final = (
    *(Reason.DIGEST_MISMATCH, Reason.CORRUPT, Reason.WRONG_KEY, Reason.TOO_LARGE),
    *(Reason.BAD_SIGNATURE, Reason.UNKNOWN_KEY, Reason.REVOKED_KEY, Reason.UNSIGNED),
)
"""Reasons for which an artifact is stored under the key, but of no use."""

_GOODBYE_SECONDS: Final = 2.0
"""How long a job that ends may take to release its leases."""

_READY_WITHOUT_ARTIFACT: Final = 3
"""How often "it is ready" may turn out to be a miss before one compiles."""


@dataclass(frozen=True, slots=True)
class FetchedPack:
    """What is stored under the key of a pack, see `Packs`.

    Attributes:
        payload: None when the cache could not give it.
        compile_seconds: what all its compilations had taken.
        source: where it came from.
        trouble: why there is no payload.
    """

    payload: bytes | None
    compile_seconds: float = 0.0
    source: Source = "host"
    trouble: Reason | None = None

    @property
    def is_damaged(self) -> bool:
        """Whether something is stored under the key, but of no use."""
        return self.trouble in _DAMAGED


class CompileCache:
    """Finds artifacts or hands out compilations; one per process.

    Attributes:
        waits: how long it may still wait for compilations of others.
        log: what had to be compiled.
        limit: how much may be compiled; None where that is not limited.

    Args:
        stash: closed by whoever made it.
        counters: what happened.
        publisher: runs uploads; drained and closed by whoever made it.
    """

    def __init__(self, stash: Stash, *, counters: Counters, publisher: BoundedExecutor) -> None:
        self.stash = stash
        self.counters = counters
        self.publisher = publisher
        self.waits = WaitBudget(stash.config.wait_seconds)
        self.log = MissLog()
        self.limit: CompileLimit | None = None
        # Each use is one bytecode operation: safe between threads.
        self._open: set[InFlightCompile] = set()
        self._leases: list[HeldLease] = []
        self._used: dict[ArtifactKey, None] = {}
        self._count_troubles()

    @property
    def config(self) -> ClientConfig:
        """The settings of this job."""
        return self.stash.config

    @property
    def used(self) -> tuple[ArtifactKey, ...]:
        """Every artifact that this process found or stored, in order of first use."""
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
        """The payload of an artifact: fetched if any job has compiled it, else compiled here.

        Args:
            key: what is wanted.
            compile_payload: makes it; its exceptions pass through.
            parts: what the fingerprint was made of; shown when a miss is explained.
            toolchain: versions, for people and retention.
            label: what its user calls it, e.g. `jit(train_step)`.
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
        """The verified payload, or its compilation: `fetch_or_start` for those that want bytes."""
        payload = Memory(request.max_bytes)
        compilation = self.fetch_or_start(request, payload, lease=lease)
        return payload.getvalue() if compilation is None else compilation

    def fetch_or_start(
        self, request: CompileRequest, destination: Destination, *, lease: bool = True
    ) -> InFlightCompile | None:
        """Writes the artifact's payload to `destination`, or hands out its compilation.

        Never raises. Waits for another job's compilation as long as the job's `WaitBudget` allows.

        Args:
            request: what is wanted.
            destination: gets the payload.
            lease: whether to ask for the right to compile, and to wait while somebody has it.

        Returns:
            None when the verified payload is at `destination`.
        """
        key = request.key
        fallback_reason: Reason | None = None
        wanted = True
        held: HeldLease | None = None
        try:
            is_found = self._found(key, destination, since=monotonic()) is not None
            if not is_found and lease and not self.stash.server.is_read_only:
                is_found, held = self._wait_or_start(key, destination)
            if is_found:
                return None
            self.counters.miss(key)
        except CacheError as error:
            self.record_fallback(error)
            self.counters.uncached(key)
            fallback_reason = error.reason
            # What did not verify is still stored under the key; a second upload is refused anyway,
            # unless the server finds its bytes damaged and drops them.
            wanted = error.reason not in _DAMAGED or self._is_healed(key, error.reason)
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: training goes on
            self.record_fallback(error)
            self.counters.uncached(key)
            fallback_reason = Reason.INTERNAL
        try:
            self.log.add(request, reason=fallback_reason)
            return self._begin(request, lease=held, fallback_reason=fallback_reason, wanted=wanted)
        except BaseException:  # interrupted: nobody is to wait for this process
            if held is not None:
                held.release(LeaseOutcome.FAILED)
            raise

    def begin(self, request: CompileRequest) -> InFlightCompile:
        """Hands out a compilation without a look-up."""
        self.log.add(request, reason=None)
        return self._begin(request)

    def refuse(self, request: CompileRequest, why: str) -> None:
        """Counts a program that is compiled and not shared; `explain` and `doctor` show it."""
        error = CacheError(Reason.UNSHAREABLE, why)
        self.record_fallback(error)
        self.log.add(request, reason=error.reason)

    def reject(self, key: ArtifactKey, detail: str) -> None:
        """Counts that the compiler could not load a verified artifact; this host forgets it."""
        self.stash.forget(key)
        self.record_fallback(CacheError(Reason.REJECTED, detail))
        self.counters.uncached(key)
        if self.limit is not None:
            self.limit.check(CompileRequest(key), Reason.REJECTED)

    def get(self, key: ArtifactKey, *, max_bytes: int | None = None) -> bytes | None:
        """The payload if it is stored, and no larger than that; never raises or compiles."""
        payload = Memory(max_bytes)
        return payload.getvalue() if self.try_fetch(key, payload) else None

    def try_fetch(self, key: ArtifactKey, destination: Destination) -> bool:
        """Writes the payload to `destination` if it is stored; never raises or compiles."""
        try:
            return self._found(key, destination, since=monotonic()) is not None
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: training goes on
            self.record_fallback(error)
        return False

    def store(
        self, key: ArtifactKey, payload: Path, metadata: ArtifactMetadata, *, local_only: bool
    ) -> bool:
        """Publishes an artifact; never raises. True when the server has it afterwards."""
        self.waits.compiled(metadata.compile_seconds)
        is_published = self._store(key, payload, metadata, local_only=local_only)
        self.log.compiled(key, seconds=metadata.compile_seconds, is_published=is_published)
        if self.log.is_full:
            self.log.tell(self.stash.server)
        return is_published

    def _store(
        self, key: ArtifactKey, payload: Path, metadata: ArtifactMetadata, *, local_only: bool
    ) -> bool:
        try:
            sent = self.stash.put(key, payload, metadata, local_only=local_only)
        except ConflictError:
            self.counters.add(conflicts=1)
            self._used[key] = None
            return True
        except Exception as error:  # noqa: BLE001 - a background thread's outermost frame
            self.record_fallback(error)
            return False
        self._count_troubles()
        if sent:
            self.counters.add(published=1, published_bytes=sent)
            self._used[key] = None
        return bool(sent)

    def is_on_this_host(self, key: ArtifactKey) -> bool:
        """Whether the local tier has something under the key."""
        return self.stash.is_on_this_host(key)

    def fetch_pack(self, key: ArtifactKey, *, max_bytes: int | None = None) -> FetchedPack | None:
        """What is stored under the key of a pack, None for a miss; never raises, counts no hit.

        A pack that is larger than `max_bytes` is of no use.
        """
        payload = Memory(max_bytes)
        try:
            fetched = self._fetch(key, payload)
        except CacheError as error:
            self.record_fallback(error)
            self._is_healed(key, error.reason)
            return FetchedPack(None, trouble=error.reason)
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: training goes on
            self.record_fallback(error)
            return FetchedPack(None, trouble=Reason.INTERNAL)
        if fetched is None:
            return None
        source = self._source_of(key, fetched)
        return FetchedPack(payload.getvalue(), fetched.compile_seconds, source)

    def store_pack(
        self, key: ArtifactKey, payload: bytes, metadata: ArtifactMetadata, *, artifact_count: int
    ) -> bool:
        """Publishes a pack of so many artifacts; False when another one is there. Never raises."""
        try:
            sent = self.stash.put(key, payload, metadata)
        except ConflictError:
            return False
        except Exception as error:  # noqa: BLE001 - a background thread's outermost frame
            self.record_fallback(error)
        else:
            if sent:
                self.counters.add(published=artifact_count, published_bytes=sent)
                self._used[key] = None
        self._count_troubles()
        return True

    def record_fallback(self, error: Exception) -> None:
        """Counts a fallback; the first of each reason is logged. Whatever is no `CacheError` is a
        fault of the cache itself.
        """
        if not isinstance(error, CacheError):
            _log.debug("the cache failed", exc_info=error)
            error = CacheError(Reason.INTERNAL, repr(error))
        self._count_fallback(error)

    def _count_fallback(self, error: CacheError) -> None:
        if self.counters.fallback(error.reason):
            _log.warning(
                "graphstash: %s; the job goes on (further %r errors are counted, not logged)",
                error,
                error.reason.value,
            )

    def forget(self, compilation: InFlightCompile) -> None:
        """A compilation has ended."""
        self._open.discard(compilation)
        if self.limit is not None:
            self.limit.ended(compilation.key)

    def compiled(self, key: ArtifactKey, *, seconds: float) -> None:
        """This thread has just compiled something."""
        self.counters.compiled(key, seconds=seconds)
        if self.limit is not None:
            self.limit.compiled(seconds)
            self.limit.ended(key)

    def abandon_unfinished(self) -> None:
        """Releases the leases of unfinished compilations; uploads continue."""
        for compilation in tuple(self._open):
            if compilation.is_compiling:
                with suppress(Exception):
                    compilation.abandon()

    def abandon_all(self) -> None:
        """Releases every lease, so that no other job waits for one that ends."""
        for compilation in tuple(self._open):
            with suppress(Exception):
                compilation.abandon()
        until = monotonic() + _GOODBYE_SECONDS
        for lease in self._leases:
            lease.join(max(0.0, until - monotonic()))

    def _begin(
        self,
        request: CompileRequest,
        *,
        lease: HeldLease | None = None,
        fallback_reason: Reason | None = None,
        wanted: bool = True,
    ) -> InFlightCompile:
        compilation = InFlightCompile(
            self, request, lease=lease, fallback_reason=fallback_reason, wanted=wanted
        )
        self._open.add(compilation)
        if self.limit is not None:
            self.limit.begin(request, fallback_reason)
        return compilation

    def _is_healed(self, key: ArtifactKey, reason: Reason) -> bool:
        """Tells the server that its bytes were not those it announced; True when it agrees."""
        if reason is not Reason.DIGEST_MISMATCH or self.stash.server.is_read_only:
            return False
        try:
            return self.stash.server.verify(key).healed
        except Exception as error:  # noqa: BLE001 - on the way of the hook's outermost frame
            _log.debug("the server cannot verify %s: %r", key, error)
            return False

    def _found(self, key: ArtifactKey, destination: Destination, *, since: float) -> Fetched | None:
        """Fetches the artifact, and counts the hit of who has looked for it `since` then."""
        fetched = self._fetch(key, destination)
        if fetched is not None:
            self.counters.hit(
                key,
                self._source_of(key, fetched),
                began=since,
                compile_seconds=fetched.compile_seconds,
            )
        return fetched

    def _source_of(self, key: ArtifactKey, fetched: Fetched) -> Source:
        return "server" if fetched.source == "remote" else self.stash.downloads.source_of(key)

    def _fetch(self, key: ArtifactKey, destination: Destination) -> Fetched | None:
        started = monotonic()
        try:
            fetched = self._copy_unsent(key, destination) or self.stash.fetch(key, destination)
        except VerificationError as error:
            for refused in error.earlier:
                self.record_fallback(refused)
            if error.namespace in (None, self.config.namespace):
                raise
            # What lies elsewhere keeps nobody from publishing a sound one here.
            self.record_fallback(error)
            return None
        if fetched is None:
            return None
        for refused in fetched.refused:
            self.record_fallback(refused)
        self._count_troubles()
        self._used[key] = None
        self.counters.add(
            unsigned=int(fetched.is_unsigned),
            fetched_bytes=fetched.size_bytes,
            fetch_seconds=monotonic() - started,
        )
        return fetched

    def _count_troubles(self) -> None:
        """Counts what this host's disk did not keep."""
        while self.stash.local.troubles:
            self.record_fallback(self.stash.local.troubles.popleft())

    def _copy_unsent(self, key: ArtifactKey, destination: Destination) -> Fetched | None:
        """What this process has compiled and not yet stored is there already."""
        for compilation in tuple(self._open):
            if compilation.key == key and (copied := compilation.copy_unsent(destination)):
                return copied
        return None

    def _hold(self, key: ArtifactKey, reply: LeaseReply) -> HeldLease | None:
        try:
            lease = HeldLease(
                self.stash.server,
                key,
                token=reply.token or "",
                ttl_seconds=reply.ttl_seconds or self.config.lease_seconds,
                budget_seconds=max(self.config.wait_seconds, self.config.lease_seconds),
            )
        except RuntimeError:  # no thread can be started, so nothing would renew it
            self.stash.server.release(key, reply.token or "", LeaseOutcome.FAILED)
            return None
        self._leases = [*(held for held in self._leases if not held.is_over), lease]
        return lease

    def _wait_or_start(
        self, key: ArtifactKey, destination: Destination
    ) -> tuple[bool, HeldLease | None]:
        """Waits until the artifact is at `destination` (True) or somebody has to compile it."""
        is_awaited = any(each.is_awaited for each in tuple(self._open))
        started = monotonic()
        false_promises = 0
        with self.waits.wait() as wait:
            while True:
                asked, seconds = monotonic(), min(_MAX_POLL_SECONDS, wait.left)
                reply = self.stash.server.acquire(key, wait_seconds=seconds)
                match reply.state:
                    case LeaseState.GRANTED:
                        return False, self._hold(key, reply)
                    case LeaseState.READY:
                        if (found := self._found(key, destination, since=started)) is not None:
                            wait.saved_seconds = found.compile_seconds
                            if wait.has_begun:
                                self.counters.add(waits=1, wait_seconds=monotonic() - started)
                            return True, None
                        false_promises += 1
                        if false_promises >= _READY_WITHOUT_ARTIFACT:
                            return False, None
                    case LeaseState.HELD:
                        holder = printable(reply.holder or "another job", most=_HOLDER_CHARACTERS)
                        why_not = _OWN_COMPILE if is_awaited else wait.why_not(holder)
                        if why_not is not None:
                            detail = f"{holder} still compiles {key}: {why_not}"
                            raise CacheError(Reason.WAIT_BUDGET, detail)
                        # A server that answers at once, as it is closing, is not asked at once.
                        if seconds:
                            sleep(max(0.0, min(asked + _MIN_POLL_SECONDS - monotonic(), wait.left)))
