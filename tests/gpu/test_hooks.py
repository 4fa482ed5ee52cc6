"""Each hook shares its GPU artifacts between two hosts, and the results are equal to the bit."""

import pytest

from support.compiler_jobs import CompilerJobs

pytestmark = pytest.mark.gpu

PROGRAMS = {
    "inductor": ("compiled_training", {}, "inductor,triton"),
    "inductor, CUDA graphs": ("compiled_training", {"mode": "reduce-overhead"}, "inductor,triton"),
    "triton": ("launched_kernels", {}, "triton"),
    "jax": ("jax_training", {}, "jax"),
    "pjrt": ("jax_training", {}, "pjrt"),
}
"""Function of `support.cases.on_a_gpu`, its arguments, and the hooks."""

VARIABLES = {
    "JAX_PLATFORMS": "cuda",
    "PJRT_DEVICE": "",
    "TORCHINDUCTOR_CACHE_DIR": "HOST/inductor",
    "TRITON_CACHE_DIR": "HOST/triton",
    "TMPDIR": "HOST/tmp",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_second_host_compiles_nothing_and_computes_the_same_bits(name, server, namespace, tmp_path):
    function, keywords, hooks = PROGRAMS[name]
    options = {"hooks": hooks, "url": server.url, "namespace": namespace}
    with CompilerJobs(tmp_path, cases="on_a_gpu", variables=VARIABLES, **options) as jobs:
        outcomes = []
        for host in ("first", "second"):
            (tmp_path / host / "tmp").mkdir(parents=True)
            outcomes.append(jobs.run(host, function, keywords))
    cold, warm = outcomes
    print(f"{name}: {cold.report['seconds']:.1f} s cold, {warm.report['seconds']:.1f} s warm")
    assert cold.stats["published"] > 0
    assert cold.stats["fallbacks"] == warm.stats["fallbacks"] == {}
    assert warm.hits > 0
    # torch looks up two artifacts under other keys when it loads a graph than when it compiles it.
    assert warm.stats["misses"] <= (2 if function == "compiled_training" else 0)
    assert warm.report["bits"] == cold.report["bits"]
    assert warm.report.get("losses") == cold.report.get("losses")
    assert warm.report.get("chosen") == cold.report.get("chosen")
    assert warm.report.get("measured", 0) == 0
