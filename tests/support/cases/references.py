"""Our optimizers beside Optax, bitsandbytes and the newest torch, with equal gradients."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import bitsandbytes  # type: ignore[import-not-found] # not in .venv
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-not-found] # not in .venv
import torch
from torch import nn

from graphstash import training
from support.optimizer_cases import give_gradients, make_steps, shaped

STEPS: Final = 12
SHAPES: Final = ((6, 4), (4, 6), (5,))
MATRICES: Final = (*SHAPES[:2], (4, 6), (5, 5))
QUANTIZED: Final = ((64, 256),)

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

IN_OPTAX: Final[Mapping[str, tuple[Make, Any]]] = {
    "SGD": (partial(training.SGD, lr=0.05), optax.sgd(0.05)),
    "SGD with momentum": (
        partial(training.SGD, lr=0.05, momentum=0.9, nesterov=True),
        optax.sgd(0.05, momentum=0.9, nesterov=True),
    ),
    "Adam": (partial(training.Adam, lr=0.05), optax.adam(0.05)),
    "Adam by formula": (partial(training.Adam, lr=0.05, fused=False), optax.adam(0.05)),
    "AdamW": (
        partial(training.AdamW, lr=0.05, weight_decay=0.1),
        optax.adamw(0.05, weight_decay=0.1),
    ),
    "Lion": (
        partial(training.Lion, lr=0.05, weight_decay=0.1),
        optax.lion(0.05, b1=0.9, b2=0.99, weight_decay=0.1),
    ),
    "LAMB": (
        partial(training.LAMB, lr=0.05, weight_decay=0.1, eps=1e-6),
        optax.lamb(0.05, weight_decay=0.1, eps=1e-6),
    ),
    "ScheduleFreeAdamW": (
        partial(training.ScheduleFreeAdamW, lr=0.05),
        optax.contrib.schedule_free_adamw(0.05, b1=0.9, b2=0.999, weight_decay=0.0),
    ),
}


def in_optax() -> dict[str, float]:
    """Return the largest difference from Optax in an element of a parameter, by case."""
    return {name: _difference_from_optax(*case) for name, case in IN_OPTAX.items()}


def _difference_from_optax(make: Make, transformation: Any) -> float:
    parameters = shaped(SHAPES)
    values: Any = [jnp.asarray(each.detach().numpy()) for each in parameters]
    state = transformation.init(values)
    optimizer = make(parameters)
    for step in range(STEPS):
        make_steps(parameters, optimizer, [step])
        gradients = [jnp.asarray(each.grad.numpy()) for each in parameters if each.grad is not None]
        updates, state = transformation.update(gradients, state, values)
        values = optax.apply_updates(values, updates)
    return max(
        float(np.abs(each.detach().numpy() - np.asarray(value)).max())
        for each, value in zip(parameters, values, strict=True)
    )


def in_torch() -> dict[str, float]:
    """Return the largest difference of Muon from torch's, by how the length is adjusted."""
    newest: Any = torch.optim
    differences = {}
    for adjustment in ("original", "match_rms_adamw"):
        ours, theirs = shaped(MATRICES), shaped(MATRICES)
        options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": adjustment}
        for parameters, make in ((ours, training.Muon), (theirs, newest.Muon)):
            make_steps(parameters, make(parameters, **options), range(STEPS))
        differences[adjustment] = _largest(ours, theirs)
    return differences


def in_bitsandbytes() -> dict[str, dict[str, float]]:
    """Return the mean differences of 8-bit optimizers from each other and from 32 bits."""
    differences = {}
    for name in ("Adam8bit", "AdamW8bit"):
        options = {"lr": 1e-3, "weight_decay": 0.01}
        makers = {
            "ours": getattr(training, name),
            "theirs": getattr(bitsandbytes.optim, name),
            "wide": getattr(training, name.removesuffix("8bit")),
        }
        trained = {}
        for kind, make in makers.items():
            trained[kind] = shaped(QUANTIZED)
            optimizer = make(trained[kind], **options)
            for step in range(STEPS):
                give_gradients(trained[kind], step)
                optimizer.step()
        differences[name] = {
            f"{a} - {b}": float((trained[a][0] - trained[b][0]).abs().mean())
            for a, b in (("ours", "theirs"), ("ours", "wide"), ("theirs", "wide"))
        } | {"moved": float((trained["wide"][0] - shaped(QUANTIZED)[0]).abs().mean())}
    return differences


def _largest(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))
