from graphstash._cli.doctor.command import examine
from graphstash._cli.doctor.findings import State
from graphstash_server.settings import Settings
from support.doctor import diagnose, line


def test_settings_are_named_with_where_they_come_from(monkeypatch):
    environ = {"GRAPHSTASH_NAMESPACE": "mine", "GRAPHSTASH_URL": "http://127.0.0.1:9"}
    findings = list(examine(environ, {"url": "http://127.0.0.1:8", "namespace": None}))
    told = line(findings, "settings").found
    assert told == "GRAPHSTASH_NAMESPACE from the environment; --url from the command line"
    assert "port 8:" in line(findings, "connection").found


def test_a_wrong_setting_is_named_and_nothing_that_needs_it_is_tried():
    findings = diagnose(wait_seconds="soon")
    told = line(findings, "settings")
    assert told.state == State.FAIL
    assert "GRAPHSTASH_WAIT_SECONDS='soon'" in told.found
    assert "unset it" in told.advice
    assert {each.state for each in findings if each is not told} == {State.SKIPPED}


def test_a_misspelled_variable_gets_the_nearest_setting():
    told = line(diagnose(namespce="mine"), "settings", State.WARN)
    assert told.found == "unknown setting GRAPHSTASH_NAMESPCE, ignored"
    assert told.advice == "did you mean GRAPHSTASH_NAMESPACE?"


def test_no_setting_of_the_server_is_taken_for_a_misspelled_one():
    findings = diagnose(**dict.fromkeys(Settings.model_fields, "1"), url="http://127.0.0.1:9")
    assert not [each for each in findings if "did you mean" in each.advice]
    assert any("GRAPHSTASH_DATABASE_URL" in each.found for each in findings)


def test_a_hook_that_there_is_not_is_a_failure_with_the_nearest_name():
    told = line(diagnose(hooks="jaxx,triton"), "settings", State.FAIL)
    assert "unknown hook jaxx" in told.found
    assert told.advice.startswith("did you mean jax?")


def test_a_cache_that_is_switched_off_is_a_warning():
    assert "GRAPHSTASH_ENABLED" in line(diagnose(enabled="0"), "settings", State.WARN).advice


def test_certificates_that_cannot_be_read_are_a_wrong_setting(tmp_path):
    told = line(diagnose(ca_file=tmp_path / "absent.pem"), "settings", State.FAIL)
    assert f"GRAPHSTASH_CA_FILE={tmp_path / 'absent.pem'}" in told.found
