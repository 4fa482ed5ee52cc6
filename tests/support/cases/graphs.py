"""Compile many graphs of JAX, in series or in several threads."""

# mypy: disallow-untyped-calls=False
# JAX is partly typed.

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax import numpy as jnp

GRAPHS = 12


def loss(weights: list[Any], x: Any) -> Any:
    for number, weight in enumerate(weights):
        x = jnp.tanh(x @ weight) * (1 + number / 100)
    return jnp.sum(x * x)


def compiled(*, threads: int = 1, layers: int = 24) -> float:
    """Return the seconds from the end of the imports to the last graph."""

    def build(number: int) -> None:
        width = 16 + 2 * number
        weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
        batch = jax.ShapeDtypeStruct((8, width), jnp.float32)
        jax.jit(jax.value_and_grad(loss)).lower(weights, batch).compile()

    started = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(build, range(GRAPHS)))
    return time.monotonic() - started
