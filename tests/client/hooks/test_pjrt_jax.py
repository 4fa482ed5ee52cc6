"""JAX through the pjrt hook, where the jax hook is switched off: real plug-ins, real processes."""

from pathlib import Path

import pytest

from support.environments import python_of

JOB = Path(__file__).parents[2] / "support" / "pjrt_jax_job.py"
AHEAD_OF_TIME_JOB = JOB.with_name("pjrt_aot_job.py")


@pytest.fixture
def run(jobs, server, namespace, tmp_path):
    """Runs a job on a host of its own."""

    def run(host, environment, *options, script=JOB, hooks="pjrt"):
        return jobs.start(
            tmp_path / host,
            *options,
            script=script,
            under="graphstash run",
            launcher=(python_of(environment),),
            url=server.url,
            namespace=namespace,
            hooks=hooks,
        ).finish()

    return run


@pytest.mark.parametrize("environment", ["jax-pjrt", "jax-newest"])
def test_programs_for_one_device_and_for_four_are_loaded_by_the_next_process(run, environment):
    cold, warm = run("cold", environment), run("warm", environment)
    assert cold.report["spread"][2] == 4
    assert cold.stats["published"] == cold.report["compiles"] == 2
    assert warm.stats["hits_remote"] == warm.report["compiles"] == 2
    assert (warm.stats["misses"], warm.stats["fallbacks"]) == (0, {})
    assert warm.report == cold.report


def test_forked_children_share_with_their_parent_and_other_flags_miss(run):
    outcome = run("parent", "jax-pjrt", "--mode", "fork")
    same, other, parent = (outcome.report[name] for name in ("same", "other flags", "parent"))
    assert (same["hits"], same["misses"]) == (0, 2)
    assert (other["hits"], other["misses"]) == (0, 2)
    assert outcome.hits == parent["compiles"] == 2
    assert same["spread"] == parent["spread"]


def test_what_is_compiled_ahead_of_time_for_a_tpu_is_published_once(
    run, server, namespace, tmp_path
):
    first = run("first", "jax-newest", script=AHEAD_OF_TIME_JOB)
    second = run("second", "jax-newest", script=AHEAD_OF_TIME_JOB)
    assert first.report == second.report
    assert (first.stats["misses"], first.stats["published"]) == (1, 1)
    assert first.stats["fallbacks"] == {}
    # The key is the same in another process: the server has it, nothing is left to count.
    assert second.stats == {}
    (stored,) = (tmp_path / "first" / "tier" / "v1" / namespace).glob("pjrt/tpu-*/*/*")
    assert stored.stat().st_size > 1000
    counted = server.stats(namespace)
    assert (counted["artifacts"], counted["puts"]) == (1, 1)
