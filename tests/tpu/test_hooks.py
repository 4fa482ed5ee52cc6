"""Each hook shares its TPU artifacts between two hosts, and the results are equal to the bit."""

import os
import subprocess
from pathlib import Path

import pytest

from support.compiler_jobs import CompilerJobs
from support.device_hooks import on_two_hosts
from support.environments import python_of

pytestmark = pytest.mark.tpu

DEVICE = os.environ.get("TEST_DEVICE", "tpu")
JAX_ENVIRONMENT, XLA_ENVIRONMENT = ("jax-newest", "xla-tpu") if DEVICE == "tpu" else ("", "")
JAX = {"backend": DEVICE}
XLA = {"device": DEVICE.upper()}
XLA_HOOK = "pjrt" if DEVICE == "tpu" else "torch_xla"  # 2.9 on a TPU, 2.7 on a CPU
PROGRAMS = {
    "jax": ("jax_training", JAX, "jax", JAX_ENVIRONMENT),
    "pjrt": ("jax_training", JAX, "pjrt", JAX_ENVIRONMENT),
    "torch_xla, also traced": ("xla_training", XLA, XLA_HOOK, XLA_ENVIRONMENT),
    "tuning with jax": ("tuned_sums", JAX, "jax", JAX_ENVIRONMENT),
}
"""Function of `support.cases.on_a_device`, its arguments, the hooks, and the environment."""

VARIABLES = {"JAX_PLATFORMS": f"{DEVICE},cpu", "PJRT_DEVICE": DEVICE.upper()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_second_host_compiles_nothing_and_computes_the_same_bits(name, server, namespace, tmp_path):
    function, keywords, hooks, environment = PROGRAMS[name]
    cold, warm = on_two_hosts(
        *(tmp_path, function, keywords),
        variables=VARIABLES,
        hooks=hooks,
        url=server.url,
        namespace=namespace,
        environment=environment,
    )
    assert warm.stats["misses"] == 0
    assert cold.report.get("traced_is_equal", True)
    assert cold.report.get("measured", 1) > 0
    assert warm.report.get("measured", 0) == 0


def test_job_finds_a_prewarmed_program(server, namespace, tmp_path):
    options = {"url": server.url, "namespace": namespace, "hooks": "jax"}
    with CompilerJobs(
        tmp_path, cases="on_a_device", environment=JAX_ENVIRONMENT, variables=VARIABLES, **options
    ) as jobs:
        topology = jobs.run("first", "topology", {}).report
        step = Path(__file__).parents[1] / "support" / "jax_prewarm_job.py"
        words = ("--topology", topology, "--url", server.url, "--namespace", namespace)
        command = [python_of(JAX_ENVIRONMENT), "-m", "graphstash", "prewarm", *words]
        subprocess.run(
            [*command, f"{step}:abstract_step"],
            env=os.environ | {"GRAPHSTASH_CACHE_DIR": str(tmp_path / "tier")},
            check=True,
        )
        job = jobs.run("second", "prewarmed_step", {})
    assert job.hits > 0
    assert job.stats["fallbacks"] == {}


def test_every_rank_of_torch_xla_trains_to_the_same_bits(tmp_path):
    with CompilerJobs(
        tmp_path,
        cases="on_a_device",
        environment=XLA_ENVIRONMENT,
        variables=VARIABLES,
        under="python",
    ) as jobs:
        bits = jobs.run("all", "xla_ranks", {"directory": str(tmp_path)}).report
    assert len(bits) >= 1
    assert len(set(bits)) == 1
