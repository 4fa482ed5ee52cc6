"""A kernel is tuned by the first who asks, and everybody else has the answer."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from graphstash import tuning
from graphstash_schema import DeviceType

KERNEL = Path(__file__).parents[2] / "support" / "tuned_kernel.py"


@pytest.fixture
def search(server, namespace, tmp_path):
    """Runs `graphstash tune search` on a host, in a process of its own."""

    def run(name, *arguments, host, **settings):
        folder = tmp_path / host
        folder.mkdir(exist_ok=True)
        variables = {
            "GRAPHSTASH_URL": server.url,
            "GRAPHSTASH_NAMESPACE": namespace,
            "GRAPHSTASH_CACHE_DIR": str(folder / "cache"),
            "BUILT": str(folder / "built"),
        }
        (folder / "built").touch()
        command = [sys.executable, "-m", "graphstash", "tune", "search", f"{KERNEL}:{name}"]
        done = subprocess.run(
            [*command, *map(str, arguments)],
            env=os.environ | variables | settings,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        return done, len((folder / "built").read_text().splitlines())

    return run


BEST = {"tile": 32, "vector": 8}


def test_a_second_host_measures_nothing_and_gets_the_same_schedule(search):
    first, built = search("task", "--trials", 30, "--json", host="first")
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout)
    assert found["searched"]
    assert found["configuration"] == BEST
    assert found["cost"] == pytest.approx(1e-3 * (1 + 1 / 8))
    assert built >= 20

    second, built = search("task", "--trials", 30, "--json", host="second")
    assert json.loads(second.stdout) == found | {"searched": False}
    assert built == 0

    shown, _ = search("task", host="third")
    assert shown.stdout.splitlines() == [
        "the team has it: nothing was measured",
        "1.12 ms  tile=32 vector=8",
    ]


@pytest.mark.parametrize(
    "settings",
    [{"GRAPHSTASH_ENABLED": "false"}, {"GRAPHSTASH_URL": "http://127.0.0.1:9"}],
    ids=["cache off", "server gone"],
)
def test_a_host_without_the_team_searches_for_itself(search, settings):
    done, built = search("task", "--trials", 25, "--json", host="alone", **settings)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["configuration"], found["searched"]) == (BEST, True)
    assert built >= 15


def test_a_budget_bounds_what_is_built(search):
    _, built = search("task", "--trials", 4, host="short", GRAPHSTASH_ENABLED="false")
    assert built <= 4 + 4  # the finalists are built again


@pytest.mark.parametrize(
    ("name", "arguments", "status", "told"),
    [
        ("nobody", (), 2, "has no task 'nobody'"),
        ("no_task", (), 2, "is no graphstash.tuning.Task"),
        ("task", ("--searcher", "best"), 2, "choose one of g-bfs, n-a2c, "),
        ("task", ("--workers", "0"), 2, "--workers"),
        ("impossible", ("--trials", "5"), 1, "no configuration of tuned rows float32 - 512 works"),
        ("impossible", ("--trials", "5"), 1, "failed (compile): ValueError: {'tile': "),
        ("undescribed", (), 2, "describe() of the target must be JSON: "),
    ],
)
def test_what_cannot_be_searched_is_told_in_one_line(search, name, arguments, status, told):
    done, _ = search(name, *arguments, host="host", GRAPHSTASH_ENABLED="false")
    assert done.returncode == status
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_part_named_like_part_of_target_is_refused():
    problem = tuning.Problem("rows", (8,), "float32", DeviceType("cpu"), "made-up 1.0")
    space = tuning.ParameterSpace({"tile": [1, 2]})
    target = tuning.CallableTarget(lambda _: dict, name="rows")
    assert tuning.Task(replace(problem, parts={"source": "1"}), space, target)
    with pytest.raises(ValueError, match="the part 'target' of the problem cannot be used"):
        tuning.Task(replace(problem, parts={"target": "1"}), space, target)
