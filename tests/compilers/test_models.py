"""Models without a hook of their own: a second host compiles nothing and computes the same result.

`support.cases.models` defines the models. `test_inductor_models` tests models under torch.compile.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest

from support.compiler_jobs import CompilerJobs, JaxJobs, TritonJobs
from support.jobs import Outcome

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]


class Pair(NamedTuple):
    """The same job on a host with an empty cache and on a second host."""

    cold: Outcome
    warm: Outcome


@pytest.fixture
def run(jobs, server, namespace, tmp_path):
    """Return a function that runs a case cold and warm."""

    def run(
        make: Callable[..., CompilerJobs], environment: str, case: str, **settings: str
    ) -> Pair:
        own = {"url": server.url, "namespace": namespace, "environment": environment}
        with make(tmp_path / "jobs", jobs=jobs, **{"cases": "models", **own, **settings}) as hosts:
            pair = Pair(*(hosts.run(host, case) for host in "ab"))
        assert pair.cold.stats["misses"] >= pair.cold.stats["published"] > 0
        assert pair.cold.stats["fallbacks"] == pair.warm.stats["fallbacks"] == {}
        assert pair.warm.stats["misses"] == pair.warm.stats["published"] == 0
        assert pair.warm.report["losses"] == pair.cold.report["losses"]
        return pair

    return run


def test_a_residual_block_compiles_once_on_torch_xla(run):
    pair = run(CompilerJobs, "", "residual_block", under="fork")
    assert pair.cold.report["compiles"] == pair.cold.stats["published"] >= 2
    assert pair.warm.report["compiles"] == 0
    assert pair.warm.hits == pair.cold.stats["published"]


def test_flax_compiles_once_on_jax(run):
    pair = run(JaxJobs, "jax-oldest", "flax_cnn")
    assert pair.cold.report["compiles"] == pair.cold.stats["misses"] >= 10
    assert pair.warm.report["compiles"] == 0


def test_the_kernels_of_liger_compile_once(run):
    triton = partial(TritonJobs, version="3.9.0")
    pair = run(triton, "frameworks", "kernels", cases="liger")
    assert pair.cold.report["ptxas"] == pair.cold.stats["published"] >= 5
    assert pair.warm.report["ptxas"] == 0
    assert pair.warm.hits == pair.cold.stats["published"]
