"""Real torch_xla jobs, each a process and a host of its own, against a real server."""

import json
import os
import subprocess
import sys
from typing import ClassVar

import pytest

from support.compiler_jobs import CompilerJobs
from support.fault_proxy import LEASE_REQUEST, FaultProxy
from support.hook_contract import HookContract
from support.offline import unplugged
from support.server import Server


@pytest.fixture
def job(jobs, server, namespace, tmp_path):
    """Starts a job on a host that is named by its directory."""
    settings = {"url": server.url, "namespace": namespace}
    with CompilerJobs(tmp_path, jobs=jobs, under="fork", **settings) as made:
        yield made.start


def assert_shared(cold, warm):
    assert cold.report["compiles"] >= 2
    assert cold.stats["misses"] == cold.stats["published"] == cold.report["compiles"]
    assert cold.stats["fallbacks"] == warm.stats["fallbacks"] == {}
    assert warm.report["compiles"] == 0
    assert warm.hits == cold.report["compiles"]
    assert warm.stats["published"] == 0
    assert warm.stats["saved_compile_seconds"] > 0
    assert warm.report["losses"] == cold.report["losses"]
    assert f"{warm.hits} hits" in warm.errors


@pytest.mark.extended
@pytest.mark.parametrize(
    ("mode", "look_up"),
    [
        ("compile", "exact"),
        ("dynamo", "exact"),
        ("item", "exact"),
        ("lazy", "hint"),
        ("dynamo", "hint"),
    ],
)
def test_every_way_to_run_a_step_shares(job, mode, look_up):
    cold, warm = (job(host, "--mode", mode, torch_xla_mode=look_up).finish() for host in ("a", "b"))
    assert_shared(cold, warm)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("under", "options"),
    [("graphstash run", ()), ("", ["--install"]), ("", ["--install", "--no-gate"])],
    ids=["unmodified script", "install by hand", "look-ups that cannot be caught"],
)
def test_every_way_to_install_the_cache_shares(job, under, options):
    cold = job("a", *options, under=under).finish()
    warm = job("b", *options, under=under).finish()
    assert cold.stats["published"] == cold.report["compiles"] == warm.hits == 2
    assert warm.report["compiles"] == 0
    assert warm.report["losses"] == cold.report["losses"]


@pytest.mark.extended
@pytest.mark.parametrize("look_up", ["exact", "hint"])
def test_sabotaged_hook_does_not_disturb_a_step(job, look_up):
    sound = job("a").finish()
    outcome = job("b", "--sabotage", torch_xla_mode=look_up).finish()
    assert outcome.report["losses"] == sound.report["losses"]
    assert outcome.report["compiles"] == 2
    assert sum(outcome.stats["fallbacks"].values()) >= 1


@pytest.mark.extended
def test_host_with_other_instruction_sets_shares_nothing(job):
    job("a").finish()
    other = job("b", "--pretend-features", "sse2 avx2").finish()
    assert other.report["compiles"] == 2
    assert other.hits == 0
    again = job("c", "--pretend-features", "sse2 avx2").finish()
    assert again.report["compiles"] == 0


@pytest.mark.extended
def test_named_job_prefetches_its_artifacts(job, server, namespace):
    job("a", job="train").finish()
    prefetched = job("b", job="train")  # makes the host's directory, and runs once
    assert prefetched.finish().report["compiles"] == 0
    tier = prefetched.report.parent / "elsewhere"
    told = subprocess.run(
        [
            *(sys.executable, "-m", "graphstash", "prefetch", "train"),
            *("--url", server.url, "--namespace", namespace),
        ],
        env=os.environ | {"GRAPHSTASH_CACHE_DIR": str(tier)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert told.stdout.startswith("2 fetched")
    offline = job("b", url=unplugged(tier, server.url), cache_dir=tier).finish()
    assert offline.report["compiles"] == 0
    assert offline.stats["hits_host"] == 2


@pytest.mark.extended
def test_server_killed_after_it_granted_a_lease_costs_the_upload_only(job, tmp_path):
    with Server(tmp_path / "mortal") as mortal, FaultProxy(mortal.port) as proxy:
        proxy.hold = LEASE_REQUEST
        running = job("a", url=proxy.url, lease_seconds=3)
        assert proxy.held.wait(120), running.errors.read_text()
        mortal.kill()
        proxy.go_on.set()
        outcome = running.finish()
    assert outcome.report["compiles"] == 2
    assert outcome.stats["published"] == 0
    assert outcome.stats["fallbacks"]["reset"] >= 1
    with Server(tmp_path / "mortal") as restarted:
        again = job("b", url=restarted.url, lease_seconds=2, wait_seconds=60).finish()
    assert again.stats["published"] == 2
    assert again.report["losses"] == outcome.report["losses"]


@pytest.mark.extended
def test_torchrun_and_intermediate_shells_work(job, tmp_path):
    torchrun = (
        *("sh", "-c", '"$@"', "sh", sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", "2"),
    )
    running = job("a", under="graphstash run", launcher=torchrun)
    outcome = running.finish()
    lines = [json.loads(line) for line in running.stats.read_text().splitlines()]
    assert len(lines) == 2
    assert sum(line["misses"] for line in lines) == 2
    assert sum(line["hits_host"] + line["hits_server"] for line in lines) == 2
    assert outcome.report["losses"]


@pytest.mark.extended
def test_script_with_its_own_cache_directory_runs(job, tmp_path):
    outcome = job("a", "--initialize-cache", tmp_path / "own").finish()
    assert outcome.stats["published"] == 2
    assert "has no effect" in outcome.errors
    assert not (tmp_path / "own").exists()


@pytest.mark.extended
def test_forked_children_share_with_all_others_and_with_each_other(job):
    forked = job("a", "--fork", "3")
    forked.finish_children(3)
    children = [json.loads(line) for line in forked.stats.read_text().splitlines()]
    assert len(children) == 3
    assert sum(child["misses"] for child in children) == 2
    assert sum(child["published"] for child in children) == 2
    assert sum(child["hits_host"] + child["hits_server"] for child in children) == 4
    assert all(child["fallbacks"] == {} for child in children)
    elsewhere = job("b").finish()
    assert elsewhere.report["compiles"] == 0


@pytest.mark.parametrize(
    ("version", "told"), [("2.9.0", "pytorch/xla#9094"), ("3.0.1", "supports torch_xla 2.7")]
)
def test_hook_logs_once_and_is_not_installed_on_other_versions(job, version, told):
    outcome = job("a", "--pretend-version", version, "--install", under="").finish()
    assert outcome.errors.count(told) == 1
    assert len(outcome.errors.splitlines()) == 1
    assert outcome.report["losses"]
    assert outcome.stats == {}


@pytest.mark.extended
def test_a_miss_beside_a_running_cached_graph_does_not_deadlock(job):
    outcome = job("a", "--thread").finish()
    assert outcome.report["beside"] >= 10
    assert outcome.stats["misses"] + sum(outcome.stats["fallbacks"].values()) >= 2


class TestTorchXla(HookContract):
    programs = 2
    cold_under = "fork"
    unsupported = "3.0.1"
    cannot: ClassVar = {
        "test_forked_child_shares_as_its_parent_does": "its children report by themselves: "
        "test_forked_children_share_with_all_others_and_with_each_other"
    }

    @classmethod
    def open(cls, directory, **settings):
        return CompilerJobs(directory, under="fork", **settings)

    @classmethod
    def options(cls, wrapper="", **keywords):
        if wrapper:
            return ("--pretend-version", keywords["version"], "--install"), {"under": ""}
        return ("--steps", 12), {}

    def compiled(self, outcome):
        return outcome.report["compiles"]

    def result(self, outcome):
        return outcome.report["losses"][:4]

    def test_the_same_host_needs_the_server_only_once(self, hosts, cold, server):
        url = unplugged(hosts.directory / "cold" / "tier", server.url)
        again = self.run(hosts, "cold", url=url)
        assert again.report["compiles"] == 0
        assert again.stats["hits_host"] == cold.report["compiles"]
        assert again.stats["fallbacks"] == {}
        assert again.report["losses"] == cold.report["losses"]

    def test_warm_step_makes_no_cache_call(self, hosts, cold, warm):
        bare = self.run(hosts, "bare", under="")
        for outcome in (cold, warm):
            # hits, misses and fallbacks stand still after the two steps that were new
            assert len({tuple(counts) for counts in outcome.report["counts"][2:]}) == 1
            # torch_xla's own entry point is called, not a wrapper of ours
            for what in ("step_marker", "executions", "device_reads", "losses"):
                assert outcome.report[what] == bare.report[what], what
        assert bare.stats == {}

    def test_children_do_not_inherit_the_private_directory(self, cold):
        assert cold.report["environment"] is None
