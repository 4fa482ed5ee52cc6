"""Find an artifact or compile it: the one path that every hook takes. It fails open.

    local tier -> server -> lease: granted   compile here, publish in the background
                                   ready     fetch it
                                   held      wait, bounded by the compile budget
    any trouble on the way                   compile here, counted under its reason

Nothing in here raises because of the cache, and nothing waits without a bound.
"""

import logging
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from graphstash._compilation import Compilation
from graphstash._config import ClientConfig
from graphstash._errors import (
    CacheError,
    ConflictError,
    LocalTierError,
    Reason,
    VerificationError,
)
from graphstash._executor import BoundedExecutor
from graphstash._lease import HeldLease
from graphstash._stash import Fetched, Stash
from graphstash._stats import Counters
from graphstash_schema import (
    ArtifactKey,
    ArtifactMetadata,
    LeaseReply,
    LeaseState,
)

__all__ = ["Compilation", "CompileCache"]

_log = logging.getLogger("graphstash")

_SHORTEST_POLL_SECONDS: Final = 0.5

_LONG_POLL_SECONDS: Final = 20.0
"""One call's share of a longer wait: shorter than the idle time-outs of common proxies."""

_DAMAGED: Final = (
    *(Reason.DIGEST_MISMATCH, Reason.CORRUPT, Reason.WRONG_KEY, Reason.TOO_LARGE),
    *(Reason.BAD_SIGNATURE, Reason.UNKNOWN_KEY, Reason.REVOKED_KEY, Reason.UNSIGNED),
)
"""Reasons for which an artifact is stored under the key, but of no use."""

_GOODBYE_SECONDS: Final = 2.0
"""How long a job that ends may take to release its leases."""

_READY_WITHOUT_ARTIFACT: Final = 3
"""How often "it is ready" may turn out to be a miss before one compiles."""


class CompileCache:
    """Finds artifacts or hands out compilations; one per process.

    Args:
        stash: closed by whoever made it.
        counters: what happened.
        publisher: runs uploads; drained and closed by whoever made it.
    """

    def __init__(self, stash: Stash, *, counters: Counters, publisher: BoundedExecutor) -> None:
        self.stash = stash
        self.counters = counters
        self.publisher = publisher
        self._open: set[Compilation] = set()  # one bytecode operation each: safe between threads
        self._leases: list[HeldLease] = []
        self._used: dict[ArtifactKey, None] = {}

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
    ) -> bytes:
        """The payload of an artifact: fetched when anybody has compiled it, else compiled here.

        Args:
            key: what is wanted.
            compile_payload: makes it; its exceptions pass through.
            parts: what the fingerprint was made of; shown when a miss is explained.
            toolchain: versions, for people and retention.
        """
        found = self.get_or_begin(key)
        if isinstance(found, bytes):
            return found
        started = monotonic()
        try:
            compiled = compile_payload()
        except BaseException:
            found.abandon()
            raise
        found.publish_bytes(
            compiled,
            compile_seconds=monotonic() - started,
            parts=parts or {},
            toolchain=toolchain,
        )
        return compiled

    def get_or_begin(self, key: ArtifactKey, *, lease: bool = True) -> bytes | Compilation:
        """The verified payload, or its compilation: `find_or_begin` for those that want bytes."""
        try:
            with tempfile.TemporaryDirectory(
                prefix="graphstash-", ignore_cleanup_errors=True
            ) as directory:
                payload = Path(directory) / "payload"
                compilation = self.find_or_begin(key, payload, lease=lease)
                return payload.read_bytes() if compilation is None else compilation
        except OSError as error:
            self.trouble(LocalTierError(str(error)))
            return self._begin(key, trouble=Reason.LOCAL_IO)

    def find_or_begin(
        self, key: ArtifactKey, destination: Path, *, lease: bool = True
    ) -> Compilation | None:
        """Puts the artifact's payload at `destination`, or hands out its compilation.

        Never raises. Waits for a colleague's compilation no longer than the compile budget.

        Args:
            key: what is wanted.
            destination: gets the payload.
            lease: whether to ask for the right to compile, and to wait while somebody has it.

        Returns:
            None when the verified payload is at `destination`.
        """
        trouble: Reason | None = None
        wanted = True
        held: HeldLease | None = None
        try:
            if self._found(key, destination, since=monotonic()):
                return None
            found = False
            if lease and not self.stash.is_read_only:
                found, held = self._wait_or_begin(key, destination)
            if found:
                return None
            self.counters.add(misses=1)
        except CacheError as error:
            self.trouble(error)
            trouble = error.reason
            # What did not verify is still stored under the key; a second upload is refused anyway,
            # unless the server finds its bytes damaged and drops them.
            wanted = error.reason not in _DAMAGED or self._is_healed(key, error.reason)
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: training goes on
            _log.debug("cache look-up failed", exc_info=True)
            trouble = Reason.INTERNAL
            self.trouble(CacheError(trouble, repr(error)))
        return self._begin(key, lease=held, trouble=trouble, wanted=wanted)

    def begin(self, key: ArtifactKey) -> Compilation:
        """Hands out a compilation without a look-up."""
        return self._begin(key)

    def reject(self, key: ArtifactKey, detail: str) -> None:
        """Counts that the compiler could not load a verified artifact; this host forgets it."""
        self.stash.forget(key)
        self.trouble(CacheError(Reason.REJECTED, detail))

    def get(self, key: ArtifactKey) -> bytes | None:
        """The payload when anybody has it; never raises or compiles."""
        try:
            with tempfile.TemporaryDirectory(
                prefix="graphstash-", ignore_cleanup_errors=True
            ) as directory:
                payload = Path(directory) / "payload"
                return payload.read_bytes() if self.found(key, payload) else None
        except OSError as error:
            self.trouble(LocalTierError(str(error)))
            return None

    def found(self, key: ArtifactKey, destination: Path) -> bool:
        """Puts the payload at `destination` when anybody has it; never raises or compiles."""
        try:
            return self._found(key, destination, since=monotonic())
        except CacheError as error:
            self.trouble(error)
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: training goes on
            self.trouble(CacheError(Reason.INTERNAL, repr(error)))
        return False

    def store(
        self, key: ArtifactKey, payload: Path, metadata: ArtifactMetadata, *, local_only: bool
    ) -> bool:
        """Publishes an artifact; never raises. True when the server has it afterwards."""
        try:
            sent = self.stash.put(key, payload, metadata, local_only=local_only)
        except ConflictError:
            self.counters.add(conflicts=1)
            self._used[key] = None
            return True
        except CacheError as error:
            self.trouble(error)
            return False
        except Exception as error:  # noqa: BLE001 - a background thread's outermost frame
            _log.debug("publishing failed", exc_info=True)
            self.trouble(CacheError(Reason.INTERNAL, repr(error)))
            return False
        if sent:
            self.counters.add(published=1, published_bytes=sent)
            self._used[key] = None
        return bool(sent)

    def trouble(self, error: CacheError) -> None:
        """Counts a fallback; the first of each reason is logged."""
        if self.counters.fallback(error.reason):
            _log.warning(
                "graphstash: %s; the job goes on without (further cases of %r are only counted)",
                error,
                error.reason.value,
            )

    def forget(self, compilation: Compilation) -> None:
        """A compilation has ended."""
        self._open.discard(compilation)

    def abandon_unfinished(self) -> None:
        """Releases the leases of what the compiler is not done with; uploads go on."""
        for compilation in tuple(self._open):
            if compilation.is_compiling:
                with suppress(Exception):
                    compilation.abandon()

    def abandon_all(self) -> None:
        """Releases every lease, so that nobody waits for a job that ends."""
        for compilation in tuple(self._open):
            with suppress(Exception):
                compilation.abandon()
        until = monotonic() + _GOODBYE_SECONDS
        for lease in self._leases:
            lease.join(max(0.0, until - monotonic()))

    def _begin(
        self,
        key: ArtifactKey,
        *,
        lease: HeldLease | None = None,
        trouble: Reason | None = None,
        wanted: bool = True,
    ) -> Compilation:
        compilation = Compilation(self, key, lease=lease, trouble=trouble, wanted=wanted)
        self._open.add(compilation)
        return compilation

    def _is_healed(self, key: ArtifactKey, reason: Reason) -> bool:
        """Tells the server that its bytes were not those it announced; True when it agrees."""
        if reason is not Reason.DIGEST_MISMATCH or self.stash.is_read_only:
            return False
        try:
            return self.stash.verify(key).healed
        except Exception as error:  # noqa: BLE001 - on the way of the hook's outermost frame
            _log.debug("the server cannot look at %s: %r", key, error)
            return False

    def _found(self, key: ArtifactKey, destination: Path, *, since: float) -> bool:
        """Fetches the artifact; what was saved is its compilation less all the time `since`."""
        started = monotonic()
        try:
            fetched = self._copy_unsent(key, destination) or self.stash.fetch(key, destination)
        except VerificationError as error:
            for refused in error.earlier:
                self.trouble(refused)
            if error.namespace in (None, self.config.namespace):
                raise
            # What lies elsewhere keeps nobody from publishing a sound one here.
            self.trouble(error)
            return False
        if fetched is None:
            return False
        for refused in fetched.refused:
            self.trouble(refused)
        now = monotonic()
        self._used[key] = None
        self.counters.add(
            **{f"hits_{fetched.source}": 1},
            unsigned=int(fetched.is_unsigned),
            fetched_bytes=fetched.size_bytes,
            fetch_seconds=now - started,
            saved_seconds=max(0.0, fetched.compile_seconds - (now - since)),
        )
        return True

    def _copy_unsent(self, key: ArtifactKey, destination: Path) -> Fetched | None:
        """What this process has compiled and not yet stored is there already."""
        for compilation in tuple(self._open):
            if compilation.key == key and (copied := compilation.copy_unsent(destination)):
                return copied
        return None

    def _hold(self, key: ArtifactKey, reply: LeaseReply) -> HeldLease:
        lease = HeldLease(
            self.stash,
            key,
            token=reply.token or "",
            ttl_seconds=reply.ttl_seconds or self.config.lease_seconds,
            budget_seconds=max(self.config.wait_seconds, self.config.lease_seconds),
        )
        self._leases = [*(held for held in self._leases if not held.is_over), lease]
        return lease

    def _wait_or_begin(self, key: ArtifactKey, destination: Path) -> tuple[bool, HeldLease | None]:
        """Waits until the artifact is at `destination` (True) or somebody has to compile it."""
        budget = self.config.wait_seconds
        if any(compilation.is_awaited for compilation in tuple(self._open)):
            budget = 0.0  # see `Compilation.is_awaited`
        started = monotonic()
        false_promises = 0
        waited = False
        while True:
            asked = monotonic()
            left = budget - (asked - started)
            reply = self.stash.acquire(key, wait_seconds=max(0.0, min(_LONG_POLL_SECONDS, left)))
            match reply.state:
                case LeaseState.GRANTED:
                    return False, self._hold(key, reply)
                case LeaseState.READY:
                    if self._found(key, destination, since=started):
                        if waited or monotonic() - started > 0.2:
                            self.counters.add(waits=1, wait_seconds=monotonic() - started)
                        return True, None
                    false_promises += 1
                    if false_promises >= _READY_WITHOUT_ARTIFACT:
                        return False, None
                case LeaseState.HELD:
                    waited = True
                    if monotonic() - started >= budget:
                        raise CacheError(
                            Reason.WAIT_BUDGET,
                            f"{reply.holder or 'somebody'} still compiles {key} after {budget:g} s",
                        )
                    # A server that answers at once, because it is closing, is not asked at once.
                    sleep(max(0.0, min(asked + _SHORTEST_POLL_SECONDS - monotonic(), left)))
