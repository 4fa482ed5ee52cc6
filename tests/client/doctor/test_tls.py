"""The doctor's findings about the server's certificate and the job's own."""

from datetime import UTC, datetime, timedelta

import pytest

from graphstash._cli.doctor.findings import State
from support.authority import Authority
from support.doctor import altering, diagnose, expect, line
from support.listener import Listener


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def test_unknown_authority_and_wrong_scheme_are_reported_with_the_setting(
    authority, tmp_path, server
):
    with authority.server(tmp_path / "data") as secure:
        unknown = diagnose(secure.url)
        known = diagnose(secure.url, ca_file=authority.file)
        plain = diagnose(secure.url.replace("https:", "http:"))
    expect(unknown, "TLS", State.FAIL, advice="GRAPHSTASH_CA_FILE")
    assert line(unknown, "token").state == State.SKIPPED
    expect(known, "TLS", State.OK, found="TLSv1.")
    assert line(known, "server").state != State.FAIL  # a slow answer is a warning
    expect(plain, "server", State.FAIL, advice="https://")
    findings = diagnose(server.url.replace("http:", "https:"))
    expect(findings, "TLS", State.FAIL, advice="http://")


HERE = "127.0.0.1"
DAY = timedelta(days=1)
NOW = datetime.now(UTC)
CLOCK = f"this host's clock, which says {NOW:%Y-%m}"
SOON = NOW + timedelta(days=3, hours=12)  # the last test may run hours after NOW


@pytest.mark.parametrize(
    ("name", "begins", "ends", "state", "found", "advice"),
    [
        (
            HERE,
            -10,
            DAY * -1,
            State.FAIL,
            "expired",
            f"renew the server's certificate, or correct {CLOCK}",
        ),
        (HERE, 1, DAY * 9, State.FAIL, "not yet valid", CLOCK),
        (HERE, -1, SOON - NOW, State.WARN, "expires in 3 days", f"it before {SOON:%Y-%m-%d}"),
        ("cache.internal", -1, DAY * 90, State.FAIL, HERE, "a name in the certificate"),
    ],
)
def test_validity_and_name_of_certificate_are_reported(
    authority, tmp_path, name, begins, ends, state, found, advice
):
    times = {"not_before": NOW + DAY * begins, "not_after": NOW + ends}
    with authority.server(tmp_path / "data", name, **times) as server:
        findings = diagnose(server.url, ca_file=authority.file)
    expect(findings, "TLS", state, found=found, advice=advice)
    assert any(each.name == "server" for each in findings) == (state == State.WARN)


def test_required_client_certificate_is_reported_with_settings(authority, tmp_path, server):
    cert, key = authority.issue("job")
    job = tmp_path / "job.pem"
    job.write_bytes(cert.read_bytes() + key.read_bytes())
    with authority.server(tmp_path / "data", is_mutual=True) as mutual:
        findings = diagnose(mutual.url, ca_file=authority.file)
        shown = diagnose(mutual.url, ca_file=authority.file, client_cert=job)
    expect(findings, "server", State.FAIL, advice="GRAPHSTASH_CLIENT_CERT")
    assert line(shown, "server").state != State.FAIL  # as above
    with Listener(context=authority.demanding_context()) as listener:
        findings = diagnose(listener.url, ca_file=authority.file)
    found, advice = "the server refused", "it may require a client certificate"
    expect(findings, "TLS", State.FAIL, found=found, advice=advice)
    body = b"<center>No required SSL certificate was sent</center><hr><center>nginx</center>"
    with altering(server.url, 400, body, graphstash_protocol=None) as url:
        expect(diagnose(url), "TLS", State.FAIL, advice="GRAPHSTASH_CLIENT_CERT")
