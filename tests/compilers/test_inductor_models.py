"""Common models under torch.compile: a second host compiles none of their graphs.

Two hosts with empty local tiers and one server run each case. Only one version of torch compiles
each model, because a model takes half a minute of CPU time or more. Two pages of the documentation
add GPT-2 with dropout (docs/quick-start/huggingface.md) and bfloat16
(docs/quick-start/accelerate.md).
"""

import pytest

from support.compiler_jobs import InductorJobs

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]


@pytest.fixture
def both(server, namespace, tmp_path, jobs):
    """Return a function that runs a case on two hosts and returns outcomes and build commands."""
    settings = {"url": server.url, "namespace": namespace, "cases": "inductor_models", "jobs": jobs}

    def both(environment, case, **keywords):
        with InductorJobs(tmp_path, "2.7.0", environment=environment, **settings) as hosts:
            outcomes = [hosts.run(host, case, keywords) for host in "ab"]
            return *outcomes, *(hosts.compiled(host) for host in "ab")

    return both


@pytest.fixture
def run(both):
    """Return a function that runs a case on two hosts; the second must compile nothing."""

    def run(environment, case, **keywords):
        cold, warm, built, built_again = both(environment, case, **keywords)
        # The first job on a machine precompiles a header for all later jobs. torch stores the
        # header in a folder of the user. No cached artifact needs it.
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


def test_second_host_compiles_nothing_of_layer_that_bitsandbytes_quantized(run):
    assert run("frameworks", "quantized").stats["misses"] == 0


@pytest.mark.parametrize(
    ("environment", "context"),
    [("", "no_grad"), ("torch-newest", "grad"), ("torch-newest", "inference")],
)
def test_second_host_traces_forward_pass_again_only_with_gradients(run, environment, context):
    """torch stores the result of AOTAutograd only after it has compiled the backward pass."""
    warm = run(environment, "predicting", context=context)
    assert warm.stats["misses"] == (1 if context == "grad" else 0)


def test_second_host_publishes_nothing_of_tensors_in_shards(both):
    """With 2.15, the mesh is an input of both graphs. The second host finds the C++ objects."""
    cold, warm, _, built = both("torch-newest", "tensor_parallel")
    assert warm.report["compiles"] == 2
    assert warm.stats["fallbacks"] == {"unshareable": 3}
    assert warm.stats["misses"] == warm.stats["published"] == len(built) == 0
    assert warm.report["losses"] == cold.report["losses"]
