"""Programs that compilers compile for a GPU or a TPU, or for a CPU to test the programs.

Each returns a digest of its results. Those for a CPU take `device="cpu"` or `backend="cpu"`; the
kernels of Triton then need TRITON_INTERPRET=1.
"""

# mypy: disallow-untyped-calls=False
# torch, Triton and JAX are partly typed.

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

STEPS = 4


def _digest(*arrays: Any) -> str:
    """Return a digest of numpy arrays, to compare their bits."""
    return hashlib.sha256(b"".join(each.tobytes() for each in arrays)).hexdigest()


def compiled_training(*, mode: str | None = None, device: str = "cuda") -> dict[str, Any]:
    """Train a transformer layer through torch.compile, on a GPU with a Triton kernel.

    Args:
        mode: mode of torch.compile.
        device: device of torch.
    """
    import torch
    import triton
    from torch import nn

    from support.cases import gpu_kernels

    def softened(x: torch.Tensor) -> torch.Tensor:
        if device == "cpu":
            return nn.functional.silu(x)
        out = torch.empty_like(x)
        gpu_kernels.softened[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
        return out

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
    layer.to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
    x = torch.randn(8, 32, 128, device=device)

    @torch.compile(mode=mode)
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            return layer(x + softened(x)).float().square().mean()

    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    values = [each.detach().cpu().numpy() for each in layer.parameters()]
    return {"losses": losses, "bits": _digest(*values)}


def launched_kernels(*, device: str = "cuda") -> dict[str, Any]:
    """Launch a Triton kernel."""
    import torch
    import triton

    from support.cases import gpu_kernels

    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(device)
    out = torch.empty_like(x)
    gpu_kernels.softened[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
    torch.testing.assert_close(out, torch.sigmoid(x) * x)
    return {"bits": _digest(out.cpu().numpy())}


def tuned_kernel(*, device: str = "cuda") -> dict[str, Any]:
    """Launch a Triton kernel with several configurations through the team's tuner."""
    import torch
    import triton

    from graphstash.tuning.targets.triton import autotune
    from support.cases import gpu_kernels

    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(device)
    out = torch.empty_like(x)
    configs = [triton.Config({"BLOCK": block}, num_warps=4) for block in (256, 1024, 4096)]
    measured = 0

    def benched(call: Any, quantiles: Any) -> Any:
        nonlocal measured
        measured += 1
        if device == "cpu":  # where Triton's interpreter runs, and events do not exist
            call()
            return [1.0, 1.0, 1.0]
        return triton.testing.do_bench(call, quantiles=quantiles)

    kernel = autotune(configs=configs, key=["n"], do_bench=benched)(gpu_kernels.softened)
    kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    torch.testing.assert_close(out, torch.sigmoid(x) * x)
    return {
        "bits": _digest(out.cpu().numpy()),
        "chosen": kernel.best_config.kwargs["BLOCK"],
        "measured": measured,
    }


def jax_training(*, backend: str) -> dict[str, Any]:
    """Train two layers with JAX, with products that XLA tunes on GPUs."""
    import jax
    import numpy as np
    from jax import numpy as jnp

    assert jax.default_backend() == backend
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
    for _ in range(STEPS):
        parameters, loss = step(parameters, x)
        losses.append(float(loss))
    return {"losses": losses, "bits": _digest(*map(np.asarray, parameters))}


_VALUES = [[float((row * column) % 7) for column in range(64)] for row in range(512)]


def _sums_by(configuration: Mapping[str, Any]) -> Callable[[], Any]:
    import jax
    import numpy as np
    from jax import numpy as jnp

    rows = configuration["rows"]
    values = jnp.asarray(_VALUES)
    summed = jax.jit(lambda x: jax.lax.map(lambda part: part.sum(1), x.reshape(-1, rows, 64)))
    return lambda: np.asarray(summed(values)).reshape(-1)


def _is_right(result: Any) -> bool:
    return bool(all(abs(found - sum(row)) < 1 for found, row in zip(result, _VALUES, strict=True)))


def tuned_sums(*, backend: str) -> dict[str, Any]:
    """Tune sums of rows in JAX. Only the processes that measure use the device."""
    from graphstash import tuning
    from graphstash_schema import DeviceType

    measured: list[object] = []
    task = tuning.Task(
        tuning.Problem("row-sums", (512, 64), "float32", DeviceType(f"{backend}-tested"), "jax"),
        tuning.ParameterSpace({"rows": [16, 64, 256]}),
        tuning.CallableTarget(_sums_by, name=f"row sums on {backend}", is_right=_is_right),
    )
    schedule = tuning.tune(task, budget=tuning.Budget(measurements=3), observe=measured.append)
    assert schedule is not None
    chosen = str(schedule.configuration)
    return {"bits": chosen, "chosen": chosen, "measured": len(measured)}


def topology() -> str:
    """Return the name that `graphstash prewarm` needs for the TPUs of this job, e.g. `v5e:2x2`."""
    import jax

    devices: Any = jax.devices("tpu")
    kind = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}.get(
        devices[0].device_kind, devices[0].device_kind.removeprefix("TPU ")
    )
    bounds = [max(axis) + 1 for axis in zip(*(each.coords for each in devices), strict=True)]
    if kind in {"v5e", "v6e"}:
        del bounds[2]
    return f"{kind}:{'x'.join(map(str, bounds))}"


def prewarmed_step() -> list[str]:
    """Compile the step of `jax_prewarm_job` for the devices of this job."""
    import jax

    from support.jax_prewarm_job import abstract_step

    jitted, arguments = abstract_step(jax.devices())
    jitted.lower(*arguments).compile()
    return [str(each) for each in jax.devices()]


def xla_ranks(*, directory: str) -> list[str]:
    """Train in one process for each device of torch_xla. Return a digest by each process."""
    import torch_xla

    torch_xla.launch(_xla_rank, args=(directory,))
    return [path.read_text() for path in sorted(Path(directory).glob("rank-*"))]


def _xla_rank(_: int, directory: str) -> None:
    import torch
    import torch_xla
    import torch_xla.runtime as xr
    from torch import nn

    from graphstash import training

    rank, world = xr.global_ordinal(), xr.world_size()
    torch.manual_seed(rank)  # the first process's parameters are copied to all
    model = nn.Linear(64, 1).to(torch_xla.device())
    x = torch.randn(64 * world, 64, generator=torch.Generator().manual_seed(0))
    data = training.Batches((x, x.sum(1, keepdim=True)), 8, seed=1, rank=rank, world=world)
    training.train(
        model,
        training.AdamW(model.parameters(), lr=0.01),
        data,
        steps=8,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        progress=False,
    )
    values = [each.detach().cpu().numpy() for each in model.parameters()]
    Path(directory, f"rank-{rank}").write_text(_digest(*values))


def xla_training(*, device: str) -> dict[str, Any]:
    """Train two layers with torch_xla and graphstash's optimizer, lazily and as a traced step.

    Args:
        device: torch_xla's name of the device, `TPU` or `CPU`.
    """
    import torch
    import torch_xla
    import torch_xla.runtime as xr
    from torch import nn

    from graphstash import training

    assert xr.device_type() == device
    kinds: dict[str, Any] = {}
    for traced in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))
        model.to(torch_xla.device())
        optimizer = training.AdamW(model.parameters(), lr=0.01)
        x = torch.randn(256, 64)
        data = training.Batches((x, x.sum(1, keepdim=True)), 32, seed=1)
        result = training.train(
            model,
            optimizer,
            data,
            steps=24,
            loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
            traced=traced,
            log_every=8,
            progress=False,
        )
        values = [each.detach().cpu().numpy() for each in model.parameters()]
        kinds[str(traced)] = [result.losses, _digest(*values)]
    (losses, bits), traced_kind = kinds["False"], kinds["True"]
    return {"losses": losses, "bits": bits, "traced_is_equal": [losses, bits] == traced_kind}
