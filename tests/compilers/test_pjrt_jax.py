"""JAX through the pjrt hook, where the jax hook is switched off: real plug-ins, real processes."""

import pytest

from support.compiler_jobs import CompilerJobs
from support.tiers import each_of


@pytest.fixture
def run(server, namespace, tmp_path):
    """Runs a job on a host of its own."""
    settings = {"url": server.url, "namespace": namespace, "hooks": "pjrt"}
    with CompilerJobs(tmp_path, cases="pjrt_jax", **settings) as jobs:
        yield jobs.run


@pytest.mark.parametrize("environment", each_of({"": "", "jax-pjrt": "jax-pjrt"}))
def test_programs_for_one_device_and_for_four_are_loaded_by_the_next_process(run, environment):
    cold, warm = (run(host, "user", environment=environment) for host in ("cold", "warm"))
    assert cold.report["spread"][2] == 4
    assert cold.stats["published"] == cold.report["compiles"] == 2
    assert warm.hits == warm.report["compiles"] == 2
    assert (warm.stats["misses"], warm.stats["fallbacks"]) == (0, {})
    assert warm.report == cold.report


@pytest.mark.extended
def test_forked_children_share_with_their_parent_and_other_flags_miss(run):
    outcome = run("parent", "fork", environment="jax-pjrt")
    same, other, parent = (outcome.report[name] for name in ("same", "other flags", "parent"))
    assert (same["hits"], same["misses"]) == (0, 2)
    assert (other["hits"], other["misses"]) == (0, 2)
    assert outcome.hits == parent["compiles"] == 2
    assert same["spread"] == parent["spread"]


@pytest.mark.extended
def test_what_is_compiled_ahead_of_time_for_a_tpu_is_published_once(
    run, server, namespace, tmp_path
):
    options = {"environment": "jax-newest", "cases": "jax_programs"}
    options["variables"] = {"JAX_PLATFORMS": "cpu"}
    first, second = (run(host, "ahead_of_time", **options) for host in ("first", "second"))
    assert first.report == second.report
    assert (first.stats["misses"], first.stats["published"]) == (1, 1)
    assert first.stats["fallbacks"] == {}
    # The key is the same in another process: the server has it, nothing is left to count.
    assert second.stats == {}
    (stored,) = (tmp_path / "first" / "tier" / "v2").glob(f"*/{namespace}/pjrt/tpu-*/*/*")
    assert stored.stat().st_size > 1000
    counted = server.stats(namespace)
    assert (counted["artifacts"], counted["puts"]) == (1, 1)
