"""Each hook shares its GPU artifacts between two hosts, and the results are equal to the bit."""

import os
from importlib.util import find_spec

import pytest

from support.device_hooks import on_two_hosts

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
TORCH = {"device": DEVICE}
JAX = {"backend": "gpu" if DEVICE == "cuda" else DEVICE}
PROGRAMS = {
    "inductor": ("compiled_training", TORCH, "inductor,triton"),
    "inductor, CUDA graphs": (
        "compiled_training",
        TORCH | {"mode": "reduce-overhead"},
        "inductor,triton",
    ),
    "triton": ("launched_kernels", TORCH, "triton"),
    "tuning with triton": ("tuned_kernel", TORCH, "triton"),
    "jax": ("jax_training", JAX, "jax"),
    "pjrt": ("jax_training", JAX, "pjrt"),
}
"""Function of `support.cases.on_a_device`, its arguments, and the hooks."""

VARIABLES = {
    "JAX_PLATFORMS": DEVICE,
    "PJRT_DEVICE": "",
    "TORCHINDUCTOR_CACHE_DIR": "HOST/inductor",
    "TRITON_CACHE_DIR": "HOST/triton",
    "TMPDIR": "HOST/tmp",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def environment_of(function):
    """Return the environment of JAX on CUDA. Empty if the tests' own Python has its plug-in."""
    has_plugin = any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    needs_plugin = function == "jax_training" and DEVICE == "cuda"
    return "jax-cuda" if needs_plugin and not has_plugin else ""


@pytest.mark.parametrize("name", PROGRAMS)
def test_second_host_compiles_nothing_and_computes_the_same_bits(name, server, namespace, tmp_path):
    function, keywords, hooks = PROGRAMS[name]
    cold, warm = on_two_hosts(
        *(tmp_path, function, keywords),
        variables=VARIABLES,
        hooks=hooks,
        url=server.url,
        namespace=namespace,
        environment=environment_of(function),
    )
    # torch looks up two artifacts under other keys when it loads a graph than when it compiles it.
    assert warm.stats["misses"] <= (2 if function == "compiled_training" else 0)
    assert warm.report.get("chosen") == cold.report.get("chosen")
    assert warm.report.get("measured", 0) == 0
