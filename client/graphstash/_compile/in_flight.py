"""InFlightCompile: a compilation of this process, from the miss to the end of the upload.

HeldLease: the right to compile, renewed while the compiler runs.
"""

import io
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

import graphstash_schema as schema
from graphstash._artifacts.stash import Destination, Fetched
from graphstash._compile.request import CompileRequest
from graphstash._forking import is_of, unforked
from graphstash._http.client import ServerClient
from graphstash._replacing import replacing
from graphstash.errors import BusyError, CacheError, LeaseLostError, LocalTierError, Reason
from graphstash_schema import ArtifactKey
from graphstash_schema.protocol import MAX_LEASE_SECONDS, MIN_LEASE_SECONDS

if TYPE_CHECKING:
    from graphstash_schema import ArtifactMetadata, LeaseOutcome

__all__ = ["HeldLease", "InFlightCompile", "Owner"]

_MIN_BUSY_SECONDS: Final = 1.0
"""Minimum seconds between two renewals if the server is busy."""


class HeldLease:
    """Renews a lease three times per lifetime, in a daemon thread, until `release`.

    A lease is advice: if it is lost, the compilation continues. After `release`, the thread
    releases the lease on the server, unless it is over or the upload has ended it. The thread stops
    after `budget_seconds`, so that no job waits forever for a hanging compiler.

    Raises:
        RuntimeError: The process can start no further threads.
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
        self._outcome = schema.LeaseOutcome.FAILED
        self._thread = threading.Thread(target=self._keep, name="graphstash-lease", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # if the thread has started after all, it releases the lease
            self._released.set()
            raise

    def release(self, outcome: "LeaseOutcome") -> None:
        """End the lease without waiting for the server. A second call has no effect."""
        if not self._released.is_set():
            self._outcome = outcome
            self._released.set()

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended: the lease was released, was lost, or ran out of budget."""
        return not self._thread.is_alive()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of the thread, at most `timeout_seconds`."""
        self._thread.join(timeout_seconds)

    def _keep(self) -> None:
        pause_seconds = self._interval_seconds
        while not self._released.wait(pause_seconds) and monotonic() < self._until:
            pause_seconds = self._interval_seconds
            try:
                with unforked():
                    self._server.renew(self._key, self._token)
            except LeaseLostError:
                return
            except BusyError as error:  # another process gets the lease if it ends
                asked_seconds = max(_MIN_BUSY_SECONDS, error.retry_after_seconds)
                pause_seconds = min(pause_seconds, asked_seconds)
            except CacheError:
                continue  # the next renewal may still be in time
        if self._released.is_set() and self._outcome is schema.LeaseOutcome.FAILED:
            with suppress(CacheError), unforked():
                self._server.release(self._key, self._token, self._outcome)


class _UnnamedFile:
    """A temporary file that no directory lists, so that a killed process leaves nothing behind.

    The file is closed with this object, not at the end of the upload: another thread may still
    read it by its number, which must not become the number of another file.
    """

    def __init__(self, content: bytes | memoryview) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.flush()
            self._status = os.fstat(file.fileno())
            self._descriptor = os.dup(file.fileno())
        self.path = Path(f"/proc/self/fd/{self._descriptor}")

    def __del__(self) -> None:
        with suppress(AttributeError):  # the file could not be written
            if is_of(self._descriptor, self._status):  # a forked child may reuse the number
                os.close(self._descriptor)


class Owner(Protocol):
    """The interface of a cache that its compilations use."""

    def count_compilation(self, key: ArtifactKey, *, seconds: float) -> None:
        """Count a compilation that this thread has just finished."""

    def store(
        self, key: ArtifactKey, payload: Path, metadata: "ArtifactMetadata", *, local_only: bool
    ) -> bool:
        """Publish an artifact and return whether the server has it afterwards. Never raises."""

    def publish_later(self, work: Callable[[], None]) -> bool:
        """Run `work` in the background. Return False, and count a fallback, if too much waits."""

    def record_fallback(self, error: CacheError) -> None:
        """Count a fallback."""

    def forget(self, compilation: "InFlightCompile") -> None:
        """Remove a compilation that has ended."""


class InFlightCompile:
    """A compilation that this process has to run. The hook ends it with `publish` or `abandon`.

    Attributes:
        request: Request for the artifact.
        fallback_reason: Why the cache could not help, or None for a plain miss.
        is_compiling: True until the compiler has finished.
        is_wanted: Whether the server would accept the result. Otherwise only this host stores it.
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
        self.request = request
        self._lease = lease
        self.is_wanted = wanted
        self._done: Callable[[], None] | None = None
        self._unsent: tuple[Path, float] | None = None
        self._copy: _UnnamedFile | None = None
        self.is_compiling = True

    @property
    def is_awaited(self) -> bool:
        """Whether another process may wait for this compilation. If so, this process must not wait
        for another one: the two processes could wait for each other.
        """
        return self.is_compiling and self._lease is not None

    def publish(
        self,
        payload: Path,
        *,
        compile_seconds: float,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Upload the result in the background. Never raises or waits. The payload must exist until
        `done` is called.
        """
        self.is_compiling = False
        self._done = done
        self._unsent = (payload, compile_seconds)
        self._owner.count_compilation(self.key, seconds=compile_seconds)

        def work() -> None:
            outcome = schema.LeaseOutcome.FAILED
            try:
                metadata = self.request.metadata(
                    compile_seconds=compile_seconds, raw_size_bytes=payload.stat().st_size
                )
                if self._owner.store(self.key, payload, metadata, local_only=not self.is_wanted):
                    outcome = schema.LeaseOutcome.PUBLISHED
            finally:
                self._finish(outcome)

        if not self._owner.publish_later(work):
            self._finish(schema.LeaseOutcome.FAILED)

    def publish_bytes(
        self,
        payload: bytes | memoryview,
        *,
        compile_seconds: float,
    ) -> None:
        """Upload a copy of a result in memory, like `publish`. Counts an OSError as a fallback."""
        try:
            self._copy = _UnnamedFile(payload)
        except BaseException as error:
            self.abandon()
            if not isinstance(error, OSError):
                raise
            self._owner.record_fallback(LocalTierError(str(error)))
            return
        self.publish(self._copy.path, compile_seconds=compile_seconds)

    def copy_unsent(self, destination: Destination) -> Fetched | None:
        """Copy the result while its upload is pending; None before and after that. Raises
        `LocalTierError` if the disk fails.
        """
        unsent = self._unsent
        if unsent is None:
            return None
        payload, compile_seconds = unsent
        try:
            if isinstance(destination, io.BytesIO):
                size = destination.write(payload.read_bytes())
                return Fetched("local", 0, size, compile_seconds)
            # A compiler may read a partial file at the destination.
            with replacing(destination, is_text=False, is_durable=False) as file:
                shutil.copyfile(payload, file.name)
                size = Path(file.name).stat().st_size
        except FileNotFoundError:  # the upload has ended and removed the payload
            return None
        except OSError as error:
            raise LocalTierError(f"{payload}: {error}") from error
        return Fetched("local", 0, size, compile_seconds)

    def abandon(self) -> None:
        """End the compilation without a result, so that the next waiter may try. Never waits."""
        self._finish(schema.LeaseOutcome.FAILED)

    def _finish(self, outcome: "LeaseOutcome") -> None:
        self.is_compiling = False
        self._unsent = None
        if self._lease is not None:
            self._lease.release(outcome)
        self._owner.forget(self)
        done, self._done = self._done, None
        if done is not None:
            done()
