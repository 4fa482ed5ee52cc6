"""torch_xla 2.9 on a real plug-in, started as users start it."""

from pathlib import Path

import pytest

from support.compiler_jobs import CompilerJobs

pytestmark = pytest.mark.extended

JOB = Path(__file__).parents[1] / "support" / "pjrt_torch_job.py"


@pytest.fixture(scope="module")
def outcomes(server, tmp_path_factory):
    """A cold run, the same step from other lines on another host, and a run with a late hook."""
    directory = tmp_path_factory.mktemp("pjrt-torch-xla")
    settings = {"url": server.url, "namespace": "pjrt-torch-xla", "environment": "xla-newest"}
    run = CompilerJobs(directory, script=JOB, **settings).run
    return {
        "cold": run("cold"),
        "warm": run("warm", "--shifted", "--path-after-import"),
        "late": run("late", "--late", hooks="torch_xla"),
    }


def test_program_compiled_by_one_process_is_loaded_by_others(outcomes):
    cold, warm = outcomes["cold"], outcomes["warm"]
    assert cold.hits == 0
    assert cold.stats["published"] == cold.report["compiles"] >= 1
    assert warm.hits == warm.report["compiles"] == cold.report["compiles"]
    assert warm.stats["misses"] == 0
    assert not warm.stats["fallbacks"]


def test_losses_are_equal_to_the_bit(outcomes):
    assert outcomes["warm"].report["losses"] == outcomes["cold"].report["losses"]
    assert outcomes["late"].report["losses"] == outcomes["cold"].report["losses"]


def test_late_hook_serves_following_programs(outcomes):
    late = outcomes["late"]
    assert late.report["before"] == 3.0
    assert late.hits == outcomes["cold"].report["compiles"]
    assert late.report["compiles"] == late.hits + 1  # one compilation before the hook


def test_warning_about_missing_sharing_appears_only_without_the_hook(outcomes):
    assert "9094" not in outcomes["warm"].errors
    printed = outcomes["late"].errors
    assert "add pjrt to GRAPHSTASH_HOOKS" in printed.replace("\n", " ")
    assert printed.count("9094") == 1
