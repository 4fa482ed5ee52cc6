"""Training steps of a small GPT on JAX, the same as in `gpt_torch.py`.

    gpt_jax.py REPORT [--plugin]

Shapes: B batch, T context (tokens), C width (channels), H heads, V vocabulary.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--plugin", action="store_true", help="on the CPU's PJRT plug-in")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--steps", type=int, default=3)
options = parser.parse_args()

if options.plugin:
    sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
    from pjrt_plugin import LIBRARY

    os.environ["PJRT_NAMES_AND_LIBRARY_PATHS"] = f"other:{LIBRARY}"
    os.environ["JAX_PLATFORMS"] = "other"

import jax
import jax.numpy as jnp
import numpy as np

BATCH, CONTEXT, WIDTH, HEADS, VOCABULARY = 4, 64, 128, 4, 256


def initial(generator):
    def normal(*shape):
        return generator.normal(0, 0.02, shape).astype(np.float32)

    def norm():
        return np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)

    blocks = [
        {
            "norm_1": norm(),
            "qkv": normal(WIDTH, 3 * WIDTH),
            "out": normal(WIDTH, WIDTH),
            "norm_2": norm(),
            "in": normal(WIDTH, 4 * WIDTH),
            "back": normal(4 * WIDTH, WIDTH),
        }
        for _ in range(options.layers)
    ]
    return {
        "tokens": normal(VOCABULARY, WIDTH),
        "positions": normal(CONTEXT, WIDTH),
        "blocks": blocks,
        "norm": norm(),
        "head": normal(WIDTH, VOCABULARY),
    }


def normalized(x_BTC, norm):
    centred = x_BTC - x_BTC.mean(-1, keepdims=True)
    scale, shift = norm
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + shift


def attend(x_BTC, block):
    split = (BATCH, CONTEXT, 3, HEADS, WIDTH // HEADS)
    q, k, v = (x_BTC @ block["qkv"]).reshape(split).transpose(2, 0, 3, 1, 4)  # [B, H, T, C/H]
    scores = q @ k.swapaxes(-1, -2) / (WIDTH // HEADS) ** 0.5
    past = jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool))
    mixed = jax.nn.softmax(jnp.where(past, scores, -jnp.inf)) @ v
    return mixed.swapaxes(1, 2).reshape(x_BTC.shape) @ block["out"]


def loss_of(weights, tokens_BT, targets_BT):
    x_BTC = weights["tokens"][tokens_BT] + weights["positions"]
    for block in weights["blocks"]:
        x_BTC = x_BTC + attend(normalized(x_BTC, block["norm_1"]), block)
        hidden = jax.nn.gelu(normalized(x_BTC, block["norm_2"]) @ block["in"])
        x_BTC = x_BTC + hidden @ block["back"]
    scores_BTV = jax.nn.log_softmax(normalized(x_BTC, weights["norm"]) @ weights["head"])
    return -jnp.take_along_axis(scores_BTV, targets_BT[..., None], -1).mean()


@jax.jit
def train_step(weights, tokens_BT, targets_BT):
    loss, gradients = jax.value_and_grad(loss_of)(weights, tokens_BT, targets_BT)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


generator = np.random.default_rng(0)
weights = initial(generator)
losses, seconds = [], []
for _ in range(options.steps):
    window = generator.integers(0, VOCABULARY, (BATCH, CONTEXT + 1), dtype=np.int32)
    started = time.monotonic()
    weights, loss = train_step(weights, window[:, :-1], window[:, 1:])
    losses.append(float(loss).hex())
    seconds.append(time.monotonic() - started)

options.report.write_text(json.dumps({"losses": losses, "step_seconds": seconds}))
