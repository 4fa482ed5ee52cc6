"""The doctor's findings about the server: the network, its answers, its clock and its store."""

import socket
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from graphstash._cli.doctor.findings import State
from graphstash_server.testing import LiveServer
from support.api import Api
from support.doctor import altering, diagnose, expect, line
from support.fault_proxy import Fault, FaultProxy


def test_unresolvable_name_and_dead_socket_are_distinguished(tmp_path):
    findings = diagnose("http://cache.invalid:8077")
    found, advice = "cache.invalid has no address", "getent hosts cache.invalid"
    expect(findings, "connection", State.FAIL, found=found, advice=advice)
    assert line(findings, "token").state == State.SKIPPED
    assert line(findings, "local tier").state == State.OK
    findings = diagnose("http://cache..internal:8077")  # Python cannot encode it for DNS
    expect(findings, "connection", State.FAIL, found="cache..internal has no address")
    findings = diagnose("http://10.0.0.256:8077")
    expect(findings, "connection", State.FAIL, found="10.0.0.256", advice="GRAPHSTASH_URL")
    assert line(findings, "token").state == State.SKIPPED
    findings = diagnose(f"unix:{tmp_path}/socket")
    finding = expect(findings, "connection", State.FAIL, advice="graphstash serve")
    assert f"unix:{tmp_path}/socket" in finding.found
    assert "No such file or directory" in finding.found


def test_unaccepted_connections_end_in_time_with_advice():
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    port = listener.getsockname()[1]
    waiting = []
    # The kernel queues one or two connections for a listener that accepts none, and drops the rest.
    for _ in range(4):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
        waiting.append(one)
    try:
        findings = diagnose(f"http://127.0.0.1:{port}", connect_seconds=0.3)
    finally:
        for each in (*waiting, listener):
            each.close()
    found = "no connection within 0.3 s (GRAPHSTASH_CONNECT_SECONDS)"
    expect(findings, "connection", State.FAIL, found=found, advice="firewall")


@pytest.mark.parametrize(
    ("fault", "found", "advice"),
    [
        (Fault.SILENT, "does not answer within 0.3 s", "which program uses the port"),
        (Fault.DRIP, "does not answer within 0.3 s", "raise the timeout"),
        (Fault.GARBAGE, "does not speak HTTP", "https:// in GRAPHSTASH_URL"),
        (Fault.RESET, "does not speak HTTP", "check the port"),
        (Fault.STRANGER, "is not a graphstash server", "check the port"),
        (Fault.FAILING, "a proxy whose server is down", "start the server behind it"),
    ],
)
def test_other_programs_on_the_port_are_recognized_by_their_answer(server, fault, found, advice):
    with FaultProxy(server.port) as proxy:
        proxy.fault = fault
        seconds = 0.3 if fault in {Fault.SILENT, Fault.DRIP} else 30  # the other faults answer
        findings = diagnose(proxy.url, connect_seconds=1, first_byte_seconds=seconds)
    expect(findings, "server", State.FAIL, found=found, advice=advice)
    assert line(findings, "token").state == State.SKIPPED


def test_wrong_path_in_the_url_is_named(server):
    finding = expect(diagnose(f"{server.url}/cache"), "server", State.FAIL, found="path '/cache'")
    assert "remove the path from GRAPHSTASH_URL" in finding.advice


def test_other_protocol_version_is_reported_with_both_versions(server):
    with altering(server.url, graphstash_protocol="2") as url:
        findings = diagnose(url)
    found, advice = "speaks protocol 2, this client", "upgrade whichever is older"
    finding = expect(findings, "server", State.FAIL, found=found, advice=advice)
    assert finding.found.endswith("speaks 1")


def test_a_redirect_to_https_gives_the_url_to_set(server):
    place = "https://cache.internal/healthz"
    with altering(server.url, 301, location=place, graphstash_protocol=None) as url:
        finding = expect(diagnose(url), "server", State.FAIL)
    assert finding.advice == "set GRAPHSTASH_URL=https://cache.internal"


@pytest.mark.parametrize(
    ("seconds", "state", "side"),
    [(0, State.OK, "agree"), (-30, State.WARN, "s ahead of"), (3600, State.FAIL, "s behind")],
)
def test_clock_is_compared_with_the_server(server, seconds, state, side):
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)
    with altering(server.url, date=date) as url:
        finding = expect(diagnose(url), "clock", state, found=side)
    assert ("timedatectl" in finding.advice) == (state != State.OK)


def test_full_store_is_a_warning_and_failing_one_a_failure_with_message_of_server(tmp_path):
    with LiveServer(tmp_path / "full", min_free_bytes=2**60) as full:
        found, advice = "read only: no space left", "free space"
        expect(diagnose(full.url), "readiness", State.WARN, found=found, advice=advice)
    with LiveServer(tmp_path / "data") as broken:
        blobs = tmp_path / "data" / "blobs"
        blobs.rename(tmp_path / "elsewhere")
        blobs.write_text("a file")
        found, advice = "blob store failed", "server's log"
        expect(diagnose(broken.url), "readiness", State.FAIL, found=found, advice=advice)
        blobs.unlink()
        (tmp_path / "elsewhere").rename(blobs)


def test_doubtful_limit_of_the_store_is_a_warning(tmp_path):
    settings = {"auth": "none", "min_free_bytes": 0}
    with LiveServer(tmp_path, **settings) as server, closing(Api(server.url)) as api:
        assert api.put(b"x" * 1000).status_code == 201
    with LiveServer(tmp_path, **settings, store_limit_bytes=100) as server:
        found, advice = "more than twice its soft limit", "gc --evict-now"
        expect(diagnose(server.url), "readiness", State.WARN, found=found, advice=advice)


def test_skipped_checks_are_listed_without_server():
    findings = diagnose("none")
    expect(findings, "server", State.WARN, advice="graphstash serve")
    for name in ("clock", "token", "trust"):
        expect(findings, name, State.SKIPPED, found="there is no server")
    expect(diagnose(), "clock", State.SKIPPED, found="does not answer")
