"""A job of JAX with so many graphs, compiled one after another or side by side; reports the time.

Knows nothing of graphstash. The time is that from the end of the imports to the last graph.
"""

# mypy: disallow-untyped-calls=False
# JAX is typed in part.

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax import numpy as jnp

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--graphs", type=int, default=12)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--layers", type=int, default=24)
options = parser.parse_args()


def loss(weights: list[Any], x: Any) -> Any:
    for number, weight in enumerate(weights):
        x = jnp.tanh(x @ weight) * (1 + number / 100)
    return jnp.sum(x * x)


def build(number: int) -> None:
    width = 16 + 2 * number
    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * options.layers
    batch = jax.ShapeDtypeStruct((8, width), jnp.float32)
    jax.jit(jax.value_and_grad(loss)).lower(weights, batch).compile()


started = time.monotonic()
with ThreadPoolExecutor(options.threads) as pool:
    list(pool.map(build, range(options.graphs)))
options.report.write_text(json.dumps({"seconds": time.monotonic() - started}))
