import socket
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from graphstash._cli.doctor.findings import State
from graphstash_server.testing import LiveServer
from support.doctor import altering, diagnose, line
from support.fault_proxy import Fault, FaultProxy


def test_a_name_without_address_is_told_apart_from_a_server_that_is_not_there():
    findings = diagnose("http://cache.invalid:8077")
    told = line(findings, "connection")
    assert told.found.startswith("cache.invalid has no address")
    assert "getent hosts cache.invalid" in told.advice
    assert line(findings, "token").state == State.SKIPPED
    assert line(findings, "local tier").state == State.OK


def test_connections_that_nobody_accepts_end_in_time_with_advice():
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    port = listener.getsockname()[1]
    waiting = []
    # The kernel takes one or two for a listener that accepts none, and drops the rest.
    for _ in range(4):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
        waiting.append(one)
    try:
        told = line(diagnose(f"http://127.0.0.1:{port}", connect_seconds=0.3), "connection")
    finally:
        for each in (*waiting, listener):
            each.close()
    assert "no connection within 0.3 s (GRAPHSTASH_CONNECT_SECONDS)" in told.found
    assert "firewall" in told.advice


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
def test_what_is_not_a_server_is_told_by_what_it_does(server, fault, found, advice):
    with FaultProxy(server.port) as proxy:
        proxy.fault = fault
        seconds = 0.3 if fault in {Fault.SILENT, Fault.DRIP} else 30  # others do answer
        findings = diagnose(proxy.url, connect_seconds=1, first_byte_seconds=seconds)
    told = line(findings, "server")
    assert told.state == State.FAIL
    assert found in told.found
    assert advice in told.advice
    assert line(findings, "token").state == State.SKIPPED


def test_a_server_of_another_protocol_is_told_with_both_versions(server):
    with altering(server.url, graphstash_protocol="2") as url:
        told = line(diagnose(url), "server")
    assert "speaks protocol 2, this client" in told.found
    assert told.found.endswith("speaks 1")
    assert "upgrade whichever is older" in told.advice


def test_a_redirect_to_https_gives_the_url_to_set(server):
    with altering(
        server.url, 301, location="https://cache.internal/healthz", graphstash_protocol=None
    ) as url:
        told = line(diagnose(url), "server")
    assert told.state == State.FAIL
    assert told.advice == "set GRAPHSTASH_URL=https://cache.internal"


@pytest.mark.parametrize(
    ("seconds", "state", "side"),
    [
        (0, State.OK, "agree"),
        (-30, State.WARN, "s ahead of"),
        (30, State.WARN, "s behind"),
        (-3600, State.FAIL, "s ahead of"),
        (3600, State.FAIL, "s behind"),
    ],
)
def test_the_clock_is_held_against_the_servers(server, seconds, state, side):
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)
    with altering(server.url, date=date) as url:
        told = line(diagnose(url), "clock")
    assert (told.state, side in told.found) == (state, True)
    assert ("timedatectl" in told.advice) == (state != State.OK)


def test_a_full_store_is_a_warning_because_hits_are_served(tmp_path):
    with LiveServer(tmp_path / "data", min_free_bytes=2**60) as full:
        told = line(diagnose(full.url), "readiness")
    assert told.state == State.WARN
    assert "read only: no space left" in told.found
    assert "free space" in told.advice


def test_a_server_whose_store_fails_is_a_failure_with_what_the_server_says(tmp_path):
    with LiveServer(tmp_path / "data") as broken:
        blobs = tmp_path / "data" / "blobs"
        blobs.rename(tmp_path / "elsewhere")
        blobs.write_text("a file")
        told = line(diagnose(broken.url), "readiness")
        blobs.unlink()
        (tmp_path / "elsewhere").rename(blobs)
    assert told.state == State.FAIL
    assert "blob store failed" in told.found
    assert "server's log" in told.advice


def test_without_a_server_the_doctor_says_what_it_skips():
    findings = diagnose("none")
    assert "graphstash serve" in line(findings, "server", State.WARN).advice
    assert "there is no server" in line(findings, "clock", State.SKIPPED).found
    assert "there is no server" in line(findings, "token", State.SKIPPED).found
    assert "there is no server" in line(findings, "trust", State.SKIPPED).found
    assert "does not answer" in line(diagnose(), "clock", State.SKIPPED).found


def test_a_socket_that_answers_nobody_is_told_with_its_path(tmp_path):
    told = line(diagnose(f"unix:{tmp_path}/socket"), "connection", State.FAIL)
    assert f"unix:{tmp_path}/socket" in told.found
    assert "No such file or directory" in told.found
    assert "graphstash serve" in told.advice
