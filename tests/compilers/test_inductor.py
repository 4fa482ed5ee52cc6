"""Real torch.compile jobs on fresh hosts, in the oldest and the newest tested version."""

import re
import subprocess
from typing import ClassVar

import pytest

from support.compiler_jobs import InductorJobs
from support.hook_contract import OF_THE_CACHE, HookContract

GRAPHS = 2  # forward and backward
TWO_WORKERS = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}


class TestInductor(HookContract):
    case = "inductor:training"
    keywords: ClassVar = {"matmul": True}  # building C++ takes most of the time of other graphs
    cold_under = "fork:inductor"  # `built` starts like a user's job
    programs = GRAPHS
    package = "torch"
    cannot: ClassVar = {
        "test_fault_of_the_server_costs_a_compilation_and_is_counted": "a damaged "
        "artifact meets one process in test_inductor_entries, which is cheaper; the other faults "
        "are the cache's, which the contract of other hooks proves"
    }
    version = "2.7.0"

    @classmethod
    def open(cls, directory, **settings):
        return InductorJobs(directory, cls.version, **settings)

    def compiled(self, outcome):
        return outcome.report["fx"].get("fxgraph_cache_miss", 0)

    def result(self, outcome):
        return outcome.report["losses"]

    @pytest.fixture(scope="class")
    @classmethod
    def built(cls, hosts):
        """Build C++ kernels and a header. A forked job would use the header of the user instead."""
        return hosts.run("built", "training", under="graphstash run")

    @pytest.mark.extended
    def test_another_host_runs_no_compiler(self, hosts, built):
        assert built.report["torch"].startswith(self.version)
        assert built.stats["misses"] == built.stats["published"] > 2 * GRAPHS
        assert len(hosts.compiled("built")) > GRAPHS
        warm = hosts.run("loaded", "training")
        assert hosts.compiled("loaded") == []
        assert warm.report["losses"] == built.report["losses"]
        assert warm.stats["fallbacks"] == built.stats["fallbacks"] == {}
        assert warm.stats["misses"] == 0
        assert warm.report["fx"] == {"fxgraph_cache_hit": GRAPHS}
        assert warm.report["aot"]["autograd_cache_hit"] == 1
        assert warm.hits >= GRAPHS + 1
        assert 0 < warm.stats["saved_compile_seconds"] < 1.5 * built.report["seconds"]

    @pytest.mark.extended
    def test_graphs_whose_autotuning_results_are_bundled_are_shared(self, hosts, built):
        """torch begins a bundle when it loads a graph, and ends the bundle when the graph runs.

        `built` runs first, because these jobs share its C++ objects.
        """
        first, second = (hosts.run(host, "training_with_bundles") for host in ("one", "two"))
        assert second.report["fx"] == {"fxgraph_cache_hit": GRAPHS}
        assert second.report["aot"]["autograd_cache_hit"] == 1
        assert second.report["losses"] == first.report["losses"]
        assert second.stats["fallbacks"] == {}
        assert first.stats["misses"] == first.stats["published"]  # no graph here is autotuned
        assert second.stats["misses"] == 0

    @pytest.mark.extended
    def test_forked_child_shares_as_its_parent_does(self, hosts, built):
        around = {"function": self.case, "keywords": {}}
        outcome = hosts.run("forked", "in_a_forked_child", around, cases="contract")
        assert outcome.report["fx"] == {"fxgraph_cache_hit": GRAPHS}
        assert outcome.report["losses"] == built.report["losses"]
        assert hosts.compiled("forked") == []

    @pytest.mark.extended
    def test_second_host_finds_all_graphs_that_differ_only_in_guards(self, hosts):
        first = hosts.run("shapes", "products", {"sizes": [8, 32]})
        assert first.stats["misses"] > 0
        again = hosts.run("shapes-again", "products", {"sizes": [32, 8]})
        assert sorted(again.report["losses"]) == sorted(first.report["losses"])
        assert again.report["fx"] == {"fxgraph_cache_hit": 2}
        assert again.stats["misses"] == again.stats["conflicts"] == 0


@pytest.mark.extended
class TestNewestInductor(TestInductor):
    cannot: ClassVar = (
        TestInductor.cannot
        | OF_THE_CACHE
        | {
            "test_hook_steps_aside_with_one_warning_on_an_unsupported_version": "the test of torch "
            "2.7 proves it: `hooks.spec` compares the versions of every release in the same way"
        }
    )
    version = "2.15.0"

    def test_script_that_installs_the_cache_finds_the_same_graphs_beside_compile_workers(
        self, hosts, built
    ):
        options = {"under": "python", "variables": TWO_WORKERS}
        outcome = hosts.run("installing", "training", {"install": True}, **options)
        assert outcome.report["losses"] == built.report["losses"]
        assert outcome.report["fx"] == {"fxgraph_cache_hit": GRAPHS}
        assert hosts.compiled("installing") == []
        assert "Unable to create" not in outcome.errors

    def test_another_graph_is_built_by_two_threads_with_a_fetched_header(self, hosts, built):
        options = {"under": "graphstash run", "variables": TWO_WORKERS}
        outcome = hosts.run("wide", "training", {"width": 48}, **options)
        assert outcome.report["fx"]["fxgraph_cache_miss"] == GRAPHS
        assert outcome.stats["fallbacks"] == {}
        lines = hosts.compiled("wide")
        assert lines
        assert not any(re.search(r"\.gch$", line) for line in lines)
        # Since 2.8 there is a precompiled header. g++ prints "!" before a header that it can use.
        with_header = next(line for line in lines if "-include" in line)
        command = ["g++", "-H", *with_header.split()]
        included = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert re.search(r"^! .*\.h\.gch$", included, re.MULTILINE)
