"""Compilation: a graph that has to be compiled here, from the miss to the end of its upload."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from graphstash._config import holder_name
from graphstash._errors import CacheError, LocalTierError, Reason
from graphstash._lease import HeldLease
from graphstash._stash import Fetched
from graphstash_schema import ArtifactKey, ArtifactMetadata, LeaseOutcome, parts_for_display
from graphstash_schema.names import line_of

if TYPE_CHECKING:
    from graphstash._compile import CompileCache

__all__ = ["Compilation"]


class Compilation:
    """A graph that has to be compiled here; ends with `publish` or `abandon`.

    Attributes:
        key: what is compiled.
        trouble: why the cache could not help; None for a plain miss.
        is_compiling: until the compiler is done with it.

    Args:
        cache: gets the result.
        key: what is compiled.
        lease: the right to compile, when it was granted.
        trouble: see the attribute.
        wanted: False when the server would refuse the result anyway: it stays on this host.
    """

    def __init__(
        self,
        cache: "CompileCache",
        key: ArtifactKey,
        *,
        lease: HeldLease | None = None,
        trouble: Reason | None = None,
        wanted: bool = True,
    ) -> None:
        self.key = key
        self.trouble = trouble
        self._cache = cache
        self._lease = lease
        self._wanted = wanted
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
        parts: Mapping[str, str],
        toolchain: str,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Uploads the result in the background; never raises, never waits.

        Args:
            payload: what the compiler made; must stay until `done`.
            compile_seconds: wall time it took.
            parts: what the fingerprint was made of.
            toolchain: versions, for people and retention.
            done: called when the payload is not needed any more.
        """
        self.is_compiling = False
        self._done = done
        self._unsent = (payload, compile_seconds)
        self._cache.counters.add(compile_seconds=compile_seconds)

        def work() -> None:
            outcome = LeaseOutcome.FAILED
            try:
                metadata = ArtifactMetadata(
                    compile_seconds=compile_seconds,
                    raw_size_bytes=payload.stat().st_size,
                    toolchain=line_of(toolchain, most=256),
                    producer=holder_name(),
                    parts=parts_for_display(parts),
                )
                if self._cache.store(self.key, payload, metadata, local_only=not self._wanted):
                    outcome = LeaseOutcome.PUBLISHED
            finally:
                self._finish(outcome)

        if not self._cache.publisher.submit(work):
            self._cache.trouble(
                CacheError(Reason.QUEUE_FULL, "too many artifacts wait for their upload")
            )
            self._finish(LeaseOutcome.FAILED)

    def publish_bytes(
        self,
        payload: bytes,
        *,
        compile_seconds: float,
        parts: Mapping[str, str],
        toolchain: str,
    ) -> None:
        """Uploads a result that is in memory, as `publish` does; never raises."""
        path: Path | None = None
        try:
            with tempfile.NamedTemporaryFile(prefix="graphstash-", delete=False) as file:
                path = Path(file.name)
                file.write(payload)
        except OSError as error:
            self._cache.trouble(LocalTierError(str(error)))
            if path is not None:  # a full disk is not to be filled further
                path.unlink(missing_ok=True)
            self.abandon()
            return
        self.publish(
            path,
            compile_seconds=compile_seconds,
            parts=parts,
            toolchain=toolchain,
            done=lambda: path.unlink(missing_ok=True),
        )

    def copy_unsent(self, destination: Path) -> Fetched | None:
        """Copies the result from here while its upload waits; None before and after."""
        unsent = self._unsent
        if unsent is None:
            return None
        payload, compile_seconds = unsent
        partial: Path | None = None
        try:
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
            raise LocalTierError(f"{destination}: {error}") from error
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
        self._cache.forget(self)
        done, self._done = self._done, None
        if done is not None:
            done()
