"""Tracer: spans of what the cache does for a job, by OpenTelemetry's API.

Imported only where `GRAPHSTASH_TRACING` is set. Nothing here fails a job: a provider that raises is
counted. `_process.tracing` makes a provider where the job's own program has none.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.metadata import version

from opentelemetry import context, trace
from opentelemetry.trace import INVALID_SPAN, NoOpTracer, Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

__all__ = ["Close", "OwnProvider", "Tracer"]

_log = logging.getLogger("graphstash")

_PROPAGATOR = TraceContextTextMapPropagator()
"""Baggage stays in the program: its values may be secrets."""

_INNERMOST: ContextVar[Span] = ContextVar("graphstash_span", default=INVALID_SPAN)

Close = Callable[[float], str | None]
"""Ends a provider within so many seconds, and returns what was lost."""

OwnProvider = Callable[[], tuple[trace.TracerProvider, Close]]
"""Makes a provider, and what ends it."""


class Tracer:
    """Makes spans; safe for many threads.

    The provider is the one that the program has set when the first span begins, long after the
    cache was made for a compiler that is being imported. So a forked child that asks for nothing
    has none either.

    Attributes:
        failure_count: how often a span could not be started or ended.

    Args:
        own_provider: makes one where the program has none.
    """

    def __init__(self, own_provider: OwnProvider) -> None:
        self.failure_count = 0
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
                    self._chosen = self._choose().get_tracer("graphstash", version("graphstash"))
                except Exception as error:  # noqa: BLE001 - whatever OTEL_* says: the job goes on
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
        """Whether there is a current span, sampled or not."""
        return trace.get_current_span().get_span_context().is_valid

    def start(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue],
        *,
        parent: Span | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Begins a span, by default inside the current one; end it with `end`."""
        within = None if parent is None else trace.set_span_in_context(parent)
        try:
            return self._tracer.start_span(name, within, kind, attributes)
        except Exception:  # noqa: BLE001 - the program's own provider may raise anything
            self._failed()
            return INVALID_SPAN

    def end(self, span: Span, **attributes: AttributeValue) -> None:
        """Ends a span, with what is known by then."""
        try:
            span.set_attributes(_named(attributes))
            span.end()
        except Exception:  # noqa: BLE001 - as above
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
        """A span around what runs inside; an exception leaves its reason, never its text."""
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
        """Adds to the innermost span of ours; the program's own are left alone."""
        with suppress(Exception):
            _INNERMOST.get().set_attributes(_named(attributes))

    def answered(self, status: int) -> None:
        """Adds the status of an answer to the innermost span of ours."""
        with suppress(Exception):
            _INNERMOST.get().set_attribute("http.response.status_code", status)

    def headers(self) -> Mapping[str, str]:
        """What tells a server which span calls it: `traceparent`, and `tracestate` if there is."""
        carrier: dict[str, str] = {}
        with suppress(Exception):
            _PROPAGATOR.inject(carrier)
        return carrier

    def close(self, timeout_seconds: float) -> str | None:
        """Sends what is left within a time, unless it belongs to the program's own provider.

        Returns:
            What was lost, for people; None when nothing was.
        """
        lost = self._trouble or self._close(timeout_seconds)
        if lost is None and self.failure_count:
            return f"{self.failure_count} spans could not be made"
        return lost

    def _failed(self) -> None:
        self.failure_count += 1
        _log.debug("a span could not be made", exc_info=True)


def _named(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    return {f"graphstash.{name}": value for name, value in attributes.items()}
