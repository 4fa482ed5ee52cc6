import socket
import ssl
import threading
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta

import pytest
import trustme

from graphstash._cli.doctor.findings import State
from graphstash_server.testing import LiveServer
from support.doctor import altering, diagnose, line


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


def test_an_unknown_authority_is_told_with_the_setting_that_names_it(authority, tmp_path, ca_file):
    with tls_server(authority, tmp_path) as server:
        unknown = diagnose(server.url)
        known = diagnose(server.url, ca_file=ca_file)
    assert line(unknown, "TLS").state == State.FAIL
    assert "GRAPHSTASH_CA_FILE" in line(unknown, "TLS").advice
    assert line(unknown, "token").state == State.SKIPPED
    assert line(known, "TLS").state == State.OK
    assert line(known, "TLS").found.startswith("TLSv1.")
    assert line(known, "server").state == State.OK


def test_a_certificate_that_has_expired_is_told_with_this_hosts_time(authority, tmp_path, ca_file):
    past = datetime.now(UTC) - timedelta(days=1)
    begun = past - timedelta(days=9)
    with tls_server(authority, tmp_path, not_before=begun, not_after=past) as server:
        told = line(diagnose(server.url, ca_file=ca_file), "TLS")
    assert told.state == State.FAIL
    assert "expired" in told.found
    assert "renew" in told.advice
    assert f"{datetime.now(UTC):%Y-%m}" in told.advice


def test_a_certificate_that_is_not_valid_yet_points_to_the_clock(authority, tmp_path, ca_file):
    begins = datetime.now(UTC) + timedelta(days=1)
    ends = begins + timedelta(days=9)
    with tls_server(authority, tmp_path, not_before=begins, not_after=ends) as server:
        told = line(diagnose(server.url, ca_file=ca_file), "TLS")
    assert "not yet valid" in told.found
    assert "timedatectl" in told.advice


def test_a_certificate_that_ends_soon_is_a_warning(authority, tmp_path, ca_file):
    soon = datetime.now(UTC) + timedelta(days=3, hours=1)
    with tls_server(authority, tmp_path, not_after=soon) as server:
        findings = diagnose(server.url, ca_file=ca_file)
    assert line(findings, "TLS").state == State.WARN
    assert "expires in 3 days" in line(findings, "TLS").found
    assert f"renew it before {soon:%Y-%m-%d}" in line(findings, "TLS").advice
    assert line(findings, "server").state == State.OK


def test_a_certificate_of_another_host_is_told_with_the_name_that_was_asked_for(
    authority, tmp_path, ca_file
):
    with tls_server(authority, tmp_path, "cache.internal") as server:
        told = line(diagnose(server.url, ca_file=ca_file), "TLS")
    assert told.state == State.FAIL
    assert "127.0.0.1" in told.found
    assert "a name in the certificate" in told.advice


def test_a_server_that_wants_our_certificate_is_told_with_the_settings(
    authority, tmp_path, ca_file
):
    with tls_server(authority, tmp_path, client_ca=ca_file) as server:
        told = line(diagnose(server.url, ca_file=ca_file), "server", State.FAIL)
        authority.issue_cert("job").private_key_and_cert_chain_pem.write_to_path(
            tmp_path / "job.pem"
        )
        shown = diagnose(server.url, ca_file=ca_file, client_cert=tmp_path / "job.pem")
    assert "GRAPHSTASH_CLIENT_CERT" in told.advice
    assert line(shown, "server").state == State.OK


def test_a_proxy_that_wants_our_certificate_is_told_by_its_words(server):
    body = b"<center>No required SSL certificate was sent</center><hr><center>nginx</center>"
    with altering(server.url, 400, body, graphstash_protocol=None) as url:
        told = line(diagnose(url), "TLS")
    assert told.state == State.FAIL
    assert "GRAPHSTASH_CLIENT_CERT" in told.advice


def test_a_refused_handshake_is_told_with_the_setting_for_our_certificate(
    authority, tmp_path, ca_file
):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca_file)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.issue_cert("127.0.0.1").configure_cert(context)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    context.wrap_socket(connection, server_side=True).recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    told = line(diagnose(url, ca_file=ca_file), "TLS", State.FAIL)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    assert "it may require a client certificate" in told.found
    assert "GRAPHSTASH_CLIENT_CERT" in told.advice


def test_http_and_https_are_told_apart_when_the_url_has_the_wrong_one(
    server, authority, tmp_path, ca_file
):
    told = line(diagnose(server.url.replace("http:", "https:")), "TLS")
    assert told.state == State.FAIL
    assert "http://" in told.advice
    with tls_server(authority, tmp_path) as secured:
        told = line(diagnose(secured.url.replace("https:", "http:")), "server")
    assert told.state == State.FAIL
    assert "https://" in told.advice
