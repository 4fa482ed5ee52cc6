"""The doctor's findings about the token: its source, its grants, and its expiry."""

from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from graphstash._cli.doctor.findings import State
from graphstash_schema import TOKEN_FORM
from support.doctor import CANARY, altering, diagnose, doctor, expect


@pytest.fixture
def examine(guarded, namespace):
    """Diagnose a job of this namespace on the server that requires tokens."""
    return partial(diagnose, guarded.url, namespace=namespace)


def test_missing_unknown_and_revoked_tokens_are_failures(guarded, examine, namespace):
    advice = f"graphstash token create --grant write:{namespace}"
    finding = expect(examine(), "token", State.FAIL, found="none is set", advice=advice)
    assert "GRAPHSTASH_TOKEN" in finding.advice
    found = "rejected the token from GRAPHSTASH_TOKEN"
    unknown = examine(token=CANARY)
    expect(unknown, "token", State.FAIL, found=found, advice="ask an administrator")

    token = guarded.token(f"write:{namespace}")
    findings = examine(token=token)
    granted = f"from GRAPHSTASH_TOKEN, grants write:{namespace}; it does not expire"
    expect(findings, "token", State.OK, found=granted)
    expect(findings, "namespace", State.OK, found="can read and write")
    path = f"/v1/-/tokens/{TOKEN_FORM.fullmatch(token)['id']}"
    assert guarded.http(guarded.admin).delete(path).is_success
    expect(examine(token=token), "token", State.FAIL, found="revoked")
    guarded.set_policy(namespace, anonymous_read=True)
    found, advice = "readable without a token", "GRAPHSTASH_READ_ONLY=true"
    expect(examine(), "token", State.WARN, found=found, advice=advice)


def test_a_token_that_ends_soon_is_a_warning_and_an_ended_one_a_failure(
    guarded, examine, namespace
):
    now = datetime.now(UTC)
    soon = now + timedelta(days=3, minutes=30)
    token = guarded.token(f"write:{namespace}", expires_at=soon)
    advice = f"before {soon:%Y-%m-%d}"
    expect(examine(token=token), "token", State.WARN, found="it expires in 3 days", advice=advice)
    yesterday = now - timedelta(days=1)
    ended = guarded.token(
        f"write:{namespace}", clock=lambda: yesterday - timedelta(days=1), expires_at=yesterday
    )
    expect(examine(token=ended), "token", State.FAIL, found="expired")


@pytest.mark.parametrize(
    ("grant", "settings", "state", "found", "advice"),
    [
        ("write:elsewhere", {}, State.FAIL, "", "grant read:{namespace}"),
        ("write:{namespace}", {"read_namespaces": "trusted"}, State.FAIL, "'trusted'", ""),
        ("read:{namespace}", {}, State.WARN, "", "grant write:{namespace}"),
        ("read:{namespace}", {}, State.WARN, "", "GRAPHSTASH_READ_ONLY=true"),
        ("read:{namespace}", {"read_only": "1"}, State.OK, "", ""),
    ],
)
def test_namespaces_of_the_job_are_compared_with_grants(
    guarded, examine, namespace, grant, settings, state, found, advice
):
    findings = examine(token=guarded.token(grant.format(namespace=namespace)), **settings)
    advice = advice.format(namespace=namespace)
    expect(findings, "namespace", state, found=found, advice=advice)


def test_token_from_file_or_netrc_is_reported_with_its_source(
    guarded, examine, namespace, tmp_path, monkeypatch
):
    file, netrc = tmp_path / "token", tmp_path / "netrc"
    place = f"GRAPHSTASH_TOKEN_FILE={file}"
    expect(examine(token_file=file), "token", State.FAIL, found=place, advice="chmod 600")
    token = guarded.token(f"write:{namespace}")
    file.write_text(f"{token}\n")
    expect(examine(token_file=file), "token", State.OK, found=place)
    netrc.write_text(f"machine 127.0.0.1 login x password {token}\n")
    monkeypatch.setenv("NETRC", str(netrc))
    expect(examine(), "token", State.OK, found=str(netrc))


def test_a_token_in_the_clear_to_another_host_is_a_warning(guarded, examine, monkeypatch):
    monkeypatch.setattr("graphstash._cli.doctor.access.is_on_this_host", lambda _: False)
    found = "sent unencrypted"
    expect(examine(token=CANARY), "token", State.WARN, found=found, advice="https://")


def test_open_server_or_one_without_tokens_is_reported(server):
    expect(diagnose(server.url), "token", State.OK, found="does not require a token")
    expect(diagnose(server.url, token=CANARY), "token", State.OK, found="is not needed")
    with altering(server.url, 404, at="/v1/-/access") as url:
        expect(diagnose(url), "token", State.OK)
        expect(diagnose(url, token=CANARY), "token", State.WARN, advice="upgrade")


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_no_secret_is_shown(guarded, arguments):
    # The token is in two misspelled variables and in a URL, which a server may repeat.
    secrets = {"GRAPHSTASH_TOKEN": CANARY, "GRAPHSTASH_TOKE": CANARY, "GRAPHSTASH_SECRET": CANARY}
    for url in (guarded.url, f"http://me:{CANARY}@cache:1"):
        result = doctor("--url", url, *arguments, **secrets)
        assert result.returncode == 1
        assert "CANARY" not in result.stdout + result.stderr
    result = doctor(*arguments, **secrets | {"GRAPHSTASH_TOKEN": f"{CANARY} and a blank"})
    assert result.returncode == 1
    assert "GRAPHSTASH_TOKEN" in result.stdout
    assert "CANARY" not in result.stdout + result.stderr
