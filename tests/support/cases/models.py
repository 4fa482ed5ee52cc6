"""Small real models with random weights, on the CPU.

Each model is a case that imports its own libraries, because they are in several environments.
"""
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-subclassing-any=False, disable-error-code="import-not-found"
# Some libraries are partly typed, and some are not in `.venv`.

import gc
from typing import Any, TypeAlias

Report: TypeAlias = dict[str, Any]
"""The losses, and the number of compilations."""

STEPS = 3


def residual_block() -> Report:
    """Train an image classifier on torch_xla's device: convolutions and batch normalization."""
    import torch
    import torch_xla
    import torch_xla.debug.metrics as xla_metrics
    from torch import nn

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
            )

        def forward(self, x: Any) -> Any:
            return x + self.inner(x)

    gc.disable()  # live tensors decide the contents of a lazy step
    torch.manual_seed(0)
    device = torch_xla.device()
    entry = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    model = nn.Sequential(entry, nn.MaxPool2d(2), Residual(), *head).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(STEPS, 4, 3, 16, 16), torch.randint(10, (STEPS, 4))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scores = model(images[step].to(device))
        loss = torch.nn.functional.cross_entropy(scores, labels[step].to(device))
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    compiles = xla_metrics.metric_data("CompileTime")
    return {"losses": losses, "compiles": compiles[0] if compiles else 0}


def flax_cnn() -> Report:
    """Train a convolutional classifier with batch statistics, by Flax's linen and Optax."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    from support.cases.jax_programs import note_compiles

    compiled = note_compiles()

    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for width in (8, 16):
                x = nn.Conv(width, (3, 3))(x)
                x = nn.BatchNorm(use_running_average=False)(x)
                x = nn.avg_pool(nn.gelu(x), (2, 2), (2, 2))
            return nn.Dense(10)(x.reshape(len(x), -1))

    model = Classifier()
    images = jax.random.normal(jax.random.key(0), (4, 16, 16, 3))
    labels = jnp.arange(4)
    variables = model.init(jax.random.key(1), images)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 1, 10)),
    )

    def loss_of(parameters: Any, statistics: Any) -> Any:
        scores, changed = model.apply(
            {"params": parameters, "batch_stats": statistics}, images, mutable="batch_stats"
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()
        return loss, changed["batch_stats"]

    @jax.jit
    def step(parameters: Any, statistics: Any, state: Any) -> Any:
        (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            parameters, statistics
        )
        updates, state = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), statistics, state, loss

    parameters, statistics = variables["params"], variables["batch_stats"]
    state, losses = tx.init(parameters), []
    for _ in range(STEPS):
        parameters, statistics, state, loss = step(parameters, statistics, state)
        losses.append(float(loss))
    return {"losses": losses, "compiles": len(compiled)}
