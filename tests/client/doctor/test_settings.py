"""The doctor's findings about settings: their sources, and invalid values."""

import pytest

from graphstash._cli.doctor.command import examine
from graphstash._cli.doctor.findings import State
from graphstash_server.settings import Settings
from support.doctor import diagnose, expect, line


def test_settings_are_listed_with_their_source():
    environ = {"GRAPHSTASH_NAMESPACE": "mine", "GRAPHSTASH_URL": "http://127.0.0.1:9"}
    findings = list(examine(environ, {"url": "http://127.0.0.1:8", "namespace": None}))
    sources = line(findings, "settings").found
    assert sources == "--url from the command line; then GRAPHSTASH_NAMESPACE from the environment"
    assert ":8: " in line(findings, "connection").found


@pytest.mark.parametrize(
    ("settings", "state", "found", "advice"),
    [
        (
            {"namespce": "mine"},
            State.WARN,
            "unknown setting GRAPHSTASH_NAMESPCE, ignored",
            "did you mean GRAPHSTASH_NAMESPACE?",
        ),
        ({"hooks": "jaxx,triton"}, State.FAIL, "unknown hook jaxx", "did you mean jax?"),
        ({"enabled": "0"}, State.WARN, "", "GRAPHSTASH_ENABLED"),
        ({"ca_file": "/nowhere/x.pem"}, State.FAIL, "GRAPHSTASH_CA_FILE=/nowhere/x.pem", ""),
    ],
)
def test_invalid_setting_is_reported_with_advice(settings, state, found, advice):
    expect(diagnose(**settings), "settings", state, found=found, advice=advice)


def test_invalid_settings_skip_dependent_checks():
    findings = diagnose(wait_seconds="soon")
    found = "GRAPHSTASH_WAIT_SECONDS='soon'"
    finding = expect(findings, "settings", State.FAIL, found=found, advice="unset it")
    assert {each.state for each in findings if each is not finding} == {State.SKIPPED}


def test_server_settings_are_not_reported_as_misspelled():
    findings = diagnose(**dict.fromkeys(Settings.model_fields, "1"), url="http://127.0.0.1:9")
    assert not [each for each in findings if "did you mean" in each.advice]
    assert any("GRAPHSTASH_DATABASE_URL" in each.found for each in findings)
