"""TracedTransport: records a span for each call to the server, which continues the trace."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry.trace import SpanKind

from graphstash._http.deadline import Deadline
from graphstash._http.lean_httpx import httpx
from graphstash._http.transport import Answer, Transport
from graphstash._tracing import Tracer
from graphstash.config import ClientConfig
from graphstash.errors import RefusedError

__all__ = ["TracedTransport"]


class TracedTransport(Transport):
    """Records spans with the attribute names of OpenTelemetry's conventions for HTTP clients.

    OpenTelemetry's httpx instrumentation is unsuitable. It records whole URLs, and a storage URL
    grants access to a blob. Its spans end before the client reads the body.
    """

    def __init__(self, config: ClientConfig, *, tracer: Tracer) -> None:
        super().__init__(config)
        self._tracer = tracer

    @contextmanager
    def _stream(
        self, method: str, path: str, *, headers: Mapping[str, str], **options: Any
    ) -> Iterator[httpx.Response]:
        if not self._tracer.is_inside:  # e.g. a lease renewal, or the report at the job's end
            with super()._stream(method, path, headers=headers, **options) as response:
                yield response
            return
        url = f"{self._config.url}{path.partition('?')[0]}"
        attributes = {"http.request.method": method, "url.full": url}
        with self._tracer.span(method, attributes, kind=SpanKind.CLIENT):
            headers = {**headers, **self._tracer.headers()}
            try:
                with super()._stream(method, path, headers=headers, **options) as response:
                    self._tracer.answered(response.status_code)
                    yield response
            except RefusedError as error:
                self._tracer.answered(error.status)
                raise

    @contextmanager
    def _follow_redirect(
        self, answer: Answer, deadline: Deadline
    ) -> Iterator[tuple[Answer, Iterator[bytes]]]:
        """Record a span without the storage URL. Send no trace headers to the storage."""
        attributes = {"http.request.method": "GET", "graphstash.source": "storage"}
        with (
            self._tracer.span("GET", attributes, kind=SpanKind.CLIENT),
            super()._follow_redirect(answer, deadline) as followed,
        ):
            self._tracer.answered(followed[0].status)
            yield followed
