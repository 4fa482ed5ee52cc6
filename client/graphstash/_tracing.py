"""Tracer: spans of what the cache does for a job, by OpenTelemetry's API.

Imported only where `GRAPHSTASH_TRACING` is set. Nothing here fails a job: a provider that raises is
counted. `_process.tracing` makes a provider where the job's own program has none.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Self

from opentelemetry import context, trace
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

__all__ = ["Tracer"]

_log = logging.getLogger("graphstash")

_PROPAGATOR = TraceContextTextMapPropagator()
"""Baggage stays in the program: its values may be secrets."""


class Tracer:
    """Makes spans; safe for many threads.

    Attributes:
        failure_count: how often a span could not be started or ended.

    Args:
        provider: of the program, or one of our own.
        close: ends one of our own within so many seconds, and returns what was lost.
    """

    def __init__(
        self,
        provider: trace.TracerProvider,
        *,
        close: Callable[[float], str | None] = lambda _: None,
    ) -> None:
        self.failure_count = 0
        self._tracer = provider.get_tracer("graphstash", version("graphstash"))
        self._close = close

    @classmethod
    def of_program(cls) -> Self | None:
        """A tracer of the job's own provider; None where nobody has set one."""
        provider = trace.get_tracer_provider()
        return None if isinstance(provider, trace.ProxyTracerProvider) else cls(provider)

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
            context.detach(token)
            self.end(span)

    def note(self, **attributes: AttributeValue) -> None:
        """Adds to the current span."""
        with suppress(Exception):
            trace.get_current_span().set_attributes(_named(attributes))

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
        lost = self._close(timeout_seconds)
        if lost is None and self.failure_count:
            return f"{self.failure_count} spans could not be made"
        return lost

    def _failed(self) -> None:
        self.failure_count += 1
        _log.debug("a span could not be made", exc_info=True)


def _named(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    return {f"graphstash.{name}": value for name, value in attributes.items()}
