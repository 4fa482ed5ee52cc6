"""Hosts of one team call one Triton kernel; it is compiled for a GPU that is not there."""

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
"""Compiles nothing with eight warps."""


@pytest.fixture(params=each_of(TRITON_VERSIONS))
def team(request, server, namespace, tmp_path):
    """Starts jobs of one version of Triton; a host is a folder."""
    settings = {"url": server.url, "namespace": namespace, "under": "python"}
    with TritonJobs(tmp_path, request.param, cases="triton_tuning", **settings) as jobs:
        yield jobs


@pytest.fixture
def without_eight_warps(team, tmp_path):
    """Variables of a host whose ptxas refuses eight warps."""
    variables = {}
    for ptxas in (tmp_path / "bin").iterdir():
        refusing = tmp_path / f"refusing-{ptxas.name}"
        refusing.write_text(REFUSING_PTXAS.format(ptxas=ptxas))
        refusing.chmod(0o755)
        variables[f"TRITON_{ptxas.name.upper().replace('-', '_')}_PATH"] = str(refusing)
    return variables


def test_team_tunes_a_kernel_once(team):
    first, second = team.run("first", "tuned"), team.run("second", "tuned")
    plain = team.run("plain", "tuned", {"is_plain": True})
    assert first.report["measured"] == plain.report["measured"] == CONFIGS
    assert first.report["chosen"] == plain.report["chosen"] == [256, 8]
    assert second.report["measured"] == 0
    assert second.report["ptxas"] == 1
    assert second.report["chosen"] == first.report["chosen"]
    assert first.stats["fallbacks"] == second.stats["fallbacks"] == {}


def test_schedule_that_no_longer_compiles_is_searched_for_again_once(team, without_eight_warps):
    team.run("first", "tuned")
    second = team.run("second", "tuned", variables=without_eight_warps)
    third = team.run("third", "tuned", variables=without_eight_warps)
    assert second.report["chosen"] == third.report["chosen"] == [256, 4]
    assert second.stats["fallbacks"] == third.stats["fallbacks"] == {"rejected": 1}
    assert second.report["measured"] < CONFIGS  # the first host's are known
    assert third.report["measured"] == 0


def test_without_the_cache_triton_tunes(team):
    off = team.run("off", "tuned", enabled="false")
    assert off.report["measured"] == CONFIGS
    assert off.report["chosen"] == [256, 8]
    assert off.stats == {}


@pytest.mark.parametrize("broken", ["team", "device"])
def test_kernel_is_tuned_without_the_team_if_that_fails(team, broken):
    job = team.run("host", "tuned", {"broken": broken})
    assert job.report["measured"] == CONFIGS
    assert job.report["chosen"] == [256, 8]
    assert job.stats["fallbacks"] == {"internal": 1}


def test_host_where_nothing_works_asks_once_and_blocks_no_other_host(team):
    broken = team.run("broken", "tuned", {"works": False})
    sound = team.run("sound", "tuned")
    assert broken.report["measured"] == CONFIGS  # by the first of two calls
    assert sound.report["measured"] == CONFIGS
    assert sound.report["chosen"] == [256, 8]
