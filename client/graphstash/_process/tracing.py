"""Export this process's spans with OTLP over HTTP, if the program has no tracer provider.

OpenTelemetry's own variables configure the export (`OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_TRACES_SAMPLER`, ...). The provider is not registered globally, so that the program can still
set its own. A thread sends spans in batches, and drops spans if the collector is too slow.
"""

import logging
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from graphstash._executor import BoundedExecutor
from graphstash._tracing import Close

__all__ = ["exporting_provider"]


class _Exporter(OTLPSpanExporter):
    """An exporter that counts the spans of failed exports."""

    lost_count = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.lost_count += len(spans)
        return result


def exporting_provider() -> tuple[TracerProvider, Close]:
    """Return a provider that exports spans, and the function that closes it."""
    resource = Resource.create({"service.name": "graphstash-job"})
    resource = resource.merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME wins
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = _Exporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    # `close` reports lost spans. Keep the exporter's errors out of the job's output.
    logging.getLogger(OTLPSpanExporter.__module__).setLevel(logging.CRITICAL)
    # Shut down in a thread, so that `close` has a timeout: the SDK's own is 30 s.
    closer = BoundedExecutor("graphstash-traces", workers=1, capacity=1)
    closer.start()

    def close(timeout_seconds: float) -> str | None:
        closer.submit(provider.shutdown)
        is_done = closer.drain(timeout_seconds)
        closer.close()
        if not is_done:
            return f"the collector did not take the last spans within {timeout_seconds:.1f} s"
        return (
            f"the collector did not take {exporter.lost_count} spans"
            if exporter.lost_count
            else None
        )

    return provider, close
