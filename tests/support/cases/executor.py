"""Train twice from the same start, in series and on a DeviceExecutor, to the same bits."""

import gc
from collections.abc import Iterator
from typing import Any

from graphstash.training.data.device_loader import DeviceLoader, to_device
from graphstash.training.threads import DeviceExecutor

STEPS = 100


def on_torch_xla() -> None:
    import torch
    import torch_xla
    from torch import nn
    from torch.nn import functional

    from support.cases.xla import counts

    gc.disable()  # live tensors decide the contents of a lazy step
    device = torch_xla.device()

    def batches() -> Iterator[Any]:
        for number in range(STEPS):
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
            yield {"x": inputs, "y": inputs.sum(1, keepdim=True)}

    def start() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        return loss.detach()

    def state(model: Any, losses: Any) -> list[Any]:
        return [value.cpu() for value in (*model.parameters(), *losses)]

    def in_series() -> list[Any]:
        model, optimizer = start()
        losses = [step(model, optimizer, to_device(batch, device)) for batch in batches()]
        return state(model, losses)

    def threaded() -> Any:
        upload = DeviceLoader(batches(), upload=lambda batch: to_device(batch, device))
        with upload, DeviceExecutor(depth=2) as executor:
            model, optimizer = executor.submit(start).result()
            losses = [executor.submit(step, model, optimizer, batch) for batch in upload]
            return executor.submit(state, model, losses).result()

    first = in_series()
    before = counts("CompileTime", "ExecuteTime")
    second = threaded()
    after = counts("CompileTime", "ExecuteTime")
    assert all(map(torch.equal, first, second))
    assert float(first[-1]) < float(first[-STEPS]) / 2
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, STEPS]
    (sent,) = counts("TransferToDeviceTime")
    to_device(next(batches()), device)
    assert counts("TransferToDeviceTime") == [sent + 1]  # two tensors, one call


def on_jax() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    @jax.jit
    def step(weights: Any, batch: Any) -> Any:
        def loss_of(weights: Any) -> Any:
            hidden = jnp.tanh(batch @ weights[0])
            return jnp.mean((hidden @ weights[1] - batch.sum(1, keepdims=True)) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return [w - 0.05 * g for w, g in zip(weights, gradients, strict=True)], loss

    def wait_for(weights: Any, batch: Any) -> Any:
        return jax.block_until_ready(step(weights, batch))

    def first_of(result: Any) -> Any:
        return result[0]

    def batches() -> Iterator[Any]:
        for number in range(STEPS):
            yield np.random.default_rng(number).normal(size=(8, 16)).astype("float32")

    def start() -> list[Any]:
        keys = jax.random.split(jax.random.key(0))
        return [jax.random.normal(keys[0], (16, 32)), jax.random.normal(keys[1], (32, 1))]

    weights, first = start(), []
    for batch in batches():
        weights, loss = step(weights, batch)
        first.append(loss)
    first += weights
    losses, state = [], start()
    with DeviceLoader(batches(), upload=jnp.asarray) as loader, DeviceExecutor(depth=2) as executor:
        for batch in loader:
            result = executor.submit(wait_for, state, batch)
            state = executor.submit(first_of, result)  # type: ignore[assignment] # stands for it
            losses.append(result)
        ended: Any = state
        second = [loss.result()[1] for loss in losses] + ended.result()
    assert all(bool((a == b).all()) for a, b in zip(first, second, strict=True))
    assert float(first[STEPS - 1]) < float(first[0]) / 2
