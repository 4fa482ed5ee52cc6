"""Common models under torch.compile: a second host compiles none of their graphs.

Each case is trained, or only called, by two hosts with empty local tiers and one server. Each
model is compiled by one version of torch: it takes half a minute of CPU time, or more. Pages of the
documentation do the same: docs/quick-start/huggingface.md trains GPT-2 with dropout, and
docs/quick-start/accelerate.md in bfloat16.
"""

import pytest

from support.compiler_jobs import InductorJobs

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]


@pytest.fixture
def both(server, namespace, tmp_path, jobs):
    """Runs a case on two hosts; gives the outcomes, and what each host has built."""
    settings = {"url": server.url, "namespace": namespace, "cases": "inductor_models", "jobs": jobs}

    def both(environment, case, **keywords):
        with InductorJobs(tmp_path, "2.7.0", environment=environment, **settings) as hosts:
            outcomes = [hosts.run(host, case, keywords) for host in "ab"]
            return *outcomes, *(hosts.compiled(host) for host in "ab")

    return both


@pytest.fixture
def run(both):
    """Runs a case on two hosts, of which the second one compiles nothing."""

    def run(environment, case, **keywords):
        cold, warm, built, built_again = both(environment, case, **keywords)
        # The first job on a machine precompiles a header, for all later ones: torch keeps it
        # in a folder of the user. Nothing that is found needs it.
        headers = sum(".gch" in line for line in built)
        misses = warm.stats["misses"]
        unshared = {"unshareable": misses} if misses else {}
        assert cold.stats["fallbacks"] == warm.stats["fallbacks"] == unshared
        assert ("torch stored no result of AOTAutograd" in warm.errors) == bool(misses)
        assert cold.report["compiles"] > 0
        assert warm.report["compiles"] == len(built_again) == 0
        assert warm.stats["published"] == 0
        assert warm.hits == cold.stats["published"] - headers
        assert warm.report["losses"] == cold.report["losses"]
        return warm

    return run


def test_second_host_compiles_nothing_of_trained_convolutions(run):
    assert run("", "convolutions").stats["misses"] == 0


def test_second_host_misses_only_what_torch_bypasses_of_transformers_model(run):
    warm = run("frameworks", "llama")
    assert warm.stats["misses"] == warm.report["bypassed"]


@pytest.mark.parametrize(
    ("environment", "context"),
    [("", "no_grad"), ("torch-newest", "grad"), ("torch-newest", "inference")],
)
def test_second_host_traces_forward_pass_again_only_with_gradients(run, environment, context):
    """torch stores the result of AOTAutograd when it has compiled the backward pass."""
    warm = run(environment, "predicting", context=context)
    assert warm.stats["misses"] == (1 if context == "grad" else 0)


def test_second_host_publishes_nothing_of_tensors_in_shards(both):
    """With 2.15, the mesh is an input of both graphs. Their C++ objects are found."""
    cold, warm, _, built = both("torch-newest", "tensor_parallel")
    assert warm.report["compiles"] == 2
    assert warm.stats["fallbacks"] == {"unshareable": 3}
    assert warm.stats["misses"] == warm.stats["published"] == len(built) == 0
    assert warm.report["losses"] == cold.report["losses"]
