"""`graphstash summary`: hits and compilations of the last run, for a CI page."""

import json
import sys

import pytest

from support.build_job import BUILD_PROGRAM
from support.processes import graphstash, graphstash_here
from support.waiting import PATIENT_VARIABLES, variables_of


@pytest.fixture
def run(config, tmp_path):
    """Return a function that runs a job and returns the variables of its host."""

    def run(host, *programs, **variables):
        script = tmp_path / f"{host}.py"
        script.write_text(f"{BUILD_PROGRAM}\nfor each in {programs!r}: build(each)")
        variables = variables_of(config(host)) | variables
        graphstash("run", "--", sys.executable, script, check=True, **variables)
        return variables

    return run


def test_summary_names_compilations_and_minimum_hit_rate_decides_the_exit_status(run):
    run("main", "a|b", "second")
    variables = run("change", "a|b", "third")

    shown = graphstash_here("summary", **variables)
    assert shown.returncode == 0, shown.stderr
    assert "1 hit, 1 miss (50% hits)" in shown.stdout
    (row,) = (line for line in shown.stdout.splitlines() if line.startswith("| third "))
    assert row.count(" | ") == 2
    assert "second" not in shown.stdout
    ran = json.loads(graphstash_here("summary", "--json", **variables).stdout)
    assert (ran["hits"], ran["misses"], ran["troubled"]) == (1, 1, 0)
    assert [each["label"] for each in ran["compiled"]] == ["third"]
    assert ran["compiled"][0]["why"]
    for minimum, status in (("0.5", 0), ("0.51", 1)):
        ran = graphstash_here("summary", "--minimum-hit-rate", minimum, **variables)
        assert ran.returncode == status
        assert ("hit rate 50.0%" in ran.stderr) == bool(status)
        assert "1 hit, 1 miss" in ran.stdout


def test_labels_cannot_break_the_table(run):
    shown = graphstash_here("summary", **run("hostile", "x|y\n| z |", "<b>`"))
    rows = [line for line in shown.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 4
    assert all(row.replace("\\|", "").count("|") == 4 for row in rows)
    assert "<b>" not in shown.stdout.replace("\\<b\\>", "")


def test_host_without_a_run_has_an_empty_summary(tmp_path, server):
    variables = {"GRAPHSTASH_URL": server.url, "GRAPHSTASH_CACHE_DIR": str(tmp_path / "none")}
    ran = graphstash_here("summary", **variables, **PATIENT_VARIABLES)
    assert ran.returncode == 0, ran.stderr
    assert "No run on this host" in ran.stdout
    ran = graphstash_here("summary", "--json", "--minimum-hit-rate", "0.1", **variables)
    assert ran.returncode == 1
    assert "no hit rate" in ran.stderr
    assert json.loads(ran.stdout)["hit_rate"] is None


def test_compilations_without_the_cache_count_against_the_rate_also_beyond_the_record(run):
    programs = [f"program {number}" for number in range(600)]
    variables = run("many", *programs, GRAPHSTASH_URL="http://127.0.0.1:9")
    ran = json.loads(graphstash_here("summary", "--json", **variables).stdout)
    assert (ran["troubled"], len(ran["compiled"])) == (600, 512)
    ran = graphstash_here("summary", "--minimum-hit-rate", "0.1", **variables)
    assert ran.returncode == 1
    assert "And 580 programs more." in ran.stdout


@pytest.mark.parametrize("rate", ["-0.1", "1.5", "most"])
def test_rates_out_of_range_are_refused(rate):
    ran = graphstash_here("summary", "--minimum-hit-rate", rate)
    assert ran.returncode == 2
    assert "--minimum-hit-rate" in ran.stderr
