"""InFlightCompile: a graph that has to be compiled here, from the miss to the end of its upload.

HeldLease: the right to compile it, kept alive while the compiler runs.
"""

import io
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Protocol

from graphstash._artifacts.stash import Destination, Fetched
from graphstash._compile.request import CompileRequest
from graphstash._executor import BoundedExecutor
from graphstash._http.client import ServerClient
from graphstash.errors import CacheError, LeaseLostError, LocalTierError, Reason
from graphstash_schema import ArtifactKey, ArtifactMetadata, LeaseOutcome
from graphstash_schema.protocol import MAX_LEASE_SECONDS, MIN_LEASE_SECONDS

__all__ = ["HeldLease", "InFlightCompile", "Owner"]


class HeldLease:
    """Renews a lease three times per lifetime, in a daemon thread, until it is released.

    A lost or unreachable lease stops nothing here: leases are advice. `release` ends the thread,
    which then tells the server, unless the artifact is there: its upload has ended the lease.

    Args:
        server: where the lease was granted.
        key: what may be compiled.
        token: what the grant returned.
        ttl_seconds: lifetime without a renewal.
        budget_seconds: after this long nothing is renewed any more, so that a compiler which hangs
            does not keep a team waiting for ever.

    Raises:
        RuntimeError: on construction, when no thread can be started.
    """

    def __init__(
        self,
        server: ServerClient,
        key: ArtifactKey,
        *,
        token: str,
        ttl_seconds: float,
        budget_seconds: float,
    ) -> None:
        self._server = server
        self._key = key
        self._token = token
        self._interval_seconds = min(max(ttl_seconds, MIN_LEASE_SECONDS), MAX_LEASE_SECONDS) / 3
        self._until = monotonic() + budget_seconds
        self._released = threading.Event()
        self._outcome = LeaseOutcome.FAILED
        self._thread = threading.Thread(target=self._keep, name="graphstash-lease", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # a thread that runs all the same gives the lease back
            self._released.set()
            raise

    def release(self, outcome: LeaseOutcome) -> None:
        """Ends the lease, without waiting for the server; harmless when it was ended before."""
        if not self._released.is_set():
            self._outcome = outcome
            self._released.set()

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to do for it."""
        return not self._thread.is_alive()

    def join(self, timeout_seconds: float) -> None:
        """Waits until the server has been told."""
        self._thread.join(timeout_seconds)

    def _keep(self) -> None:
        while not self._released.wait(self._interval_seconds) and monotonic() < self._until:
            try:
                self._server.renew(self._key, self._token)
            except LeaseLostError:
                return
            except CacheError:
                continue  # the next renewal may still come in time
        if self._released.is_set() and self._outcome is LeaseOutcome.FAILED:
            with suppress(CacheError):
                self._server.release(self._key, self._token, self._outcome)


class Owner(Protocol):
    """What a compilation needs of the cache that handed it out.

    Attributes:
        publisher: runs the upload.
    """

    publisher: BoundedExecutor

    def compiled(self, key: ArtifactKey, *, seconds: float) -> None:
        """This thread has just compiled something."""

    def store(
        self, key: ArtifactKey, payload: Path, metadata: ArtifactMetadata, *, local_only: bool
    ) -> bool:
        """Publishes an artifact; never raises. True when the server has it afterwards."""

    def record_fallback(self, error: CacheError) -> None:
        """Counts a fallback."""

    def forget(self, compilation: "InFlightCompile") -> None:
        """The compilation has ended."""


class InFlightCompile:
    """A graph that has to be compiled here; ends with `publish` or `abandon`.

    Attributes:
        key: what is compiled.
        fallback_reason: why the cache could not help; None for a plain miss.
        is_compiling: until the compiler is done with it.
        is_wanted: whether the server would take the result.

    Args:
        owner: gets the result.
        request: what is compiled.
        lease: the right to compile, when it was granted.
        fallback_reason: see the attribute.
        wanted: False when the server would refuse the result anyway: it stays on this host.
    """

    def __init__(
        self,
        owner: Owner,
        request: CompileRequest,
        *,
        lease: HeldLease | None = None,
        fallback_reason: Reason | None = None,
        wanted: bool = True,
    ) -> None:
        self.key = request.key
        self.fallback_reason = fallback_reason
        self._owner = owner
        self._request = request
        self._lease = lease
        self.is_wanted = wanted
        self._done: Callable[[], None] | None = None
        self._unsent: tuple[Path, float] | None = None
        self.is_compiling = True

    @property
    def is_awaited(self) -> bool:
        """Whether others may wait for the compiler to be done with it.

        While that is so this process waits for nobody: two processes that compile and wait
        crosswise would wait for ever.
        """
        return self.is_compiling and self._lease is not None

    def publish(
        self,
        payload: Path,
        *,
        compile_seconds: float,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Uploads the result in the background; never raises, never waits.

        Args:
            payload: what the compiler made; must stay until `done`.
            compile_seconds: wall time it took.
            done: called when the payload is not needed any more.
        """
        self.is_compiling = False
        self._done = done
        self._unsent = (payload, compile_seconds)
        self._owner.compiled(self.key, seconds=compile_seconds)

        def work() -> None:
            outcome = LeaseOutcome.FAILED
            try:
                metadata = self._request.metadata(
                    compile_seconds=compile_seconds, raw_size_bytes=payload.stat().st_size
                )
                if self._owner.store(self.key, payload, metadata, local_only=not self.is_wanted):
                    outcome = LeaseOutcome.PUBLISHED
            finally:
                self._finish(outcome)

        if not self._owner.publisher.submit(work):
            self._owner.record_fallback(
                CacheError(Reason.QUEUE_FULL, "too many artifacts wait for their upload")
            )
            self._finish(LeaseOutcome.FAILED)

    def publish_bytes(
        self,
        payload: bytes,
        *,
        compile_seconds: float,
    ) -> None:
        """Uploads a result that is in memory, as `publish` does; never raises, unless the thread is
        interrupted.
        """
        path: Path | None = None
        try:
            with tempfile.NamedTemporaryFile(prefix="graphstash-", delete=False) as file:
                path = Path(file.name)
                file.write(payload)
        except BaseException as error:
            if path is not None:  # a full disk is not to be filled further
                path.unlink(missing_ok=True)
            self.abandon()
            if not isinstance(error, OSError):
                raise
            self._owner.record_fallback(LocalTierError(str(error)))
            return
        self.publish(
            path,
            compile_seconds=compile_seconds,
            done=lambda: path.unlink(missing_ok=True),
        )

    def copy_unsent(self, destination: Destination) -> Fetched | None:
        """Copies the result from here while its upload waits; None before and after."""
        unsent = self._unsent
        if unsent is None:
            return None
        payload, compile_seconds = unsent
        partial: Path | None = None
        try:
            if isinstance(destination, io.BytesIO):
                size = destination.write(payload.read_bytes())
                return Fetched("local", 0, size, compile_seconds)
            # By rename, because a compiler may take whatever is at the destination.
            with tempfile.NamedTemporaryFile(
                dir=destination.parent, prefix=".graphstash-", delete=False
            ) as file:
                partial = Path(file.name)
            shutil.copyfile(payload, partial)
            size = partial.stat().st_size
            partial.replace(destination)
        except FileNotFoundError:  # it was stored in this moment
            return None
        except OSError as error:
            raise LocalTierError(f"{payload}: {error}") from error
        finally:
            if partial is not None:
                partial.unlink(missing_ok=True)
        return Fetched("local", 0, size, compile_seconds)

    def abandon(self) -> None:
        """Nothing is coming of this compilation: the next waiter may try; never waits."""
        self._finish(LeaseOutcome.FAILED)

    def _finish(self, outcome: LeaseOutcome) -> None:
        self.is_compiling = False
        self._unsent = None
        if self._lease is not None:
            self._lease.release(outcome)
        self._owner.forget(self)
        done, self._done = self._done, None
        if done is not None:
            done()
