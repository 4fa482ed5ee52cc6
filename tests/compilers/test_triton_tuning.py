"""Hosts of one team call one Triton kernel; it is compiled for a GPU that is not there."""

from pathlib import Path

import pytest

from support.compiler_jobs import TRITON_VERSIONS, CompilerJobs
from support.tiers import each_of

JOB = Path(__file__).parents[1] / "support" / "tune_triton_job.py"
CONFIGS = 6


@pytest.fixture(params=each_of(TRITON_VERSIONS))
def team(request, server, namespace, tmp_path):
    """Starts jobs of one version of Triton; a host is a folder."""
    settings = {"url": server.url, "namespace": namespace, "under": "python", "script": JOB}
    environment = TRITON_VERSIONS[request.param]
    with CompilerJobs(tmp_path, environment=environment, **settings) as jobs:
        yield jobs


def test_a_team_tunes_a_kernel_once(team):
    first, second = team.run("first"), team.run("second")
    plain = team.run("plain", "--plain")
    assert first.report["measured"] == plain.report["measured"] == CONFIGS
    assert first.report["chosen"] == plain.report["chosen"] == [[256, 8]]
    assert second.report["measured"] == 0
    assert second.report["ptxas"] == 1
    assert second.report["chosen"] == first.report["chosen"]
    assert first.stats["fallbacks"] == second.stats["fallbacks"] == {}


def test_a_schedule_that_no_longer_compiles_is_searched_for_again_once(team):
    team.run("first")
    second = team.run("second", "--no-eight-warps")
    third = team.run("third", "--no-eight-warps")
    assert second.report["chosen"] == third.report["chosen"] == [[256, 4]]
    assert second.stats["fallbacks"] == third.stats["fallbacks"] == {"rejected": 1}
    assert second.report["measured"] < CONFIGS  # the first host's are known
    assert third.report["measured"] == 0


def test_without_the_cache_it_is_tritons_own_tuning(team):
    off = team.run("off", enabled="false")
    assert off.report["measured"] == CONFIGS
    assert off.report["chosen"] == [[256, 8]]
    assert off.stats == {}


@pytest.mark.parametrize("broken", ["team", "device"])
def test_a_kernel_is_tuned_without_the_team_where_that_fails(team, broken):
    job = team.run("host", "--broken", broken)
    assert job.report["measured"] == CONFIGS
    assert job.report["chosen"] == [[256, 8]]
    assert job.stats["fallbacks"] == {"internal": 1}


def test_a_host_where_nothing_works_asks_once_and_stops_nobody(team):
    broken = team.run("broken", "--nothing-works")
    sound = team.run("sound")
    assert broken.report["measured"] == CONFIGS  # by the first of two calls
    assert sound.report["measured"] == CONFIGS
    assert sound.report["chosen"] == [[256, 8]]
