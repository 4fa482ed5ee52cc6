"""One program of a size, in one framework; knows nothing of graphstash.

explain_job.py REPORT FRAMEWORK SIZE
"""

import json
import os
import sys
from pathlib import Path

report, framework, size = sys.argv[1], sys.argv[2], int(sys.argv[3])


def jax_step():
    if framework == "pjrt":
        import xla_plugins.xla_cpu_pjrt as plugin

        library = Path(plugin.__file__).with_name("xla_cpu_pjrt.so")
        os.environ["PJRT_NAMES_AND_LIBRARY_PATHS"] = f"other:{library}"
        os.environ["JAX_PLATFORMS"] = "other"
        os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    import jax
    import jax.numpy as jnp
    import numpy as np

    @jax.jit
    def train_step(x):
        return jnp.sort(jnp.tanh(x @ x), axis=0).sum()

    return float(train_step(np.ones((size, size), np.float32)))


def torch_step():
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    step = torch.compile(lambda x: torch.tanh(x @ x).sum())
    return float(step(torch.ones(size, size)))


def torch_xla_step():
    import torch
    import torch_xla

    x = torch.ones(size, size).to(torch_xla.device())
    total = torch.tanh(x @ x).sum()
    torch_xla.sync()
    return float(total)


def triton_kernel():
    global tl  # noqa: PLW0603 - Triton reads the kernel's globals
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    @triton.jit  # type: ignore[untyped-decorator] # Triton ships no types
    def scale(x, y, block: tl.constexpr):  # type: ignore # noqa: PGH003 - in Triton's own language
        places = tl.arange(0, block)
        tl.store(y + places, tl.load(x + places) * 2.0)

    source = ASTSource(
        fn=scale,
        signature={"x": "*fp32", "y": "*fp32", "block": "constexpr"},
        constexprs={"block": size},
    )
    return len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"])


steps = {
    "jax": jax_step,
    "pjrt": jax_step,
    "inductor": torch_step,
    "torch_xla": torch_xla_step,
    "triton": triton_kernel,
}
Path(report).write_text(json.dumps(steps[framework]()))
