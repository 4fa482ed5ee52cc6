"""A job that asks for one artifact under a label, and compiles it on a miss.

    trace_job.py {alone,within,late,broken} SIZE

within: in a span of the program's own provider; late: that is set after a compiler was imported;
broken: that raises. Prints JSON: `fallbacks`;
`parents`, of the spans that the program's provider was given, by name; and `modules`, what it has
imported of OpenTelemetry.
"""

import json
import os
import sys

import graphstash
from graphstash_schema import ArtifactKey

key = ArtifactKey.parse("torch_xla", "cpu-x86_64-0123456789abcdef", "7" * 64)
mode, size = sys.argv[1], int(sys.argv[2])
spans = []


def ask():
    payload = graphstash.get_or_compile(key, lambda: os.urandom(size), label="jit(train_step)")
    assert len(payload) == size


if mode == "alone":
    ask()
else:
    if mode == "late":
        graphstash.install()
        import jax  # noqa: F401

    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

    class Exporter(SpanExporter):
        def export(self, ended):
            spans.extend(ended)
            return SpanExportResult.SUCCESS

    class Broken(Sampler):
        def should_sample(self, *_args, **_named):
            raise RuntimeError("this sampler is broken")

        def get_description(self):
            return "broken"

    provider = TracerProvider(sampler=Broken() if mode == "broken" else ALWAYS_ON)
    provider.add_span_processor(SimpleSpanProcessor(Exporter()))
    trace.set_tracer_provider(provider)
    if mode == "broken":
        ask()
    else:
        with trace.get_tracer("program").start_as_current_span("step"):
            ask()
from graphstash._process import session

ended = session._current
graphstash.uninstall()
names = {span.context.span_id: span.name for span in spans}
print(
    json.dumps(
        {
            "fallbacks": dict(ended.stats().fallbacks),
            "parents": {span.name: span.parent and names[span.parent.span_id] for span in spans},
            "modules": [each for each in sys.modules if each.partition(".")[0] == "opentelemetry"],
        }
    )
)
