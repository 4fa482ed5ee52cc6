"""Trains a small byte-level GPT with torch_xla on the sources of Python's standard library.

This is an ordinary training job: it knows nothing about compilation caches. Run it plainly, or in
front of it put whatever is meant to make its compilation cheaper, and compare the two reports.

The job is deterministic. Weights and batches are drawn on the CPU from `--seed` and then moved to
the device, so two runs on the same machine give the same losses bit for bit, whether their graphs
were compiled or loaded.

Three ways of driving the compiler (`--mode`):

* `lazy`: operations are recorded as they are called and `torch_xla.sync()` ends each step;
* `compile`: the whole step is wrapped in `torch_xla.compile`;
* `dynamo`: forward and backward go through `torch.compile(backend="openxla")`, the optimizer is
  recorded lazily.

In each mode the first two steps are different programs (the optimizer's state comes into being in
the first), so both compile; later steps repeat the second.

Shapes beside tensors: B batch, T context (tokens), C width (channels), H heads, V vocabulary.
"""

import argparse
import json
import math
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

IMPORT_STARTED = time.perf_counter()

import torch  # noqa: E402 (the clock above must start before the heavy imports)
import torch_xla  # noqa: E402
import torch_xla.debug.metrics as xla_metrics  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

IMPORT_SECONDS = time.perf_counter() - IMPORT_STARTED

__all__ = ["GPT", "main"]

VOCABULARY = 256  # one token per byte value
CORPUS_LIMIT_BYTES = 4_000_000
SETTLED_STEP = 3  # by now both programs (steps 1 and 2) are compiled and one has been repeated
SMALL_PRESET = {"steps": 6, "layers": 2, "width": 64, "context": 32}

StepFunction = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """One pre-norm transformer layer: causal attention, then a GELU MLP, each added to `x_BTC`."""

    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attend(self.attention_norm(x_BTC))
        hidden_BTF = functional.gelu(self.mlp_in(self.mlp_norm(x_BTC)))  # F = 4 C
        return x_BTC + self.mlp_out(hidden_BTF)

    def attend(self, x_BTC: Tensor) -> Tensor:
        """Mixes each position with those before it."""
        batch, context, width = x_BTC.shape
        split = (batch, context, 3, self.heads, width // self.heads)
        q, k, v = self.query_key_value(x_BTC).view(split).permute(2, 0, 3, 1, 4)  # [B, H, T, C/H]
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, C/H]
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, context, width))


class GPT(nn.Module):
    """A decoder-only transformer over bytes; calling it gives the mean next-byte loss in nats."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_C = nn.Parameter(torch.zeros(context, width))  # [T, C]
        self.blocks = nn.ModuleList(Block(width=width, heads=heads) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width)
        # Not tied to the embedding: moving a module to an XLA device makes new parameters, which
        # would quietly untie them, and with 256 tokens there is little to save.
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.initialise(layers=layers)

    def initialise(self, *, layers: int) -> None:
        """Sets GPT-2's initial weights (Radford et al., 2019, section 2.3)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith(("attention_out.weight", "mlp_out.weight")):
                # 2 * layers branches add up in the residual stream; this keeps their sum's variance
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
            elif "norm" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTC = self.token_embedding(tokens_BT) + self.position_C
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = self.head(self.final_norm(x_BTC))
        return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
