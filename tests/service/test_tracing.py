"""Traces that run from a job's look-up to the blob store, for any caller."""

import json

import httpx
import pytest

from graphstash_server.fast.traced import TracedFastPath
from support.api import digest_header
from support.cases.tracing import LARGE
from support.collector import Collector
from support.moto import s3_settings
from support.processes import python
from support.server import Server
from support.trace_jobs import run_trace_job, take_away
from support.wire import Wire

ROUTE = "/v1/{namespace}/artifacts/{kind}/{device_type}/{fingerprint}"
PATH = "/v1/team/artifacts/jax/cpu-x86_64-0123456789abcdef/"
PARENT = f"00-{'d' * 32}-{'1' * 16}-01"
SERVER = 2


@pytest.fixture(scope="module")
def collector():
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(tmp_path_factory, collector):
    """A server that traces every request."""
    directory = tmp_path_factory.mktemp("traced")
    logging = {
        "GRAPHSTASH_LOG_FORMAT": "json",
        "GRAPHSTASH_LOG_LEVEL": "debug",
        "GRAPHSTASH_ACCESS_LOG": "true",
    }
    with Server(directory, **logging, **collector.environment) as server:
        yield server


def in_bucket(moto, bucket, **more):
    """Return the environment of a server whose blobs are in a bucket."""
    settings = s3_settings(moto.url, bucket, **more)
    return {f"GRAPHSTASH_{name.upper()}": str(value) for name, value in settings.items()}


def ancestors(collector, span):
    """Return the names from a span up to the root of its trace."""
    known = {each.id: each for each in collector.spans if each.trace == span.trace}
    names = [span.name]
    while span.parent:
        span = known[span.parent]
        names.append(span.name)
    return names


def request_with(server, fingerprint, *traceparents):
    """Send a request on the fast path, with a fingerprint that names it in the trace."""
    headers = [(b"traceparent", each.encode("latin-1")) for each in traceparents]
    with httpx.Client(base_url=server.url, timeout=10) as client:
        return client.get(PATH + fingerprint, headers=headers)


def span_of(collector, fingerprint):
    """Return the span of a request whose fingerprint no other test uses."""
    collector.until(lambda: collector.of_path(f"GET {ROUTE}", PATH + fingerprint))
    (span,) = collector.of_path(f"GET {ROUTE}", PATH + fingerprint)
    return span


def test_one_trace_runs_from_look_up_to_bucket(tmp_path, collector, moto, s3_credentials):
    environment = in_bucket(moto, moto.new_bucket(), tier_limit_bytes=10**9)
    secret = "a-token-that-no-span-may-have"
    before = len(collector.spans)
    with Server(tmp_path, **environment, **collector.environment) as server:
        for host in ("a", "b"):
            run_trace_job(tmp_path, server.url, collector.environment, host=host, token=secret)
    spans = collector.spans[before:]  # the server has sent its last spans

    def find(name, **attributes):
        (span,) = [each for each in collector.named(name, **attributes) if each in spans]
        return span

    put = f"PUT {ROUTE}"
    assert ancestors(collector, find("blob_store.put", store="s3")) == [
        *("blob_store.put", "blob_store.put", put, "PUT"),
        *("graphstash.publish", "graphstash.compile", "graphstash.lookup"),
    ]
    assert ancestors(collector, find("blob_store.open", store="s3", is_found=True)) == [
        *("blob_store.open", "blob_store.open", f"GET {ROUTE}", "GET"),
        "graphstash.lookup",
    ]
    miss, hit = (find("graphstash.lookup", outcome=outcome) for outcome in ("miss", "hit"))
    for span in (miss, hit):
        assert span.attributes["graphstash.label"] == "jit(train_step)"
        assert span.attributes["graphstash.kind"] == "torch_xla"
        assert span.service == "graphstash-job"
    assert hit.attributes["graphstash.source"] == "server"
    assert hit.attributes["graphstash.size_bytes"] >= LARGE
    in_trace = [each for each in spans if each.trace == miss.trace]
    assert {"lease.wait", "database.read", "database.write"} <= {each.name for each in in_trace}
    assert {each.service for each in in_trace} == {"graphstash-job", "graphstash-server"}
    (server_put,) = [each for each in in_trace if each.name == put]
    assert server_put.kind == SERVER
    assert server_put.attributes["http.route"] == ROUTE
    assert server_put.attributes["http.response.status_code"] == 201
    assert [span for span in spans if secret.encode() in span.raw] == []


def test_fast_path_hit_is_a_span_of_the_callers_trace(traced, collector):
    path, parent = PATH + "6" * 64, PARENT.replace("d", "f")
    with httpx.Client(base_url=traced.url, timeout=10) as client:
        client.put(path, content=b"blob", headers=digest_header(b"blob")).raise_for_status()
    # Blanks around the header are ignored.
    head = f"GET {path} HTTP/1.1\r\nHost: a\r\ntraceparent:\t  {parent} \t\r\n\r\n"
    with Wire(traced.url) as wire:
        assert wire.ask(head.encode()).status == 200

    span = span_of(collector, "6" * 64)
    assert (span.trace, span.parent) == ("f" * 32, "1" * 16)
    assert span.attributes["http.response.status_code"] == 200


def test_malformed_traceparent_begins_a_new_trace(traced, collector):
    good = "00-" + "a" * 32 + "-" + "1" * 16 + "-01"
    malformed = {
        "empty": ("",),
        "no trace": ("00-" + "0" * 32 + "-" + "1" * 16 + "-01",),
        "no span": ("00-" + "a" * 32 + "-" + "0" * 16 + "-01",),
        "version": ("ff" + good[2:],),
        "more": (good + "-more",),
        "latin-1": (good[:-1] + "\xff",),
        "long": ("x" * 5000,),
        "twice": (good, "00-" + "b" * 32 + "-" + "2" * 16 + "-01"),
    }
    for number, (name, traceparents) in enumerate(malformed.items()):
        fingerprint = f"{0xA00 + number:064x}"
        assert request_with(traced, fingerprint, *traceparents).status_code == 404, name
        span = span_of(collector, fingerprint)
        assert span.parent == "", name
        assert span.trace not in ("a" * 32, "b" * 32), name


def test_blanks_before_folded_traceparent_take_linear_time():
    """Quadratic work would take minutes and exceed the test's timeout."""
    head = b"GET / HTTP/1.1\r\ntraceparent:" + b" " * 2_000_000 + b"\r\n folded\r\n\r\n"
    path = TracedFastPath(lambda: None, tracing=None)

    assert path.read(head, scheme="http", is_owner=False) is None


def test_unsampled_caller_is_not_recorded(traced, collector):
    out, mark = "1" * 64, "2" * 64
    assert request_with(traced, out, f"00-{'c' * 32}-{'1' * 16}-00").status_code == 404
    request_with(traced, mark)

    span_of(collector, mark)
    assert [each for each in collector.spans if each.trace == "c" * 32] == []


@pytest.mark.extended
def test_caller_cannot_raise_sampling_ratio(tmp_path, collector):
    # One in ten million. A ratio samples ids that end in zeros first.
    sampling = {
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "1e-7",
    }
    with Server(tmp_path, **collector.environment, **sampling) as server:
        before = len(collector.spans)
        for number in range(1, 20):
            traceparent = f"00-{number:016x}{'0' * 16}-{'1' * 16}-01"
            assert request_with(server, f"{number:064x}", traceparent).status_code == 404
            httpx.get(f"{server.url}/v1/stats", headers={"traceparent": traceparent})
    assert collector.spans[before:] == []


def test_text_of_caller_is_in_no_span_name_or_attribute(traced, collector):
    before = len(collector.spans)
    secret = "TOKENINTHEWRONGPLACE"
    mark = "3" * 64
    with httpx.Client(base_url=traced.url, timeout=10) as client:
        headers = {"X-Secret": secret, "Authorization": secret, "baggage": f"token={secret}"}
        client.get(f"/v1/stats?token={secret}", headers=headers)
        parent = PARENT.replace("d", "e")
        client.get("/v1/stats", headers={"tracestate": f"a={secret}", "traceparent": parent})
        client.get(f"/nothing/{secret}")
        client.request("PROPFIND", "/v1/stats")
        client.get(PATH + mark, headers=headers)

    span_of(collector, mark)
    spans = collector.spans[before:]
    names = {span.name for span in spans if span.kind == SERVER}
    assert names == {"GET /v1/stats", "GET", "_OTHER /v1/stats", f"GET {ROUTE}"}
    for span in spans:
        assert secret.encode() not in span.raw


def test_log_entry_names_span_of_its_request(traced, collector):
    fingerprint = "4" * 64
    request_with(traced, fingerprint, PARENT)
    httpx.get(f"{traced.url}/v1/stats", headers={"traceparent": PARENT}, timeout=10)

    fast = span_of(collector, fingerprint)

    def entries():
        lines = [json.loads(line) for line in traced.log.splitlines() if line.startswith("{")]
        mine = [each for each in lines if each.get("trace_id") == PARENT[3:35]]
        return [each for each in mine if each["logger"] == "uvicorn.access"]

    collector.until(lambda: len(entries()) == 2)
    by_fast_path, by_application = entries()
    assert by_fast_path["span_id"] == fast.id
    collector.until(lambda: collector.with_id(by_application["span_id"]))
    assert collector.with_id(by_application["span_id"])[0].name == "GET /v1/stats"


def test_span_of_failing_bucket_holds_error_type_without_text(
    tmp_path, collector, moto, s3_credentials, connect
):
    bucket = moto.new_bucket()
    before = len(collector.spans)
    with Server(tmp_path, **in_bucket(moto, bucket), **collector.environment) as server:
        api = connect(server.url)
        api.put(b"blob")
        for each in moto.client.list_objects_v2(Bucket=bucket)["Contents"]:
            moto.client.delete_object(Bucket=bucket, Key=each["Key"])
        moto.client.delete_bucket(Bucket=bucket)
        assert api.get().status_code == 503

    spans = collector.spans[before:]
    opened = [each for each in spans if each.name == "blob_store.open"]
    assert "ServerError" in {each.attributes.get("error.type") for each in opened}
    for span in spans:
        for text in (bucket, "NoSuchBucket", "Traceback", "blobs/sha256"):
            assert text.encode() not in span.raw


@pytest.mark.extended
def test_presigned_link_is_in_no_span(tmp_path, collector, moto, s3_credentials):
    environment = in_bucket(moto, moto.new_bucket(), s3_redirect_bytes=1)
    before = len(collector.spans)
    with Server(tmp_path, **environment, **collector.environment) as server:
        for host in ("a", "b"):
            run_trace_job(tmp_path, server.url, collector.environment, host=host)

    spans = collector.spans[before:]
    (direct,) = set(collector.named("GET", source="storage")) & set(spans)
    assert ancestors(collector, direct) == ["GET", "graphstash.lookup"]
    assert [span for span in spans if b"X-Amz-Signature" in span.raw] == []


@pytest.mark.extended
def test_server_without_tracing_imports_no_exporter():
    asked = (
        "import sys, graphstash_server.serving.server, graphstash_server.storage.s3; "
        "unwanted = ('opentelemetry.sdk', 'opentelemetry.exporter', "
        "'graphstash_server.tracing'); "
        "print([name for name in sys.modules if name.startswith(unwanted)])"
    )
    assert python(asked, check=True).stdout == "[]\n"


@pytest.mark.extended
def test_server_that_cannot_trace_logs_the_reason(tmp_path, collector):
    path = take_away(tmp_path, "opentelemetry.exporter")
    for variables, named in (
        ({"PYTHONPATH": str(path)}, r"graphstash\[server,tracing\]"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "100"}, r"max_queue_size(.|\n)*OTEL_BSP_MAX_QUEUE_SIZE"),
    ):
        with pytest.raises(RuntimeError, match=rf"exited with 1(.|\n)*{named}") as failure:
            Server(tmp_path, **collector.environment | variables)
        assert "Traceback" not in str(failure.value)
