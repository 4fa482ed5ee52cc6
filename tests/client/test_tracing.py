"""Traces never fail a job, hardly delay its exit, and cost nothing unless enabled."""

import functools
import io
import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from graphstash import ClientConfig, Stash
from graphstash._compile.stats import Counters
from graphstash._compile.traced import TracedCache
from graphstash._executor import BoundedExecutor
from graphstash._tracing import Tracer
from support.collector import Collector
from support.host import key
from support.trace_jobs import run_trace_job, take_away
from support.waiting import PATIENT_VARIABLES


@pytest.fixture
def run_job(tmp_path, server):
    return functools.partial(run_trace_job, tmp_path)


def environment_of(collector, namespace):
    return {**collector.environment, "GRAPHSTASH_NAMESPACE": namespace}


def test_job_without_traces_imports_no_opentelemetry(run_job, server, namespace):
    outcome = run_job(server.url, {"GRAPHSTASH_NAMESPACE": namespace})

    assert outcome == {"fallbacks": {}, "parents": {}, "modules": []}


@pytest.mark.parametrize("mode", ["within", pytest.param("late", marks=pytest.mark.extended)])
def test_spans_go_to_the_provider_of_the_program(run_job, server, namespace, mode):
    with Collector() as collector:
        outcome = run_job(server.url, environment_of(collector, namespace), mode=mode)

    assert outcome["fallbacks"] == {}
    assert outcome["parents"] == {
        "step": None,
        "graphstash.lookup": "step",
        "GET": "graphstash.lookup",
        "POST": "graphstash.lookup",
        "graphstash.compile": "graphstash.lookup",
        "graphstash.publish": "graphstash.compile",
        "PUT": "graphstash.publish",
    }
    assert collector.spans == []
    assert not any("exporter.otlp" in name for name in outcome["modules"])


@pytest.mark.parametrize("is_silent", [True, False])
def test_job_ends_without_waiting_for_silent_or_missing_collector(
    run_job, server, namespace, is_silent
):
    patient = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1000"}  # seconds; the SDK would wait for 30
    with Collector(is_frozen=is_silent) as collector:
        environment = environment_of(collector, namespace) | patient
        outcome = run_job(server.url, environment) if is_silent else None
        assert collector.asked.is_set() == is_silent
    outcome = outcome or run_job(server.url, environment)

    assert outcome["fallbacks"] == {"tracing": 1}


def test_a_job_without_the_extra_runs_untraced(run_job, server, namespace, tmp_path):
    missing = {"PYTHONPATH": str(take_away(tmp_path, "opentelemetry"))}
    with Collector() as collector:
        outcome = run_job(server.url, environment_of(collector, namespace) | missing)

    assert outcome["fallbacks"] == {"tracing": 1}
    assert collector.spans == []


def test_a_forked_child_of_a_traced_job_does_not_hang(server, namespace, tmp_path):
    """The fork handlers of packages that are imported after the installation run later."""
    code = """
import graphstash
graphstash.install()
import jax, multiprocessing
child = multiprocessing.get_context("fork").Process(target=lambda: None)
child.start(); child.join(); raise SystemExit(child.exitcode)
"""
    with Collector() as collector:
        environment = {
            **environment_of(collector, namespace),
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "GRAPHSTASH_URL": server.url,
            "GRAPHSTASH_CACHE_DIR": str(tmp_path / "cache"),
            **PATIENT_VARIABLES,
            "JAX_PLATFORMS": "cpu",
        }
        command = [sys.executable, "-W", "ignore", "-c", code]
        subprocess.run(command, env=environment, check=True, timeout=100)


def test_outage_is_traced_as_failure_instead_of_miss(tmp_path):
    config = ClientConfig.load(url="http://127.0.0.1:9", cache_dir=tmp_path)
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer(lambda: (provider, lambda _: None))
    publisher = BoundedExecutor("test-publish", workers=1, capacity=1)
    with Stash(config, tracer=tracer) as stash:
        cache = TracedCache(stash, counters=Counters(), publisher=publisher, tracer=tracer)
        assert not cache.try_fetch(key(), io.BytesIO())
        assert cache.fetch_pack(key(2)).payload is None
    publisher.close()
    spans = [s for s in exporter.get_finished_spans() if s.name == "graphstash.lookup"]
    assert [span.attributes["graphstash.outcome"] for span in spans] == ["fallback"] * 2
    assert all(span.attributes["graphstash.reason"] for span in spans)
