"""Tracing: the server's OpenTelemetry spans.

Imported only if `GRAPHSTASH_TRACING` is set. Each request is a span that continues the caller's
trace. The database, blob store and lease calls that it waits for are child spans. The server's
background work has no spans. The spans are sent with OTLP over HTTP. OpenTelemetry's own variables
configure the export and the sampling.

Callers are not trusted. The server reads only the header `traceparent`, and a caller cannot make it
record more (see `_ServerSampler`). It records no query, header or error text, because callers put
secrets there by mistake. The instrumentations of ASGI, botocore and FastAPI record URLs and error
texts, so they are not used. The instrumentation of SQLAlchemy would miss prepared statements.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes, AttributeValue

from graphstash_server import __version__
from graphstash_server.errors import StartError

__all__ = ["Tracing"]

_METHODS: Final = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE", "PATCH", "OPTIONS"})
"""Other methods are recorded as `_OTHER`, as OpenTelemetry specifies, because callers may invent
methods."""

_PROPAGATOR: Final = TraceContextTextMapPropagator()

_END_SECONDS: Final = 2.0
"""Seconds that the server's shutdown may wait for a collector."""


class _ServerSampler(Sampler):
    """Applies the sampler of `OTEL_TRACES_SAMPLER` to untrusted callers.

    A caller sets the sampled flag of its trace, and chooses the trace ID that a ratio sampler
    reads. So the caller's flag can only exclude a request. Otherwise, the configured sampler
    decides without the flag, and with an ID that the server generates. Child spans follow their
    request. Spans outside of a request are dropped.
    """

    def __init__(self, configured: Sampler) -> None:
        self._configured = configured
        self._new_id = RandomIdGenerator().generate_trace_id

    def should_sample(  # noqa: PLR0917 - the SDK passes them by position
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        parent = trace.get_current_span(parent_context).get_span_context()
        if kind is not SpanKind.SERVER:
            is_sampled = parent.is_valid and parent.trace_flags.sampled
            return SamplingResult(
                Decision.RECORD_AND_SAMPLE if is_sampled else Decision.DROP, attributes
            )
        own_id = self._new_id() if parent.is_valid else trace_id
        described: Any = (own_id, name, kind, attributes, links, trace_state)
        result = self._configured.should_sample(parent_context, *described)
        if not parent.is_valid or result.decision is Decision.DROP:
            return result
        return self._configured.should_sample(Context(), *described)

    def get_description(self) -> str:
        return f"ServerSampler({self._configured.get_description()})"


class Tracing:
    """Creates the spans of one process."""

    def __init__(self) -> None:
        """Start the exporter. `close` stops it.

        Raises:
            StartError: OpenTelemetry refuses its own variables.
        """
        try:
            self._provider = _provider()
        except ValueError as error:
            names = ", ".join(sorted(name for name in os.environ if name.startswith("OTEL_")))
            raise StartError(
                f"GRAPHSTASH_TRACING: OpenTelemetry refuses its settings ({error}): fix {names}"
            ) from error
        self._tracer = self._provider.get_tracer("graphstash_server", __version__)

    def begin(self, method: str, traceparents: Sequence[str]) -> Span:
        """Begin the span of a request. `finish` ends it. A repeated or malformed `traceparent`
        begins a new trace, as W3C Trace Context specifies.
        """
        parent = Context()
        if len(traceparents) == 1:
            parent = _PROPAGATOR.extract({"traceparent": traceparents[0]}, parent)
        known = method if method in _METHODS else "_OTHER"
        return self._tracer.start_span(
            known,
            parent,
            SpanKind.SERVER,
            {"http.request.method": known},
        )

    @staticmethod
    def finish(span: Span, *, status: int | None, route: str | None, path: str) -> None:
        """End the span of a request. `status` is None if no response began. `route` is the path
        template, or None if no route matches. Then `path` is arbitrary and not recorded.
        """
        attributes: dict[str, AttributeValue] = {}
        if route is not None and isinstance(span, ReadableSpan):
            span.update_name(f"{span.name} {route}")
            attributes |= {"http.route": route, "url.path": path}
        if status is not None:
            attributes["http.response.status_code"] = status
        span.set_attributes(attributes)
        if status is None or status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()

    @contextmanager
    def inside(self, span: Span) -> Iterator[None]:
        """Make the span of a request the current span."""
        token = context.attach(trace.set_span_in_context(span))
        try:
            yield
        finally:
            context.detach(token)

    @contextmanager
    def span(self, name: str, **attributes: AttributeValue) -> Iterator[Span]:
        """Open a span for work in a sampled request. Does nothing outside of a sampled request."""
        if not trace.get_current_span().is_recording():
            yield trace.INVALID_SPAN
            return
        with self._tracer.start_as_current_span(
            name, attributes=attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(StatusCode.ERROR)
                raise

    @staticmethod
    def ids(span: Span) -> Mapping[str, str]:
        """Return the IDs of a span for the log."""
        ids = span.get_span_context()
        return {
            "trace_id": trace.format_trace_id(ids.trace_id),
            "span_id": trace.format_span_id(ids.span_id),
        }

    def close(self) -> None:
        """Send the remaining spans, for at most `_END_SECONDS`."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_END_SECONDS)


def _provider() -> TracerProvider:
    resource = Resource.create(
        {"service.name": "graphstash-server", "service.version": __version__}
    )
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
    provider = TracerProvider(
        resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
    )
    provider.sampler = _ServerSampler(provider.sampler)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
