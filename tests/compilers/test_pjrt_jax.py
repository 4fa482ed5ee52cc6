"""JAX through the pjrt hook, with the jax hook disabled: real plug-ins, real processes."""

from typing import ClassVar

import pytest

from support.compiler_jobs import CompilerJobs
from support.hook_contract import OF_THE_CACHE, HookContract


@pytest.fixture
def run(server, namespace, tmp_path):
    """Return a function that runs a job on a host of its own."""
    settings = {"url": server.url, "namespace": namespace, "hooks": "pjrt"}
    with CompilerJobs(tmp_path, cases="pjrt_jax", **settings) as jobs:
        yield jobs.run


@pytest.mark.extended
def test_forked_children_share_with_their_parent_and_other_flags_miss(run):
    outcome = run("parent", "fork", environment="jax-pjrt")
    same, other, parent = (outcome.report[name] for name in ("same", "other flags", "parent"))
    assert (same["hits"], same["misses"]) == (0, 2)
    assert (other["hits"], other["misses"]) == (0, 2)
    assert outcome.hits == parent["compiles"] == 2
    assert same["spread"] == parent["spread"]


@pytest.mark.extended
def test_program_compiled_ahead_of_time_for_a_tpu_is_published_once(
    run, server, namespace, tmp_path
):
    options = {"environment": "jax-newest", "cases": "jax_programs"}
    options["variables"] = {"JAX_PLATFORMS": "cpu"}
    first, second = (run(host, "ahead_of_time", **options) for host in ("first", "second"))
    assert first.report == second.report
    assert (first.stats["misses"], first.stats["published"]) == (1, 1)
    assert first.stats["fallbacks"] == {}
    # The key is equal in another process, so the server already has the artifact.
    assert second.stats == {}
    (stored,) = (tmp_path / "first" / "tier" / "v2").glob(f"*/{namespace}/pjrt/tpu-*/*/*")
    assert stored.stat().st_size > 1000
    counted = server.stats(namespace)
    assert (counted["artifacts"], counted["puts"]) == (1, 1)


class TestPjrt(HookContract):
    case = "pjrt_jax:user"
    programs = 2
    cold_under = "fork:pjrt"  # the key contains the frames that call a program
    environment = ""
    cannot: ClassVar = {
        "test_fault_of_the_server_costs_a_compilation_and_is_counted": "a damaged "
        "artifact meets one process in test_pjrt_faults, which is cheaper; the other faults are "
        "the cache's, which the contract of other hooks proves",
        "test_hook_steps_aside_with_one_warning_on_an_unsupported_version": "a plug-in reports its "
        "version: test_pjrt_abi",
        "test_forked_child_shares_as_its_parent_does": "children have flags of their own: "
        "test_forked_children_share_with_their_parent_and_other_flags_miss",
    }

    @classmethod
    def open(cls, directory, **settings):
        settings |= {"hooks": "pjrt", "environment": cls.environment, "under": "fork:pjrt"}
        return CompilerJobs(directory, **settings)

    def compiled(self, outcome):
        return outcome.report["compiles"] - outcome.hits  # JAX counts loads as compilations

    def result(self, outcome):
        return outcome.report["small"], outcome.report["spread"]

    def test_a_program_runs_on_four_devices(self, cold):
        assert cold.report["spread"][2] == 4


@pytest.mark.extended
class TestPjrtOfAnotherPlugin(TestPjrt):
    cannot: ClassVar = TestPjrt.cannot | OF_THE_CACHE
    environment = "jax-pjrt"
