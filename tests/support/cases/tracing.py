"""A job that looks up one artifact with a label, compiles it on a miss, and records its spans."""

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import graphstash
from graphstash._process import session
from graphstash_schema import ArtifactKey

LARGE = 200_000
"""Bytes of the artifact, more than a server keeps in memory."""


def ask(*, mode: str) -> dict[str, Any]:
    """Look up the artifact.

    Args:
        mode: `alone` has no provider of its own; `within` looks up in a span of the program's
            provider; `late` sets that provider after the import of a compiler; `broken` has a
            provider that raises.

    Returns:
        The fallbacks, the parent of each span by name, and the imported modules of OpenTelemetry.
    """
    spans: list[Any] = []
    if mode == "alone":
        _ask()
    else:
        if mode == "late":
            graphstash.install()
            import jax  # noqa: F401 - its hook is installed on import
        _ask_in_a_span(spans, is_broken=mode == "broken")
    ended = session._current
    assert ended is not None
    graphstash.uninstall()
    names = {span.context.span_id: span.name for span in spans}
    return {
        "fallbacks": dict(ended.stats().fallbacks),
        "parents": {span.name: span.parent and names[span.parent.span_id] for span in spans},
        "modules": [each for each in sys.modules if each.partition(".")[0] == "opentelemetry"],
    }


def _ask() -> None:
    key = ArtifactKey.parse("torch_xla", "cpu-x86_64-0123456789abcdef", "7" * 64)
    payload = graphstash.get_or_compile(key, lambda: os.urandom(LARGE), label="jit(train_step)")
    assert len(payload) == LARGE


def _ask_in_a_span(spans: list[Any], *, is_broken: bool) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

    class Exporter(SpanExporter):
        def export(self, ended: Sequence[Any]) -> SpanExportResult:
            spans.extend(ended)
            return SpanExportResult.SUCCESS

    class Broken(Sampler):
        def should_sample(self, *_: Any, **__: Any) -> NoReturn:
            raise RuntimeError("this sampler is broken")

        def get_description(self) -> str:
            return "broken"

    provider = TracerProvider(sampler=Broken() if is_broken else ALWAYS_ON)
    provider.add_span_processor(SimpleSpanProcessor(Exporter()))
    trace.set_tracer_provider(provider)
    if is_broken:
        _ask()
    else:
        with trace.get_tracer("program").start_as_current_span("step"):
            _ask()
