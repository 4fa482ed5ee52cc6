"""An OTLP/HTTP receiver in this process, which stores the spans of real messages."""

import gzip
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from support.http_server import Answer, HttpServer, Request
from support.waiting import until


@dataclass(frozen=True, eq=False)
class ReceivedSpan:
    """A received span. IDs are hexadecimal; `parent` is empty for a root."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    attributes: Mapping[str, Any]
    raw: bytes


class Collector(HttpServer):
    """A receiver on a free loopback port; a context manager.

    Attributes:
        spans: all received spans.
        is_frozen: accept requests without an answer until the end.
        asked: set by the first request.
    """

    def __init__(self, *, is_frozen: bool = False) -> None:
        super().__init__()
        self.spans: list[ReceivedSpan] = []
        self.is_frozen = is_frozen
        self.asked = threading.Event()
        self._end = threading.Event()

    def answer_to(self, request: Request) -> Answer | None:
        self.asked.set()
        if self.is_frozen:
            self._end.wait()
            return None
        is_packed = request.headers.get("content-encoding") == "gzip"
        body = gzip.decompress(request.body) if is_packed else request.body
        self._take(ExportTraceServiceRequest.FromString(body))
        answer = ExportTraceServiceResponse().SerializeToString()
        return Answer(200, {"content-type": "application/x-protobuf"}, answer)

    @property
    def environment(self) -> dict[str, str]:
        """Return variables that send the spans of a process here soon after they end."""
        return {
            "GRAPHSTASH_TRACING": "1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def named(self, name: str, **attributes: Any) -> list[ReceivedSpan]:
        """Return the spans of a name with these graphstash attributes."""
        wanted = {f"graphstash.{each}": value for each, value in attributes.items()}
        return [
            span
            for span in tuple(self.spans)
            if span.name == name and wanted.items() <= span.attributes.items()
        ]

    def of_path(self, name: str, path: str) -> list[ReceivedSpan]:
        return [span for span in self.named(name) if span.attributes.get("url.path") == path]

    def with_id(self, wanted: str) -> list[ReceivedSpan]:
        return [span for span in tuple(self.spans) if span.id == wanted]

    def until(self, holds: Callable[[], object]) -> None:
        """Wait until `holds()` is true. Batches arrive shortly after their spans end."""
        until(holds)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        super().__exit__()

    def _take(self, request: ExportTraceServiceRequest) -> None:
        for of_resource in request.resource_spans:
            service = _values(of_resource.resource.attributes)["service.name"]
            for of_scope in of_resource.scope_spans:
                self.spans += [
                    ReceivedSpan(
                        service,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.kind,
                        _values(span.attributes),
                        span.SerializeToString(),
                    )
                    for span in of_scope.spans
                ]


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
