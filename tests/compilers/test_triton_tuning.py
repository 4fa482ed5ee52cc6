"""Hosts of one team tune one Triton kernel, compiled for an absent GPU."""

import pytest

from support.compiler_jobs import TRITON_VERSIONS, TritonJobs
from support.tiers import each_of

CONFIGS = 6
REFUSING_PTXAS = """#!/bin/sh
case "$*" in
*--version*) ;;
*) cat $(echo "$@" | tr ' ' '\\n' | grep 'ptx$') | grep -q 'ntid 256' && exit 255 ;;
esac
exec {ptxas} "$@"
"""
"""A ptxas that refuses kernels with eight warps."""


@pytest.fixture(params=each_of(TRITON_VERSIONS))
def team(request, jobs, server, namespace, tmp_path):
    """Jobs of one version of Triton. Each host has a folder."""
    settings = {"url": server.url, "namespace": namespace, "jobs": jobs, "under": "triton"}
    with TritonJobs(tmp_path, request.param, cases="triton_tuning", **settings) as team:
        yield team


@pytest.fixture
def without_eight_warps(team, tmp_path):
    """Variables of a host whose ptxas refuses eight warps."""
    variables = {"TMPDIR": str(tmp_path)}  # Triton writes the PTX that ptxas refused there
    for ptxas in (tmp_path / "bin").iterdir():
        refusing = tmp_path / f"refusing-{ptxas.name}"
        refusing.write_text(REFUSING_PTXAS.format(ptxas=ptxas))
        refusing.chmod(0o755)
        variables[f"TRITON_{ptxas.name.upper().replace('-', '_')}_PATH"] = str(refusing)
    return variables


def test_team_tunes_a_kernel_once_and_again_where_its_schedule_does_not_compile(
    team, without_eight_warps
):
    first, second = team.run("first", "tuned"), team.run("second", "tuned")
    assert first.report["measured"] == CONFIGS
    assert second.report["measured"] == 0
    assert second.report["ptxas"] == 1
    assert first.report["chosen"] == second.report["chosen"] == [256, 8]
    assert first.stats["fallbacks"] == second.stats["fallbacks"] == {}

    third = team.run("third", "tuned", variables=without_eight_warps)
    fourth = team.run("fourth", "tuned", variables=without_eight_warps)
    assert third.report["chosen"] == fourth.report["chosen"] == [256, 4]
    assert third.stats["fallbacks"] == fourth.stats["fallbacks"] == {"rejected": 1}
    assert third.report["measured"] < CONFIGS  # the findings of the first host are used
    assert fourth.report["measured"] == 0


@pytest.mark.parametrize(
    ("keywords", "settings", "fallbacks"),
    [
        ({}, {"enabled": "false"}, None),
        ({"broken": "team"}, {}, {"internal": 1}),
        ({"broken": "device"}, {}, {"internal": 1}),
    ],
    ids=["cache is off", "team fails", "device is unknown"],
)
def test_kernel_is_tuned_without_the_team(team, keywords, settings, fallbacks):
    job = team.run("host", "tuned", keywords, **settings)
    assert job.report["measured"] == CONFIGS
    assert job.report["chosen"] == [256, 8]
    assert job.stats.get("fallbacks") == fallbacks


def test_benchmark_may_return_one_number(team):
    first, second = (team.run(host, "tuned", {"times": 1}) for host in ("first", "second"))
    assert [each.report["measured"] for each in (first, second)] == [CONFIGS, 0]
    assert first.report["chosen"] == second.report["chosen"] == [256, 8]


@pytest.mark.extended
def test_kernel_is_tuned_again_for_another_value_in_its_key_that_is_no_size(team):
    first, other = team.run("first", "tuned"), team.run("other", "tuned", {"scale": 3.0})
    assert first.report["measured"] == other.report["measured"] == CONFIGS
    assert team.run("third", "tuned", {"scale": 3.0}).report["measured"] == 0


@pytest.mark.extended
def test_host_without_working_configuration_asks_once_and_blocks_no_other_host(team):
    broken = team.run("broken", "tuned", {"works": False})
    sound = team.run("sound", "tuned")
    assert broken.report["measured"] == CONFIGS  # by the first of two calls
    assert sound.report["measured"] == CONFIGS
    assert sound.report["chosen"] == [256, 8]
