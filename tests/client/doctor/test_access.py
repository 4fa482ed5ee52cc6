import time
from datetime import UTC, datetime, timedelta

import pytest

from graphstash._cli.doctor.access import check_access
from graphstash._cli.doctor.findings import State
from graphstash._cli.doctor.server import Way
from graphstash.config import ClientConfig
from support.doctor import CANARY, altering, diagnose, doctor, line


def test_a_token_that_may_write_passes_with_what_it_may(guarded, namespace):
    token = guarded.token(f"write:{namespace}")
    findings = diagnose(guarded.url, token=token, namespace=namespace)
    told = line(findings, "token")
    assert told.state == State.OK
    assert f"from GRAPHSTASH_TOKEN, grants write:{namespace}; it does not expire" in told.found
    assert "can read and write" in line(findings, "namespace").found


def test_without_a_token_the_advice_is_how_to_get_one(guarded, namespace):
    told = line(diagnose(guarded.url, namespace=namespace), "token")
    assert told.state == State.FAIL
    assert "none is set" in told.found
    assert f"graphstash token create --grant write:{namespace}" in told.advice
    assert "GRAPHSTASH_TOKEN" in told.advice


def test_a_token_that_the_server_does_not_know_is_a_failure_with_where_it_came_from(guarded):
    told = line(diagnose(guarded.url, token=CANARY), "token")
    assert told.state == State.FAIL
    assert "rejected the token from GRAPHSTASH_TOKEN" in told.found
    assert "ask an administrator" in told.advice


def test_a_revoked_token_is_a_failure(guarded, namespace):
    token = guarded.token(f"write:{namespace}")
    gone = guarded.http(guarded.admin).delete(f"/v1/-/tokens/{token.split('_')[1]}")
    assert gone.is_success
    told = line(diagnose(guarded.url, token=token, namespace=namespace), "token")
    assert told.state == State.FAIL
    assert "revoked" in told.found


def test_a_token_that_ends_soon_is_a_warning_and_an_ended_one_a_failure(guarded, namespace):
    soon = datetime.now(UTC) + timedelta(days=3, minutes=1)
    token = guarded.token(f"write:{namespace}", expires_at=soon)
    told = line(diagnose(guarded.url, token=token, namespace=namespace), "token")
    assert told.state == State.WARN
    assert "it expires in 3 days" in told.found
    assert f"before {soon:%Y-%m-%d}" in told.advice
    at_once = datetime.now(UTC) + timedelta(seconds=1)
    token = guarded.token(f"write:{namespace}", expires_at=at_once)
    while datetime.now(UTC) <= at_once:
        time.sleep(0.05)
    told = line(diagnose(guarded.url, token=token, namespace=namespace), "token")
    assert told.state == State.FAIL
    assert "expired" in told.found


def test_a_token_for_another_namespace_is_a_failure_with_the_grant_that_is_missing(
    guarded, namespace
):
    token = guarded.token("write:elsewhere")
    told = line(diagnose(guarded.url, token=token, namespace=namespace), "namespace")
    assert told.state == State.FAIL
    assert f"grant read:{namespace}" in told.advice


def test_a_namespace_that_is_only_read_from_must_be_readable_too(guarded, namespace):
    token = guarded.token(f"write:{namespace}")
    findings = diagnose(
        guarded.url, token=token, namespace=namespace, read_namespaces="trusted-models"
    )
    told = line(findings, "namespace", State.FAIL)
    assert "'trusted-models'" in told.found


def test_a_token_that_may_only_read_is_a_warning_unless_the_job_is_read_only(guarded, namespace):
    token = guarded.token(f"read:{namespace}")
    settings = {"token": token, "namespace": namespace}
    told = line(diagnose(guarded.url, **settings), "namespace")
    assert told.state == State.WARN
    assert f"grant write:{namespace}" in told.advice
    assert "GRAPHSTASH_READ_ONLY=true" in told.advice
    assert line(diagnose(guarded.url, read_only="1", **settings), "namespace").state == State.OK


def test_what_everybody_may_read_is_told_to_a_job_without_a_token(guarded, namespace):
    guarded.set_policy(namespace, anonymous_read=True)
    told = line(diagnose(guarded.url, namespace=namespace), "token")
    assert told.state == State.WARN
    assert "readable without a token" in told.found
    assert "GRAPHSTASH_READ_ONLY=true" in told.advice


def test_a_token_comes_from_a_file_or_from_netrc_and_the_place_is_told(
    guarded, namespace, tmp_path, monkeypatch
):
    token = guarded.token(f"write:{namespace}")
    (tmp_path / "token").write_text(f"{token}\n")
    told = line(diagnose(guarded.url, token_file=tmp_path / "token"), "token")
    assert f"GRAPHSTASH_TOKEN_FILE={tmp_path / 'token'}" in told.found
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login x password {token}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert str(tmp_path / "netrc") in line(diagnose(guarded.url), "token").found


def test_a_token_file_that_is_not_there_is_a_failure(guarded, tmp_path):
    told = line(diagnose(guarded.url, token_file=tmp_path / "absent"), "token")
    assert told.state == State.FAIL
    assert f"GRAPHSTASH_TOKEN_FILE={tmp_path / 'absent'}" in told.found
    assert "chmod 600" in told.advice


def test_a_token_in_the_clear_to_another_host_is_a_warning(guarded, namespace):
    token = guarded.token(f"write:{namespace}")
    config = ClientConfig.load({}, url=guarded.url, namespace=namespace, token=token)
    told = line(list(check_access(config, Way(is_loopback=False))), "token", State.WARN)
    assert "sent unencrypted" in told.found
    assert "https://" in told.advice
    assert line(list(check_access(config, Way(is_loopback=True))), "token").state == State.OK


def test_an_open_server_needs_no_token_and_says_so(server):
    assert "does not require a token" in line(diagnose(server.url), "token").found
    told = line(diagnose(server.url, token=CANARY), "token")
    assert told.state == State.OK
    assert "is not needed" in told.found


def test_a_server_that_knows_no_tokens_yet_is_told(server):
    with altering(server.url, 404, at="/v1/-/access") as url:
        assert line(diagnose(url), "token").state == State.OK
        told = line(diagnose(url, token=CANARY), "token")
    assert told.state == State.WARN
    assert "upgrade" in told.advice


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_no_secret_is_ever_shown(guarded, arguments):
    # Two typing errors, and what a server repeats.
    secrets = {"GRAPHSTASH_TOKEN": CANARY, "GRAPHSTASH_TOKE": CANARY, "GRAPHSTASH_SECRET": CANARY}
    for url in (guarded.url, f"http://me:{CANARY}@cache:1"):
        result = doctor("--url", url, *arguments, **secrets)
        assert result.returncode == 1
        assert "CANARY" not in result.stdout + result.stderr
    result = doctor(*arguments, **secrets | {"GRAPHSTASH_TOKEN": f"{CANARY} and a blank"})
    assert result.returncode == 1
    assert "GRAPHSTASH_TOKEN" in result.stdout
    assert "CANARY" not in result.stdout + result.stderr
