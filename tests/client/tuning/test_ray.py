"""The machines of a real Ray cluster measure configurations, and two of the machines die."""

import re

import pytest

from support.compiler_jobs import CompilerJobs
from support.processes import python


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    settings = {"cases": "ray_machines", "environment": "ray", "under": "python"}
    with CompilerJobs(folder, **settings) as jobs:
        yield jobs.run("host", "measured", {"folder": folder}).report


@pytest.mark.extended
def test_misbehaving_trial_fails_as_on_this_host(report):
    assert report["measured"] == {
        "{'x': 1}": [1.0, None],
        "{'x': 2}": [2.0, None],
        "{'x': 3}": [3.0, None],
        "{'x': 1, 'does': 'does not compile'}": [None, "compile"],
        "{'x': 1, 'does': 'dies'}": [None, "crash"],
        "{'x': 1, 'does': 'hangs'}": [None, "timeout"],
    }


@pytest.mark.extended
def test_finalists_are_compared_in_one_worker(report):
    assert report["compared"] == [[5.0, 7], [4.0, 7]]  # 7 rounds prove which costs more


@pytest.mark.extended
def test_a_search_keeps_its_budget(report):
    assert report["search"]["measured"] == 8 + 2
    assert 1 <= report["search"]["best"][0] <= 32


@pytest.mark.extended
def test_command_measures_local_target_on_ray_machines(report):
    assert report["command"]["searched"]
    assert set(report["command"]["configuration"]) == {"tile", "vector"}
    assert len(report["built"]) >= 8
    assert all(each.endswith(" on 0") for each in report["built"])  # the GPU of each machine


@pytest.mark.extended
def test_search_continues_after_a_machine_dies(report):
    assert report["after a machine died"] == {
        "measured": {"{'x': 7, 'does': 'waits'}": [7.0, None]},
        "machines": 2,
    }


@pytest.mark.extended
def test_search_that_cannot_measure_reports_the_reason(report):
    assert "RAY_ADDRESS=ray://127.0.0.1:1: " in report["without a cluster"]
    assert "no such device" in report["unprepared"]
    assert "has the cluster such a machine" in report["without machines"]


@pytest.mark.extended
def test_no_process_is_left_running(report):
    assert report["is_over"]


def test_without_ray_the_error_names_the_extra():
    ended = python(
        """
        import sys
        sys.modules["ray"] = None
        from graphstash import tuning
        tuning.RayPool(tuning.CallableTarget(len, name="length"))
        """
    )
    assert re.search(r"ConfigError: RayPool needs Ray.*graphstash\[ray\]", ended.stderr)
