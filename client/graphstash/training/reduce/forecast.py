"""Estimates whether sparse reduction pays, from a few batches and the speed of the link.

As in the OmniReduce paper, a ring of N ranks sends 2(N-1)/N of each gradient. For each parameter,
this package sends the same share of the union's blocks, or N-1 times each rank's own; and the same
share of one bit per block, or N-1 times the numbers of each rank's own.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphstash.training.reduce.blocks import BlockView, block_elements
from graphstash.training.reduce.opening import NUMBER_BYTES

__all__ = ["Forecast", "report"]


class Forecast(NamedTuple):
    """Estimated traffic of one training step.

    Attributes:
        density: Share of the gradients' blocks that are nonzero in one batch, 0 to 1. A
            parameter without a gradient in a batch counts as zeros, as DDP reduces it.
        union_density: Share of blocks that are nonzero in at least one of `workers` batches.
        dense_seconds: Seconds for a ring to send all gradients.
        sparse_seconds: Seconds to send the bitmaps and the blocks.
        densities: `density` of each parameter, by name.
    """

    density: float
    union_density: float
    dense_seconds: float
    sparse_seconds: float
    densities: dict[str, float]

    @property
    def times_faster(self) -> float:
        """`dense_seconds` divided by `sparse_seconds`; ignores the time to find and pack blocks."""
        return self.dense_seconds / self.sparse_seconds

    def __str__(self) -> str:
        """Return a summary in one line."""
        verdict = "would pay" if self.times_faster > 1.1 else "would not pay"
        return (
            f"sparse reduction {verdict}: {self.density:.1%} of the blocks are not zero in one "
            f"batch, {self.union_density:.1%} in all workers'; {self.dense_seconds * 1e3:.3g} ms "
            f"for dense gradients, {self.sparse_seconds * 1e3:.3g} ms for sparse ones"
        )


def report(
    model: nn.Module,
    data: Iterable[Any],
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    workers: int = 4,
    link_gbits: float = 1.0,
    block_size: int | None = None,
) -> Forecast:
    """Compute the gradients of a few batches, and estimate the time to send them.

    Clears the model's gradients. The batches update buffers, such as those of batch normalization,
    but no parameters.

    Args:
        model: The model, on the device where it trains.
        data: Batches. Each of the first `workers` batches stands for one rank.
        loss: `loss(model, batch)`. Default: `model(*batch)`.
        workers: Number of ranks that reduce, 2 or more.
        link_gbits: Rate of each rank's full-duplex link, Gbit/s, above 0.
        block_size: Number of elements of a block. Default: see `block_elements`.

    Raises:
        ValueError: there are fewer batches than workers, fewer than 2 workers, or
            `link_gbits` is not above 0.
    """
    if workers < 2:
        raise ValueError(f"workers={workers}: one alone sends nothing; take 2 or more")
    if not link_gbits > 0:
        raise ValueError(f"link_gbits={link_gbits}: take the link's Gbit/s, above 0")
    loss = loss if loss is not None else lambda model, batch: model(*batch)
    unions: dict[str, Tensor] = {}
    shares: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * workers)
    sizes: dict[str, int] = {}
    batches = 0
    for number, batch in zip(range(workers), data, strict=False):
        batches += 1
        model.zero_grad(set_to_none=True)
        loss(model, batch).backward()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or not parameter.numel():
                continue
            dense = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dense = dense.to_dense() if dense.is_sparse else dense
            size = block_size or block_elements(parameter)
            nonzero = BlockView(dense.reshape(-1), size).nonzero()
            unions[name] = unions[name] | nonzero if name in unions else nonzero
            shares[name][number] = float(nonzero.float().mean())
            sizes[name] = dense.nbytes
    model.zero_grad(set_to_none=True)
    if batches < workers:
        raise ValueError(
            f"data has {batches} batches for workers={workers}: give one for each, or the union "
            "of their blocks would seem smaller than it is"
        )
    total = sum(sizes.values())
    union_bytes = {name: sizes[name] * float(each.float().mean()) for name, each in unions.items()}
    bytes_per_second = link_gbits * 1e9 / 8
    ring = 2 * (workers - 1) / workers
    sent_bytes = 0.0
    for name, union in unions.items():
        most = max(shares[name])
        sent_bytes += min(ring * union_bytes[name], (workers - 1) * most * sizes[name])
        sent_bytes += min(ring * len(union) / 8, (workers - 1) * most * len(union) * NUMBER_BYTES)
    own_bytes = sum(size * sum(shares[name]) for name, size in sizes.items())
    return Forecast(
        density=own_bytes / batches / total,
        union_density=sum(union_bytes.values()) / total,
        dense_seconds=ring * total / bytes_per_second,
        sparse_seconds=sent_bytes / bytes_per_second,
        densities={name: sum(each) / batches for name, each in shares.items()},
    )
