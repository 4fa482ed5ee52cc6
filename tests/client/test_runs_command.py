"""`graphstash explain --job` compares runs, and `graphstash report` sums a month."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial

import httpx
import pytest

from graphstash_schema import ArtifactMetadata
from support.host import key
from support.waiting import until

NOW = datetime.now(UTC)
key_of = partial(key, kind="jax")


@pytest.fixture
def report_run(server, namespace, hosts):
    """Return a function that reports a run as an exiting process does.

    It also publishes an artifact, because only a namespace with artifacts has reports.
    """
    metadata = ArtifactMetadata(compile_seconds=1, raw_size_bytes=1)
    hosts("publisher").put(key_of(99), b"x", metadata)

    def report(run, *misses, job="nightly", hits=0, started_at=NOW):
        counts = {
            "kind": "jax",
            "device_type": key().device_type,
            "hits_server": hits,
            "misses": len(misses),
            "compile_seconds": 30.0 * len(misses),
            "saved_compile_seconds": 40.0 * hits,
        }
        body = {
            "job": job,
            "program": "train.py",
            "started_at": started_at.isoformat(),
            "seconds": 600,
            "saved_wall_seconds": 20,
            "counts": [counts],
            "misses": [
                {"key": asdict(key_of(number)), "label": label, "seconds": 30, "cause": cause}
                for number, (label, cause) in enumerate(misses)
            ],
        }
        url = f"{server.url}/v1/{namespace}/runs/{run}/0"
        answer = httpx.put(url, json=body, timeout=30)
        assert answer.status_code == 204, answer.text

    return report


@pytest.fixture
def two_runs(report_run):
    """Report two runs of yesterday's jax version, and one after the upgrade."""
    upgraded = "jax: 0.11.0 here, 0.10.2 there"
    report_run("run-1", ("jit(new)", "new program"), hits=2)
    report_run("run-2", hits=3)
    misses = [("jit(new)", "new program"), ("jit(step)", upgraded), ("jit(init)", upgraded)]
    report_run("run-3", *misses)


def test_last_run_is_compared_with_previous_or_chosen_run(two_runs, report_run, command):
    explanation = command("explain", "--job", "nightly").stdout
    assert "run-3" in explanation.splitlines()[1]
    assert "run-2" in explanation.splitlines()[1]
    assert "missed, not by the run before:" in explanation
    assert (
        "2 misses (1 min 0 s): jax: 0.11.0 here, 0.10.2 there\n    jit(step), jit(init)"
        in explanation
    )
    assert "missed by both" not in explanation

    chosen = ("explain", "--job", "nightly", "--against", "run-1")
    assert "missed by both:\n1 miss (30 s): new program\n    jit(new)" in command(*chosen).stdout
    compared = json.loads(command(*chosen, "--json").stdout)
    assert (compared["run"]["run"], compared["against"]["run"]) == ("run-3", "run-1")
    assert [each["label"] for each in compared["new"]] == ["jit(step)", "jit(init)"]
    assert [each["label"] for each in compared["again"]] == ["jit(new)"]

    report_run("run-4", ("jit(step)", ""), job="once")
    explanation = command("explain", "--job", "once").stdout
    cause = "the cause was not recorded; `graphstash run --explain` records it"
    assert f"1 miss (30 s): {cause}\n    jit(step)" in explanation
    assert "against" not in explanation


def test_missing_run_is_named(two_runs, command):
    for options, status, text in (
        (("--job", "nobody"), 1, "no run of the job nobody is reported"),
        (("--job", "a/b"), 2, "job name"),
        (("--against", "run-1"), 2, "--against needs --job"),
        (("--job", "nightly", "--against", "run-"), 1, "2 runs begin with 'run-'"),
        (("--job", "nightly", "--against", "nothing"), 1, "no report of a run nothing"),
    ):
        assert text in command("explain", *options, status=status).stderr


def test_a_month_is_reported_in_markdown(two_runs, command, hosts, namespace, report_run):
    host = hosts("publisher")
    host.put(key_of(1), b"x" * 1000, ArtifactMetadata(compile_seconds=90, raw_size_bytes=1000))
    reader = hosts("another")
    assert reader.get(key_of(1))
    assert reader.get(key_of(2)) is None

    def reported():
        return json.loads(command("report", "--namespace", namespace, "--json").stdout)

    until(lambda: reported()["total"]["hits"] == 1 and reported()["total"]["misses"] >= 1)
    made = reported()
    assert made["month"] == f"{NOW:%Y-%m}"
    assert made["total"]["saved_compile_seconds"] == 90
    assert [each["group"] for each in made["by"]["kind"]] == ["jax"]
    assert (made["runs"], made["runs_read"]) == (3, 2)
    assert made["misses"][0]["label"] == "jit(new)"
    assert (made["misses"][0]["misses"], made["misses"][0]["seconds"]) == (2, 60)

    text = command("report", "--namespace", namespace).stdout
    assert text.startswith(f"# graphstash in {NOW:%B %Y}, namespace ")
    assert "**1 min 30 s of compile time was not spent.**" in text
    assert "## By kind of artifact" in text
    assert "| jit(new) | " in text
    assert "ended about 1 min 0 s earlier together, by their own estimate" in text

    def groups():
        made = json.loads(command("report", "--json").stdout)
        return {each["group"] for each in made["by"]["namespace"]}

    until(lambda: {namespace, "(others)"} & groups())


def test_month_before_the_latest_runs_is_reported_whole(
    report_run, namespace, command, monkeypatch
):
    """The server lists these runs on several pages."""
    monkeypatch.setattr("graphstash._cli.report.MAX_LISTED_RUNS", 2)
    before = datetime(2026, 1, 31, 23, tzinfo=UTC)
    for number in range(5):
        report_run(f"old-{number}", ("jit(old)", ""), started_at=before)
    for number in range(3):
        report_run(f"run-{number}", ("jit(new)", ""))
    arguments = ("report", "--month", "2026-01", "--namespace", namespace, "--json")
    made = json.loads(command(*arguments).stdout)
    assert (made["runs"], made["runs_read"]) == (5, 5)
    assert [each["label"] for each in made["misses"]] == ["jit(old)"]


def test_empty_month_is_reported_and_malformed_one_refused(command):
    report = command("report", "--month", "2001-02").stdout
    assert "Nothing was looked up in this month" in report
    assert report.startswith("# graphstash in February 2001")
    for month in ("november", "2026-13", "1999-12", "2026", "9999-12"):
        errors = command("report", "--month", month, status=2).stderr
        assert f"--month={month!r}: expected a year and a month" in errors


def test_hostile_labels_are_text_in_markdown_and_in_a_terminal(
    report_run, command, namespace, hosts
):
    hostile = "<script>alert(1)</script>|[x](http://evil)\u202e`"
    report_run("run-1", (hostile, "# heading | cell"), job="hostile")
    assert hosts("reader").get(key_of(7)) is None
    until(
        lambda: json.loads(command("report", "--namespace", namespace, "--json").stdout)["total"][
            "misses"
        ]
    )
    output = command("report", "--namespace", namespace).stdout
    assert "| \\<script\\>alert(1)\\</script\\>\\|\\[x\\](http\\://evil)\\\\u202e\\` |" in output
    assert "| # heading \\| cell |" in output
    output += command("explain", "--job", "hostile").stdout
    assert "\u202e" not in output
    made = json.loads(command("report", "--namespace", namespace, "--json").stdout)
    assert made["misses"][0]["label"] == hostile
