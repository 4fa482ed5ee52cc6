"""Traces of a job: they never fail it, hardly delay its end, and cost nothing unless asked for."""

import functools

import pytest

from support.collector import Collector
from support.trace_jobs import run_trace_job, take_away


@pytest.fixture
def run_job(tmp_path, server):
    return functools.partial(run_trace_job, tmp_path)


def environment_of(collector, namespace):
    return {**collector.environment, "GRAPHSTASH_NAMESPACE": namespace}


def test_a_job_without_traces_imports_nothing_of_opentelemetry(run_job, server, namespace):
    told = run_job(server.url, {"GRAPHSTASH_NAMESPACE": namespace})

    assert told == {"fallbacks": {}, "parents": {}, "modules": []}


def test_spans_go_to_the_provider_of_the_program(run_job, server, namespace):
    with Collector() as collector:
        told = run_job(server.url, environment_of(collector, namespace), mode="within")

    assert told["fallbacks"] == {}
    assert told["parents"] == {
        "step": None,
        "graphstash.lookup": "step",
        "GET": "graphstash.lookup",
        "POST": "graphstash.lookup",
        "graphstash.compile": "graphstash.lookup",
        "graphstash.publish": "graphstash.compile",
        "PUT": "graphstash.publish",
    }
    assert collector.spans == []
    assert not any("exporter.otlp" in name for name in told["modules"])


def test_a_provider_that_raises_is_counted(run_job, server, namespace):
    with Collector() as collector:
        told = run_job(server.url, environment_of(collector, namespace), mode="broken")

    assert told["fallbacks"] == {"tracing": 1}


def test_the_end_of_a_job_does_not_wait_for_a_collector_that_never_answers(
    run_job, server, namespace
):
    with Collector(is_frozen=True) as collector:
        patient = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1000"}  # seconds; the SDK would wait for 30
        told = run_job(server.url, environment_of(collector, namespace) | patient)
        assert collector.asked.is_set()

    assert told["fallbacks"] == {"tracing": 1}


def test_a_collector_that_does_not_exist_is_counted(run_job, server, namespace):
    with Collector() as collector:
        environment = environment_of(collector, namespace)
    told = run_job(server.url, environment)

    assert told["fallbacks"] == {"tracing": 1}


def test_a_job_without_the_extra_runs_untraced(run_job, server, namespace, tmp_path):
    missing = {"PYTHONPATH": str(take_away(tmp_path, "opentelemetry"))}
    with Collector() as collector:
        told = run_job(server.url, environment_of(collector, namespace) | missing)

    assert told["fallbacks"] == {"tracing": 1}
    assert collector.spans == []
