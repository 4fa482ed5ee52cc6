"""Tensors of all types, sizes and densities to add up over ranks, and a model for DDP."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from support.cases.ranks import gathered

ROWS = 3000
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.int8, torch.uint8),
)
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-6, torch.float64: 1e-12}

Hook = Callable[[DistributedDataParallel], tuple[Any, Any]]
"""Makes a communication hook's state and function for a model."""


def drawn(seed: int, count: int, sizes: Sequence[int]) -> Iterator[tuple[str, Tensor, int]]:
    """Yield names, tensors of this rank, and block sizes. Ranks differ only in values."""
    same, rank = random.Random(seed), distributed.get_rank()
    for number in range(count):
        dtype, block = DTYPES[number % len(DTYPES)], same.choice(sizes)
        elements = same.choice([0, 1, block - 1, block, block + 1, 1000, 5000, 100_003])
        density, overlaps = same.choice([0, 0.01, 0.3, 1]), same.random() < 0.5
        mine = torch.Generator().manual_seed(number * 100 + rank)
        places = torch.Generator().manual_seed(number) if overlaps else mine
        keep = torch.rand(math.ceil(elements / block), generator=places) < density
        values = (torch.randn(elements, generator=mine) * 4).to(dtype)
        values[~keep.repeat_interleave(block)[:elements]] = 0
        if number % 10 == 0 and elements and dtype.is_floating_point:
            values[elements // 2] = math.nan if rank else math.inf
        yield f"{number}: {elements} {dtype} in blocks of {block} at {density}", values, block


def nonzero_blocks(values: Tensor, block: int) -> list[list[int]]:
    """Return the numbers of the nonzero blocks, by rank."""
    parts = values.split(block) if len(values) else ()
    return gathered([number for number, part in enumerate(parts) if bool((part != 0).any())])


def assert_sum(name: str, found: Tensor, dense: Tensor) -> None:
    """Require torch's sum, within the rounding of its type."""
    limit = TOLERANCE.get(found.dtype, 0)
    torch.testing.assert_close(
        found.double(), dense.double(), rtol=limit, atol=limit, equal_nan=True, msg=name
    )


class Model(nn.Module):
    """An embedding with a mostly zero gradient, and layers that only some steps use."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(ROWS, 16, sparse=sparse)
        self.unused = nn.Linear(16, 16)
        self.convolution = nn.Conv2d(1, 4, 3)
        weight = self.convolution.weight
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        self.head = nn.Linear(16, 1)

    def forward(self, rows: Tensor, *, uses_all: bool) -> Tensor:
        found = self.rows(rows)
        image = self.convolution(found.view(-1, 1, 4, 4)).mean()
        if uses_all:
            found = self.unused(found)
        loss: Tensor = self.head(found).square().mean() + image
        return loss


def trained(
    hook: Hook | None,
    *,
    sparse: bool = False,
    accumulate: int = 1,
    uneven: bool = False,
    steps: int = 6,
    **more: Any,
) -> tuple[Tensor, Any]:
    """Train in DDP; return the parameters in one tensor, and the hook's state.

    Args:
        hook: None for a dense all-reduce.
        uneven: each rank makes another number of steps, inside `join`.
        more: arguments of DistributedDataParallel.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(
        Model(sparse=sparse), find_unused_parameters=True, bucket_cap_mb=0.02, **more
    )
    made = hook(model) if hook is not None else None
    if made is not None:
        model.register_comm_hook(*made)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = distributed.get_rank()
    mine = torch.Generator().manual_seed(rank)
    with model.join() if uneven else nullcontext():
        for step in range(steps + (rank * 2 if uneven else 0)):
            optimizer.zero_grad()
            for number in range(accumulate):
                rows = torch.randint(0, ROWS, (4, 3), generator=mine)
                with nullcontext() if number == accumulate - 1 else model.no_sync():
                    model(rows, uses_all=step % 2 == 0).backward()
            optimizer.step()
    values = torch.cat([each.detach().reshape(-1) for each in model.module.parameters()])
    return values, made[0] if made is not None else None


@cache
def expected(**arguments: Any) -> Tensor:
    """Return the parameters that a dense all-reduce trains."""
    return trained(None, **arguments)[0]
