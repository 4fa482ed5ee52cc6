"""TracedCache: a cache that records the spans of a job.

    graphstash.lookup           kind, label, outcome (hit, miss, fallback), source, size_bytes
      GET, POST                 calls to the server; the server adds spans of its work to each call
      graphstash.compile        outcome (compiled, abandoned); ends when the compiler finishes
        graphstash.publish      outcome (published, kept on this host); in the background
          PUT                   the upload

The span of a compilation is a child of the span of the look-up that missed, although the look-up
ends first. So both belong to one trace, even if the user's program has no spans.
"""

from pathlib import Path

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from graphstash._artifacts.stash import Destination, Fetched, Stash
from graphstash._compile.cache import CompileCache, FetchedPack, PackOutcome
from graphstash._compile.in_flight import HeldLease, InFlightCompile
from graphstash._compile.request import CompileRequest
from graphstash._compile.stats import Counters
from graphstash._executor import BoundedExecutor
from graphstash._tracing import Tracer
from graphstash.errors import CacheError, Reason
from graphstash_schema import ArtifactKey, ArtifactMetadata
from graphstash_schema.names import line_of

__all__ = ["TracedCache"]

_LABEL_CHARACTERS = 256


class TracedCache(CompileCache):
    """A `CompileCache` that records spans. Jobs without tracing use `CompileCache`."""

    def __init__(
        self, stash: Stash, *, counters: Counters, publisher: BoundedExecutor, tracer: Tracer
    ) -> None:
        super().__init__(stash, counters=counters, publisher=publisher)
        self._tracer = tracer
        # If two threads compile one key, the second compilation ends the span of the first.
        self._compiling: dict[ArtifactKey, Span] = {}

    def fetch_or_start(
        self, request: CompileRequest, destination: Destination, *, lease: bool = True
    ) -> InFlightCompile | None:
        """See `CompileCache.fetch_or_start`."""
        with self._tracer.span("graphstash.lookup", _of(request.key, request.label)):
            compilation = super().fetch_or_start(request, destination, lease=lease)
            if compilation is None:
                self._tracer.note(outcome="hit")
            elif compilation.fallback_reason is None:
                self._tracer.note(outcome="miss")
            else:
                self._tracer.note(outcome="fallback", reason=compilation.fallback_reason.value)
            return compilation

    def try_fetch(self, key: ArtifactKey, destination: Destination) -> bool:
        """See `CompileCache.try_fetch`."""
        with self._tracer.span("graphstash.lookup", _of(key)):
            self._tracer.note(outcome="miss")
            is_found = super().try_fetch(key, destination)
            if is_found:
                self._tracer.note(outcome="hit")
            return is_found

    def fetch_pack(self, key: ArtifactKey, *, max_bytes: int | None = None) -> FetchedPack | None:
        """See `CompileCache.fetch_pack`."""
        with self._tracer.span("graphstash.lookup", _of(key, "pack")):
            self._tracer.note(outcome="miss")
            pack = super().fetch_pack(key, max_bytes=max_bytes)
            if pack is not None and pack.trouble is None:
                self._tracer.note(outcome="hit")
            return pack

    def _count_fallback(self, error: CacheError) -> None:
        self._tracer.note(outcome="fallback", reason=error.reason.value)
        super()._count_fallback(error)

    def store(
        self, key: ArtifactKey, payload: Path, metadata: ArtifactMetadata, *, local_only: bool
    ) -> bool:
        """See `CompileCache.store`."""
        attributes = _of(key) | {"graphstash.size_bytes": metadata.raw_size_bytes}
        parent = self._compiling.get(key)
        with self._tracer.span("graphstash.publish", attributes, parent=parent):
            is_published = super().store(key, payload, metadata, local_only=local_only)
            self._tracer.note(outcome="published" if is_published else "kept")
            return is_published

    def store_pack(
        self, key: ArtifactKey, payload: bytes, metadata: ArtifactMetadata, *, artifact_count: int
    ) -> PackOutcome:
        """See `CompileCache.store_pack`."""
        attributes = _of(key, "pack") | {"graphstash.size_bytes": len(payload)}
        with self._tracer.span("graphstash.publish", attributes):
            outcome = super().store_pack(key, payload, metadata, artifact_count=artifact_count)
            is_published = outcome is PackOutcome.STORED
            self._tracer.note(outcome="published" if is_published else "kept")
            return outcome

    def count_compilation(self, key: ArtifactKey, *, seconds: float) -> None:
        """See `CompileCache.count_compilation`."""
        if (span := self._compiling.get(key)) is not None:
            self._tracer.end(span, outcome="compiled", compile_seconds=seconds)
        super().count_compilation(key, seconds=seconds)

    def forget(self, compilation: InFlightCompile) -> None:
        """See `CompileCache.forget`."""
        self._end_abandoned(compilation.key)
        super().forget(compilation)

    def _begin(
        self,
        request: CompileRequest,
        *,
        lease: HeldLease | None = None,
        fallback_reason: Reason | None = None,
        wanted: bool = True,
    ) -> InFlightCompile:
        self._end_abandoned(request.key)
        attributes = _of(request.key, request.label)
        self._compiling[request.key] = self._tracer.start("graphstash.compile", attributes)
        return super()._begin(request, lease=lease, fallback_reason=fallback_reason, wanted=wanted)

    def _fetch(self, key: ArtifactKey, destination: Destination) -> Fetched | None:
        fetched = super()._fetch(key, destination)
        if fetched is not None:
            source = self._source_of(key, fetched)
            self._tracer.note(size_bytes=fetched.size_bytes, source=source)
        return fetched

    def _end_abandoned(self, key: ArtifactKey) -> None:
        span = self._compiling.pop(key, None)
        if span is not None and span.is_recording():
            self._tracer.end(span, outcome="abandoned")


def _of(key: ArtifactKey, label: str = "") -> dict[str, AttributeValue]:
    named = {"graphstash.label": line_of(label, most=_LABEL_CHARACTERS)} if label else {}
    return {
        "graphstash.kind": key.kind.value,
        "graphstash.device_type": str(key.device_type),
        "graphstash.fingerprint": str(key.fingerprint),
        **named,
    }
