"""One program of a size, in one framework each; knows nothing of graphstash.

Each case imports its framework itself: they lie in several environments.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# JAX is typed in part, Triton not at all.

import os
from typing import Any

__all__ = ["inductor", "jax", "pjrt", "torch_xla", "triton"]

tl: Any = None


def pjrt(*, size: int) -> float:
    from support.pjrt_plugin import use_in_jax

    use_in_jax()
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    return jax(size=size)


def jax(*, size: int) -> float:
    import jax
    import jax.numpy as jnp
    import numpy as np

    @jax.jit
    def train_step(x: Any) -> Any:
        return jnp.sort(jnp.tanh(x @ x), axis=0).sum()

    return float(train_step(np.ones((size, size), np.float32)))


def inductor(*, size: int) -> float:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    step = torch.compile(lambda x: torch.tanh(x @ x).sum())
    return float(step(torch.ones(size, size)))


def torch_xla(*, size: int) -> float:
    import torch
    import torch_xla

    x = torch.ones(size, size).to(torch_xla.device())
    total = torch.tanh(x @ x).sum()
    torch_xla.sync()
    return float(total)


def triton(*, size: int) -> int:
    global tl  # noqa: PLW0603 - Triton reads the kernel's globals
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    @triton.jit
    def scale(x, y, block: tl.constexpr):  # type: ignore[no-untyped-def] # Triton
        places = tl.arange(0, block)
        tl.store(y + places, tl.load(x + places) * 2.0)

    source = ASTSource(
        fn=scale,
        signature={"x": "*fp32", "y": "*fp32", "block": "constexpr"},
        constexprs={"block": size},
    )
    return len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"])
