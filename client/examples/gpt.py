"""A small byte-level GPT, and text for it to learn: the sources of Python's standard library.

Shapes: B batch, T context (tokens), C width (channels), H heads, V vocabulary.
"""

import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GPT", "draw_batches", "read_corpus"]

VOCABULARY = 256  # one token per byte value
CORPUS_LIMIT_BYTES = 4_000_000


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
        self.position_TC = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(Block(width=width, heads=heads) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width)
        # Not tied to the embedding: moving a module to an XLA device makes new parameters, which
        # would quietly untie them, and with 256 tokens there is little to save.
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.initialise(layers=layers)

    def initialise(self, *, layers: int) -> None:
        """Sets GPT-2's initial weights (Radford et al., 2019, section 2.3), but larger embeddings.

        GPT-2's 0.02 for embeddings too lets AdamW's first steps, each as large as the learning
        rate, wash out what tells the bytes apart; forty steps then end at the byte frequencies.
        """
        for name, parameter in self.named_parameters():
            if name == "token_embedding.weight":
                nn.init.normal_(parameter, std=1.0)
            elif name == "position_TC":
                nn.init.normal_(parameter, std=0.1)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith(("attention_out.weight", "mlp_out.weight")):
                # 2 * layers branches add up in the residual stream; this keeps their sum's variance
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
            elif "norm" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Predicts each target from the tokens up to its place; both int64 below 256."""
        x_BTC = self.token_embedding(tokens_BT) + self.position_TC
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = self.head(self.final_norm(x_BTC))
        return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def read_corpus() -> Tensor:
    """Reads the standard library's top-level modules, in the order of their names.

    Returns:
        The bytes, uint8 [corpus], on the CPU. They are the same for every run of one Python.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:CORPUS_LIMIT_BYTES], dtype=torch.uint8)


def draw_batches(
    corpus: Tensor, *, batch: int, context: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Reads on from `batch` random places, `context` bytes a step, without end.

    Consecutive text resembles itself, so a short run learns more from it than from windows drawn
    again for each step.

    Yields:
        tokens_BT and targets_BT, int64, on the CPU; the targets are the tokens one byte later.
    """
    generator = torch.Generator().manual_seed(seed)
    start_B1 = torch.randint(len(corpus), (batch, 1), generator=generator)
    window = torch.arange(context + 1)
    while True:
        bytes_BT = corpus[(start_B1 + window) % len(corpus)].long()  # [B, T + 1]
        yield bytes_BT[:, :-1].contiguous(), bytes_BT[:, 1:].contiguous()
        start_B1 += context
