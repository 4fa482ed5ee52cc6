"""Tracer: records the cache's work as OpenTelemetry spans. Imported only with `GRAPHSTASH_TRACING`.

Errors of the provider never reach the job.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from opentelemetry import context, trace
from opentelemetry.trace import INVALID_SPAN, NoOpTracer, Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from graphstash_schema.version import __version__

__all__ = ["Close", "OwnProvider", "Tracer"]

_log = logging.getLogger("graphstash")

_PROPAGATOR = TraceContextTextMapPropagator()
"""Propagates the trace context without baggage, whose values may be secrets."""

_INNERMOST: ContextVar[Span] = ContextVar("graphstash_span", default=INVALID_SPAN)

Close = Callable[[float], str | None]
"""Shuts a provider down within the given seconds. Returns a message about lost spans, or None."""

OwnProvider = Callable[[], tuple[trace.TracerProvider, Close]]
"""Creates a provider if the program has none, and the function that closes it."""


class Tracer:
    """Creates spans. Thread-safe.

    The first span selects the provider. A program may set its own after a compiler's import, which
    opens the cache. A forked child without spans creates no provider.
    """

    def __init__(self, own_provider: OwnProvider) -> None:
        self._failure_count = 0
        self._own_provider = own_provider
        self._choosing = threading.Lock()
        self._chosen: trace.Tracer | None = None
        self._trouble: str | None = None
        self._close: Close = lambda _: None

    @property
    def _tracer(self) -> trace.Tracer:
        with self._choosing:
            if self._chosen is None:
                try:
                    self._chosen = self._choose().get_tracer("graphstash", __version__)
                except Exception as error:  # noqa: BLE001 - wrong OTEL_* variables must not fail the job
                    self._trouble = f"no traces are made: {error!r}"
                    self._chosen = NoOpTracer()
            return self._chosen

    def _choose(self) -> trace.TracerProvider:
        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):
            provider, self._close = self._own_provider()
        return provider

    @property
    def is_inside(self) -> bool:
        """Whether there is a current span, the program's or ours, sampled or not."""
        return trace.get_current_span().get_span_context().is_valid

    def start(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue],
        *,
        parent: Span | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Start a span, by default inside the current span. The caller must `end` it."""
        within = None if parent is None else trace.set_span_in_context(parent)
        try:
            return self._tracer.start_span(name, within, kind, attributes)
        except Exception:  # noqa: BLE001 - the program's provider may raise any exception
            self._failed()
            return INVALID_SPAN

    def end(self, span: Span, **attributes: AttributeValue) -> None:
        """Set attributes with the prefix `graphstash.`, and end the span."""
        try:
            span.set_attributes(_named(attributes))
            span.end()
        except Exception:  # noqa: BLE001 - as in `start`
            self._failed()

    @contextmanager
    def span(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue],
        *,
        parent: Span | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Iterator[Span]:
        """Record a span around the block. Record an exception's reason or type, never its text."""
        span = self.start(name, attributes, parent=parent, kind=kind)
        token = context.attach(trace.set_span_in_context(span))
        innermost = _INNERMOST.set(span)
        try:
            yield span
        except BaseException as error:
            with suppress(Exception):
                span.set_attribute(
                    "error.type", str(getattr(error, "reason", type(error).__name__))
                )
                span.set_status(StatusCode.ERROR)
            raise
        finally:
            _INNERMOST.reset(innermost)
            context.detach(token)
            self.end(span)

    def note(self, **attributes: AttributeValue) -> None:
        """Add attributes to our innermost span, never to the program's."""
        with suppress(Exception):
            _INNERMOST.get().set_attributes(_named(attributes))

    def answered(self, status: int) -> None:
        """Add a response's status to our innermost span."""
        with suppress(Exception):
            _INNERMOST.get().set_attribute("http.response.status_code", status)

    def headers(self) -> Mapping[str, str]:
        """Return the headers that make the current span the parent of the server's span."""
        carrier: dict[str, str] = {}
        with suppress(Exception):
            _PROPAGATOR.inject(carrier)
        return carrier

    def close(self, timeout_seconds: float) -> str | None:
        """Flush and close our own provider within the timeout, but never the program's. Return a
        message about lost spans, or None.
        """
        lost = self._trouble or self._close(timeout_seconds)
        if lost is None and self._failure_count:
            return f"{self._failure_count} spans could not be made"
        return lost

    def _failed(self) -> None:
        self._failure_count += 1
        _log.debug("a span could not be made", exc_info=True)


def _named(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    return {f"graphstash.{name}": value for name, value in attributes.items()}
