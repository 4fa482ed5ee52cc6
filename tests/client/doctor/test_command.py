"""The command `graphstash doctor`: its statuses and its output. It changes nothing."""

import json
import threading

import pytest

from graphstash._cli.doctor.findings import Finding, State, within
from support.doctor import altering, diagnose, doctor, expect, line
from support.processes import graphstash
from support.waiting import PATIENT_VARIABLES


def test_a_sound_host_passes_every_check_and_ends_with_0(server, namespace):
    command = ("doctor", "--url", server.url, "--namespace", namespace)
    result = graphstash(*command, **PATIENT_VARIABLES)
    assert result.returncode == 0, result.stdout
    assert result.stdout.endswith("\nno problems found\n")
    assert "✗" not in result.stdout
    assert result.stderr == ""


def test_failure_exits_with_1_shows_advice_and_changes_nothing(tmp_path):
    settings = {"GRAPHSTASH_CACHE_DIR": str(tmp_path / "cache")}
    result = doctor("--url", "http://127.0.0.1:9", **settings)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    failure = next(number for number, each in enumerate(lines) if each.startswith("✗"))
    assert "http://127.0.0.1:9: Connection refused" in lines[failure]
    assert "→ start a server there with `graphstash serve`" in lines[failure + 1]
    assert lines[-1].startswith("1 failure,")
    assert result.stderr == ""
    result = doctor("--url", "http://127.0.0.1:9", "--json", **settings)
    assert result.returncode == 1
    findings = [Finding(**each) for each in json.loads(result.stdout)]
    expect(findings, "connection", State.FAIL, advice="graphstash serve")
    assert {each.state for each in findings} <= set(State)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("terminal", "shown"),
    [
        ({"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, "? connection"),
        ({"FORCE_COLOR": 1, "TERM": "xterm", "COLUMNS": 10}, "1 failure"),
    ],
    ids=["without Unicode", "narrower than the names of the findings"],
)
def test_findings_are_shown_on_a_poor_terminal(terminal, shown):
    result = graphstash("doctor", "--url", "http://127.0.0.1:9", **terminal)
    assert (result.returncode, result.stderr) == (1, "")
    assert shown in result.stdout


def test_findings_and_advice_are_wrapped_on_a_terminal_only():
    command = ("doctor", "--url", "http://127.0.0.1:9")
    piped = graphstash(*command).stdout
    shown = graphstash(*command, FORCE_COLOR=1, TERM="dumb").stdout  # of 80 columns
    for word, following, indent in (
        ("call", "graphstash.install()", 17),
        ("set", "GRAPHSTASH_URL to", 19),
    ):
        assert f"{word} {following}" in piped
        assert f"{word}\n{'':{indent}}{following}" in shown


def test_answer_of_unknown_server_is_escaped_for_terminal(server):
    body = b'{"version": "\\u001b[2J\\u001b]0;owned\\u0007"}'
    with altering(server.url, body=body, graphstash_protocol="2") as url:
        result = doctor("--url", url)
    assert r"\x1b[2J\x1b]0;owned\x07 speaks protocol 2" in result.stdout
    assert "\x1b" not in result.stdout


def test_endless_check_is_abandoned():
    with pytest.raises(TimeoutError):
        within(0.05, threading.Event().wait)


def test_error_of_a_check_reaches_its_caller():
    with pytest.raises(ZeroDivisionError):
        within(30, lambda: 1 / 0)


def test_crashing_check_is_a_finding_and_hides_no_other(monkeypatch):
    def broken(*_):
        raise RuntimeError("of this test")
        yield

    monkeypatch.setattr("graphstash._cli.doctor.command.check_local", broken)
    findings = diagnose()
    expect(findings, "local tier", State.FAIL, found="RuntimeError: of this test")
    assert line(findings, "start")
