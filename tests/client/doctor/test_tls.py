"""What the doctor says of certificates, the server's and the job's own."""

import ssl
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
import trustme

from graphstash._cli.doctor.findings import State
from graphstash_server.testing import LiveServer
from support.doctor import altering, diagnose, expect, line
from support.listener import Listener


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def ca_file(authority, tmp_path):
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return path


@contextmanager
def tls_server(authority, folder, *names, client_ca=None, **terms):
    certificate = authority.issue_cert(*names or ("127.0.0.1", "localhost"), **terms)
    for name, blobs in (
        ("cert.pem", certificate.cert_chain_pems),
        ("key.pem", [certificate.private_key_pem]),
    ):
        (folder / name).write_bytes(b"".join(blob.bytes() for blob in blobs))
    with LiveServer(
        folder / "data",
        tls_cert_file=folder / "cert.pem",
        tls_key_file=folder / "key.pem",
        tls_client_ca_file=client_ca,
        log_level="error",
    ) as server:
        yield server


def test_unknown_authority_is_reported_with_its_setting(authority, tmp_path, ca_file):
    with tls_server(authority, tmp_path) as server:
        unknown = diagnose(server.url)
        known = diagnose(server.url, ca_file=ca_file)
        plain = diagnose(server.url.replace("https:", "http:"))
    expect(unknown, "TLS", State.FAIL, advice="GRAPHSTASH_CA_FILE")
    assert line(unknown, "token").state == State.SKIPPED
    expect(known, "TLS", State.OK, found="TLSv1.")
    assert line(known, "server").state == State.OK
    expect(plain, "server", State.FAIL, advice="https://")


def test_https_to_plain_server_is_reported(server):
    findings = diagnose(server.url.replace("http:", "https:"))
    expect(findings, "TLS", State.FAIL, advice="http://")


NOW = datetime.now(UTC)
CLOCK = f"certificate. This host's clock says {NOW:%Y-%m}"
SOON = NOW + timedelta(days=3, hours=1)


@pytest.mark.parametrize(
    ("begins", "ends", "state", "found", "advice"),
    [
        (-10, timedelta(days=-1), State.FAIL, "expired", f"renew the server's {CLOCK}"),
        (1, timedelta(days=9), State.FAIL, "not yet valid", "timedatectl"),
        (-1, SOON - NOW, State.WARN, "expires in 3 days", f"renew it before {SOON:%Y-%m-%d}"),
    ],
)
def test_validity_of_certificate_is_reported(
    authority, tmp_path, ca_file, begins, ends, state, found, advice
):
    times = {"not_before": NOW + timedelta(days=begins), "not_after": NOW + ends}
    with tls_server(authority, tmp_path, **times) as server:
        findings = diagnose(server.url, ca_file=ca_file)
    expect(findings, "TLS", state, found=found, advice=advice)
    assert any(each.name == "server" for each in findings) == (state == State.WARN)


def test_certificate_of_another_host_is_reported_with_requested_name(authority, tmp_path, ca_file):
    with tls_server(authority, tmp_path, "cache.internal") as server:
        findings = diagnose(server.url, ca_file=ca_file)
    expect(findings, "TLS", State.FAIL, found="127.0.0.1", advice="a name in the certificate")


def test_required_client_certificate_is_reported_with_settings(authority, tmp_path, ca_file):
    job = tmp_path / "job.pem"
    authority.issue_cert("job").private_key_and_cert_chain_pem.write_to_path(job)
    with tls_server(authority, tmp_path, client_ca=ca_file) as server:
        findings = diagnose(server.url, ca_file=ca_file)
        shown = diagnose(server.url, ca_file=ca_file, client_cert=job)
    expect(findings, "server", State.FAIL, advice="GRAPHSTASH_CLIENT_CERT")
    assert line(shown, "server").state == State.OK


def test_client_certificate_required_by_proxy_is_recognized(server):
    body = b"<center>No required SSL certificate was sent</center><hr><center>nginx</center>"
    with altering(server.url, 400, body, graphstash_protocol=None) as url:
        expect(diagnose(url), "TLS", State.FAIL, advice="GRAPHSTASH_CLIENT_CERT")


def test_refused_handshake_is_reported_with_certificate_setting(authority, ca_file):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca_file)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with Listener(context=context) as listener:
        findings = diagnose(listener.url, ca_file=ca_file)
    found, advice = "it may require a client certificate", "GRAPHSTASH_CLIENT_CERT"
    expect(findings, "TLS", State.FAIL, found=found, advice=advice)
