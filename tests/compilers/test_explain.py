"""One thing is changed, and the job that compiles again says which: real compiles, every hook."""

import pytest

from support.compiler_jobs import CompilerJobs
from support.server import Server

FAST = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}
CASES = {
    "jax": (
        "jax-newest",
        "jit(train_step)",
        {
            "shape": (32, {}, "inputs: tensor<32x32xf32> here, tensor<16x16xf32> there"),
            "flag": (16, FAST, "XLA_FLAGS: --xla_cpu_enable_fast_math=true here, not set there"),
        },
    ),
    "pjrt": (
        "jax-pjrt",
        "jit(train_step)",
        {"flag": (16, FAST, "XLA_FLAGS: --xla_cpu_enable_fast_math=true here, not set there")},
    ),
    "inductor": (
        "",
        "explain.py:",
        {
            "shape": (32, {}, "inputs: float32[32, 32] here, float32[16, 16] there"),
            "threads": (16, {"OMP_NUM_THREADS": "2"}, "threads: 2 here, 1 there"),
            "isa": (
                16,
                {"ATEN_CPU_CAPABILITY": "default"},
                "ATEN_CPU_CAPABILITY: default here, not set there",
                "vec isa: INVALID_VEC_ISA",
            ),
        },
    ),
    "torch_xla": (
        "",
        "explain.py:",
        {
            "shape": (32, {}, "another graph of the same line: other operations, shapes or types"),
            "flag": (16, FAST, "XLA_FLAGS: --xla_cpu_enable_fast_math=true"),
        },
    ),
    "triton": (
        "",
        "scale",
        {
            "constant": (32, {}, "constants: block=32 here, block=16 there"),
            "setting": (16, {"TRITON_DISABLE_LINE_INFO": "1"}, "TRITON_DISABLE_LINE_INFO: 1 here"),
        },
    ),
}


@pytest.mark.extended
@pytest.mark.parametrize("framework", CASES)
def test_changed_part_is_named(tmp_path, framework):
    """On a server of its own: an explanation may name any artifact that the server stores."""
    environment, label, changes = CASES[framework]
    settings = {
        "namespace": "explained",
        "hooks": framework,
        "explain": "true",
        "environment": environment,
        "variables": {
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": "HOST/inductor",
            "TRITON_CACHE_DIR": "HOST/triton",
        },
    }
    with (
        Server(tmp_path / "server") as server,
        CompilerJobs(tmp_path, cases="explain", url=server.url, **settings) as jobs,
    ):

        def run(host, size, **variables):
            outcome = jobs.run(host, framework, {"size": size}, variables=variables)
            return " ".join(outcome.errors.split())

        cold = run("cold", 16)
        assert "new program: nothing like it is stored" in cold
        assert label in cold
        for change, (size, variables, *sentences) in changes.items():
            told = run(change, size, **variables)
            for sentence in sentences:
                assert sentence in told, change
            assert f"nearest: {label}" in told, change
