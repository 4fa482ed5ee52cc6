"""The first host that needs a kernel tunes it, and all other hosts use the answer."""

import json
import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from graphstash import tuning
from graphstash._process.session import uninstall
from graphstash_schema import DeviceType
from support.json_page import fields_of
from support.processes import graphstash, graphstash_on_terminal
from support.waiting import variables_of

KERNEL = Path(__file__).parents[2] / "support" / "tuned_kernel.py"
BEST = {"tile": 32, "vector": 8}
IMPOSSIBLE = r"no configuration of tuned rows .* works: 5 trials in .*; 5 failed: compile; "
IMPOSSIBLE += r"ended by --trials 5; the last: .* failed \(compile\): ValueError: \{'tile'"


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Return a function that returns the number of builds since its last call."""
    file = tmp_path / "built"
    monkeypatch.setenv("BUILT", str(file))

    def count():
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return len(lines)

    return count


@pytest.fixture
def search(command):
    """Return a function that runs `graphstash tune search` on a host."""

    def run(name, *arguments, **more):
        try:
            return command("tune", "search", f"{KERNEL}:{name}", *arguments, **more)
        finally:
            uninstall()  # the command leaves the cache installed

    return run


def test_second_host_measures_nothing_and_gets_the_same_schedule(search, built, config):
    settings = variables_of(config("first"))
    words = ("tune", "search", f"{KERNEL}:task", "--trials", 20, "--json")
    found = json.loads(graphstash(*words, **settings).stdout)
    assert found["searched"]
    assert found["configuration"] == BEST
    assert found["cost"] == pytest.approx(1e-3 * (1 + 1 / 8))
    assert built() >= 10

    assert set(found) == fields_of("tune search")
    assert found["search"]["failures"] == {"compile": 2}

    query = {"namespace": settings["GRAPHSTASH_NAMESPACE"], "q": "rows"}
    page = httpx.get(f"{settings['GRAPHSTASH_URL']}/tuning", params=query).text
    assert "<code>tile=32 vector=8</code>" in page
    assert re.search(r"<td class=\"number\">1\.\d\d times", page)

    second = search("task", "--trials", 20, "--json", host="second")
    assert json.loads(second.stdout) == found | {"searched": False, "search": None}
    shown = search("task", host="third")
    assert shown.stdout.splitlines() == [
        "the team has it: nothing was measured",
        "1.12 ms  tile=32 vector=8",
    ]
    assert built() == 0


def test_host_with_another_target_searches_again(search, built):
    """The costs or checks of the targets differ, for the same problem."""
    cases = (("task", True), ("other_target", True), ("checked", True), ("checked", False))
    for name, is_searched in cases:
        done = search(name, "--trials", 2, "--json", host=f"{name} {is_searched}")
        assert json.loads(done.stdout)["searched"] is is_searched
        assert (built() > 0) is is_searched


def test_search_names_each_limit_that_a_trial_or_the_search_exceeded(search, built):
    limits = ("--timeout", 5, "--memory", "8GiB", "--searcher", "exhaustive")
    done = search("excessive", *limits, "--trials", 10, enabled=False)
    line = done.stdout.splitlines()[0]
    assert line.startswith("found by a search here: 10 trials in ")
    assert line.partition("; ")[2].split("; ") == [
        "2 failed: compile",
        "1 failed: memory (--memory 8.0 GiB)",
        "1 failed: timeout (--timeout 5)",
        "ended by --trials 10",
    ]


@pytest.mark.extended
def test_search_shows_trials_best_cost_failures_and_time_left_on_a_terminal(built):
    words = ("tune", "search", f"{KERNEL}:task", "--trials", 10, "--searcher", "exhaustive")
    status, shown = graphstash_on_terminal(*words, GRAPHSTASH_ENABLED="false", COLUMNS="120")
    assert status == 0
    assert re.search(r"none works yet, 0 failed .* 0/10 -:--:--", shown)
    assert re.search(r"best 1.12 ms, 2 failed .* 10/10 0:00:00", shown)
    assert re.search(r"comparing the best few .* 10/10 ", shown)
    assert built() == 10 + 5  # the finalists are built again


@pytest.mark.parametrize(
    ("name", "arguments", "status", "text"),
    [
        ("nobody", (), 2, "has no task 'nobody'"),
        ("no_task", (), 2, "is no graphstash.tuning.Task"),
        ("task", ("--searcher", "best"), 2, "choose one of g-bfs, n-a2c, "),
        ("task", ("--workers", "0"), 2, "--workers"),
        ("task", ("--memory", "much"), 2, "--memory='much': it takes a size such as 500MB"),
        ("impossible", ("--trials", "5"), 1, IMPOSSIBLE),
        ("undescribed", (), 2, r"describe\(\) of the target must be JSON: "),
    ],
)
def test_invalid_search_is_reported_in_one_line(search, built, name, arguments, status, text):
    done = search(name, *arguments, status=status, enabled=False)
    assert re.search(text, done.stderr)
    assert "Traceback" not in done.stderr


def test_part_named_like_part_of_target_is_refused():
    problem = tuning.Problem("rows", (8,), "float32", DeviceType("cpu"), "made-up 1.0")
    space = tuning.ParameterSpace({"tile": [1, 2]})
    target = tuning.CallableTarget(lambda _: dict, name="rows")
    assert tuning.Task(replace(problem, parts={"source": "1"}), space, target)
    with pytest.raises(ValueError, match="the part 'target' of the problem cannot be used"):
        tuning.Task(replace(problem, parts={"target": "1"}), space, target)
