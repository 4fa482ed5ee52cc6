"""Programs that compilers compile for a GPU.

Each returns a digest of its results, and its seconds until the end of the first step or of the last
kernel.
"""

# mypy: disallow-untyped-calls=False
# torch, Triton and JAX are partly typed.

import hashlib
import time
from typing import Any

__all__ = ["compiled_training", "jax_training", "launched_kernels"]

STEPS = 4


def _digest(*arrays: Any) -> str:
    """Return a digest of numpy arrays, to compare their bits."""
    return hashlib.sha256(b"".join(each.tobytes() for each in arrays)).hexdigest()


def compiled_training(*, mode: str | None = None) -> dict[str, Any]:
    """Train a transformer layer with a Triton kernel through torch.compile.

    Args:
        mode: mode of torch.compile.
    """
    import torch
    import triton
    from torch import nn

    from support.cases import gpu_kernels

    def softened(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        gpu_kernels.softened[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
        return out

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
    layer.to("cuda")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
    x = torch.randn(8, 32, 128, device="cuda")

    @torch.compile(mode=mode)
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return layer(x + softened(x)).float().square().mean()

    losses, started = [], time.monotonic()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        if step == 0:
            seconds = time.monotonic() - started
    values = [each.detach().cpu().numpy() for each in layer.parameters()]
    return {"losses": losses, "bits": _digest(*values), "seconds": seconds}


def launched_kernels() -> dict[str, Any]:
    """Launch a Triton kernel, and a kernel with several configurations through the team's tuner."""
    import torch
    import triton

    from graphstash.tuning.targets.triton import autotune
    from support.cases import gpu_kernels

    started = time.monotonic()
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to("cuda")
    plain, tuned = torch.empty_like(x), torch.empty_like(x)
    gpu_kernels.softened[(triton.cdiv(x.numel(), 1024),)](x, plain, x.numel(), BLOCK=1024)
    configs = [triton.Config({"BLOCK": block}, num_warps=4) for block in (256, 1024, 4096)]
    measured = 0

    def benched(call: Any, quantiles: Any) -> Any:
        nonlocal measured
        measured += 1
        return triton.testing.do_bench(call, quantiles=quantiles)

    kernel = autotune(configs=configs, key=["n"], do_bench=benched)(gpu_kernels.softened)
    kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, tuned, x.numel())
    torch.cuda.synchronize()
    expected = torch.sigmoid(x) * x
    for found in (plain, tuned):
        torch.testing.assert_close(found, expected)
    return {
        "bits": _digest(plain.cpu().numpy()),
        "chosen": kernel.best_config.kwargs["BLOCK"],
        "measured": measured,
        "seconds": time.monotonic() - started,
    }


def jax_training() -> dict[str, Any]:
    """Train two layers with JAX, with products that XLA tunes."""
    import jax
    import numpy as np
    from jax import numpy as jnp

    started = time.monotonic()
    assert jax.default_backend() == "gpu"
    keys = jax.random.split(jax.random.key(0), 3)
    first = jax.random.normal(keys[0], (512, 512)) * 0.05
    second = jax.random.normal(keys[1], (512, 1)) * 0.05
    x = jax.random.normal(keys[2], (256, 512))

    @jax.jit
    def step(parameters: Any, x: Any) -> Any:
        def loss_of(parameters: Any) -> Any:
            hidden = jnp.tanh((x @ parameters[0]).astype(jnp.bfloat16))
            found = (hidden @ parameters[1].astype(jnp.bfloat16)).astype(jnp.float32)
            return ((found - x.sum(1, keepdims=True)) ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        return [p - 0.01 * g for p, g in zip(parameters, gradients, strict=True)], loss

    parameters, losses = [first, second], []
    for number in range(STEPS):
        parameters, loss = step(parameters, x)
        losses.append(float(loss))
        if number == 0:
            seconds = time.monotonic() - started
    return {
        "losses": losses,
        "bits": _digest(*map(np.asarray, parameters)),
        "seconds": seconds,
    }
