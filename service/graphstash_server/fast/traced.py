"""The fast path with tracing: the same responses, with a span for each."""

import re
from collections.abc import Callable
from typing import Any, ClassVar, Final

from opentelemetry.trace import Span

from graphstash_server.api.artifacts import ROUTE
from graphstash_server.context import ProcessContext
from graphstash_server.fast.answers import Answer, FastPath, FastRequest
from graphstash_server.fast.connection import FastConnection
from graphstash_server.tracing import Tracing

__all__ = ["TracedFastConnection", "TracedFastPath"]

_TRACEPARENT: Final = re.compile(rb"\r\ntraceparent:([^\r\n]*)(?=\r\n[^ \t])", re.IGNORECASE)
"""The header, unless its value continues on another line. Only one part of the pattern matches
blanks: trying every split between two parts takes minutes for a head full of blanks."""


class _TracedRequest(FastRequest):
    """A request with its span. If the application handles the request after all, it creates its own
    span, and this one is never finished.
    """

    span: Span
    status: int | None = None
    is_waited_for = False

    @property
    def state(self) -> dict[str, str]:
        return {**super().state, **Tracing.ids(self.span)}


class TracedFastPath(FastPath):
    """A `FastPath` that creates spans."""

    def __init__(self, context: Callable[[], ProcessContext], *, tracing: Tracing) -> None:
        super().__init__(context)
        self.tracing = tracing

    def read(self, head: bytes, *, scheme: str, is_owner: bool) -> FastRequest | None:
        """Parse a request without `traceparent`, so that a job's equal requests are parsed once."""
        rest, count = _TRACEPARENT.subn(b"", head)
        request = super().read(rest, scheme=scheme, is_owner=is_owner)
        if request is None:
            return None
        found = _TRACEPARENT.findall(head) if count else []
        values = [value.strip(b" \t").decode("latin-1") for value in found]
        traced = _TracedRequest._make(request)
        traced.span = self.tracing.begin(request.method, values)
        return traced

    def answer_now(self, request: FastRequest) -> Answer | None:
        """Note whether the response has to wait. Then `_answer` ends the span."""
        assert isinstance(request, _TracedRequest)  # noqa: S101 - see `read`
        answer = super().answer_now(request)
        request.is_waited_for = answer is None or answer.reader is not None
        return answer

    def count_answer(self, request: FastRequest, status: int) -> None:
        """Note the status, and end the span unless the response waits."""
        assert isinstance(request, _TracedRequest)  # noqa: S101 - see `read`
        request.status = status
        if not request.is_waited_for:
            self.finish(request)
        super().count_answer(request, status)

    def finish(self, request: _TracedRequest) -> None:
        """End the span."""
        self.tracing.finish(request.span, status=request.status, route=ROUTE, path=request.path)


class TracedFastConnection(FastConnection):
    """A `FastConnection` that ends the spans of responses that wait."""

    fast: ClassVar[TracedFastPath]

    async def _answer(self, cycle: Any, request: FastRequest, answer: Answer | None) -> None:
        assert isinstance(request, _TracedRequest)  # noqa: S101 - its path made it
        try:
            with self.fast.tracing.inside(request.span):
                await super()._answer(cycle, request, answer)
        finally:
            self.fast.finish(request)
