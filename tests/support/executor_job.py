"""Trains twice from the same start, in series and on a DeviceExecutor; reports what differed.

Run as a process of its own: torch_xla keeps its graphs per process, and JAX warns of later forks.
"""

import argparse
import gc
import json
from pathlib import Path

from graphstash.training.data.device_loader import DeviceLoader, to_device
from graphstash.training.threads import DeviceExecutor

STEPS = 100


def on_torch_xla():
    import torch
    import torch_xla
    import torch_xla.debug.metrics as xla_metrics
    from torch import nn
    from torch.nn import functional

    device = torch_xla.device()

    def count(metric):
        data = xla_metrics.metric_data(metric)
        return int(data[0]) if data else 0

    def counts():
        return {name: count(name) for name in ("CompileTime", "ExecuteTime")}

    def batches():
        for number in range(STEPS):
            generator = torch.Generator().manual_seed(number)
            inputs = torch.randn(8, 16, generator=generator)
            yield {"x": inputs, "y": inputs.sum(1, keepdim=True)}

    def start():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        return loss.detach()

    def state(model, losses):
        return [v.cpu() for v in (*model.parameters(), *losses)]

    def in_series():
        model, optimizer = start()
        losses = [step(model, optimizer, to_device(batch, device)) for batch in batches()]
        return state(model, losses)

    def threaded():
        upload = DeviceLoader(batches(), upload=lambda batch: to_device(batch, device))
        with upload, DeviceExecutor(depth=2) as executor:
            model, optimizer = executor.submit(start).result()
            losses = [executor.submit(step, model, optimizer, batch) for batch in upload]
            return executor.submit(state, model, losses).result()

    first = in_series()
    before = counts()
    second = threaded()
    after = counts()
    sent = count("TransferToDeviceTime")
    to_device(next(batches()), device)
    return {
        "equal": [torch.equal(*pair) for pair in zip(first, second, strict=True)],
        "loss": [float(first[-STEPS]), float(first[-1])],
        "steps": STEPS,
        "counts": {name: after[name] - before[name] for name in after},
        "transfers": count("TransferToDeviceTime") - sent,
    }


def on_jax():
    import jax
    import jax.numpy as jnp
    import numpy as np

    @jax.jit
    def step(weights, batch):
        def loss_of(weights):
            hidden = jnp.tanh(batch @ weights[0])
            return jnp.mean((hidden @ weights[1] - batch.sum(1, keepdims=True)) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return [w - 0.05 * g for w, g in zip(weights, gradients, strict=True)], loss

    def wait_for(weights, batch):
        return jax.block_until_ready(step(weights, batch))

    def first_of(result):
        return result[0]

    def batches():
        for number in range(STEPS):
            yield np.random.default_rng(number).normal(size=(8, 16)).astype("float32")

    def start():
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
            state = executor.submit(first_of, result)
            losses.append(result)
        second = [loss.result()[1] for loss in losses] + state.result()
    return {
        "equal": [bool((a == b).all()) for a, b in zip(first, second, strict=True)],
        "loss": [float(first[0]), float(first[STEPS - 1])],
        "steps": STEPS,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("--on", choices=("torch_xla", "jax"), required=True)
    options = parser.parse_args()
    gc.disable()  # which tensors are alive decides what a lazy step is
    run = {"torch_xla": on_torch_xla, "jax": on_jax}[options.on]
    options.report.write_text(json.dumps(run()))
