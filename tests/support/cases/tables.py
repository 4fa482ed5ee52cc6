"""Gradients of models with tables of several widths, by blocks and by torch's own reduction."""

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from graphstash.training.reduce import BlockSparseAllReduce, SparseState, sparse_hook
from graphstash.training.reduce.blocks import layout_of
from support.cases.ranks import assert_same_bits, gathered
from support.cases.reduce import Counted

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-14}


class Tables(nn.Module):
    """Tables behind parameters of odd sizes. A batch uses a few rows of each table."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.randn(65))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.biases = nn.Parameter(torch.randn(5000))
        self.tables = nn.ModuleList(
            nn.Embedding(rows, width, sparse=sparse)
            for rows, width in ((2000, 64), (1500, 24), (3000, 1), (1024, 1021), (40, 8))
        )
        self.sometimes = nn.Linear(64, 64)
        self.never = nn.Parameter(torch.randn(300, 7))

    def forward(self, rows: Tensor, *, uses_all: bool) -> Tensor:
        wide = self.tables[0](rows)
        if uses_all:
            wide = self.sometimes(wide)
        loss = wide.square().mean() + self.odd.square().sum() * 0.01 + self.empty.sum()
        for table in self.tables[1:]:
            loss = loss + table(rows % table.num_embeddings).square().mean()
        found: Tensor = loss + self.biases[rows].square().mean()
        return found


def rows_of(step: int) -> Tensor:
    """Return rows of this rank: fewer on later ranks, and some of all ranks."""
    rank = distributed.get_rank()
    mine = torch.Generator().manual_seed(10 * step + rank)
    return torch.cat([torch.arange(4), torch.randint(0, 1000, (40 >> rank,), generator=mine)])


def gradients(
    *,
    hook: bool,
    sparse: bool = False,
    dtype: torch.dtype = torch.float32,
    accumulate: int = 1,
    static_graph: bool = False,
    through_views: bool = False,
) -> list[Tensor]:
    """Return the gradients of five steps, in which DDP arranges its buckets again."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        Tables(sparse=sparse).to(dtype),
        find_unused_parameters=not static_graph,
        static_graph=static_graph,
        gradient_as_bucket_view=through_views,
        bucket_cap_mb=0.5,
    )
    state = SparseState() if hook else None
    if state is not None:
        model.register_comm_hook(state, sparse_hook)
    found = []
    for step in range(5):
        model.zero_grad()
        for part in range(accumulate - 1):
            with model.no_sync():
                model(rows_of(step + 7 * part), uses_all=True).backward()
        model(rows_of(step), uses_all=static_graph or step % 2 == 0).backward()
        each = [parameter.grad for parameter in model.parameters()]
        dense = [grad.to_dense() for grad in each if grad is not None]
        found.append(torch.cat([grad.reshape(-1) for grad in dense]))
    if state is not None:
        state.close()
    return found


def equal_torch(*, dtype: str = "float32", **arguments: Any) -> None:
    """Require torch's gradients: to the bit for one or two ranks, whose sums have one order."""
    kind = getattr(torch, dtype)
    expected = gradients(hook=False, dtype=kind, **arguments)
    found = gradients(hook=True, dtype=kind, **arguments)
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(f"step {step}", one)
        if distributed.get_world_size() <= 2:
            assert torch.equal(one, other), step
        else:
            limit = TOLERANCE[kind]
            torch.testing.assert_close(one, other, rtol=limit, atol=limit)


def bytes_of_rows() -> None:
    """Require that blocks are the rows that ranks use, and at most 1.2 times torch's bytes."""
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    odd, narrow, wide = torch.zeros(65), torch.zeros(50_000, 3), torch.zeros(20_000, 64)
    used = torch.randperm(20_000, generator=torch.Generator().manual_seed(rank))[: 512 >> rank]
    narrow[2 * used], wide[used] = 1.0, 1.0
    parameters = [odd, wide, odd, narrow]
    flat = torch.cat([each.view(-1) for each in parameters])
    reduce = BlockSparseAllReduce()
    with Counted() as counted:
        sent = reduce.sum_(flat, layout=layout_of(parameters))
    union = len({row for each in gathered(used.tolist()) for row in each})
    assert (sent.own_blocks, sent.union_blocks) == (2 * len(used), 2 * union)
    assert sent.bitmap_bytes + sent.block_bytes == counted.bytes
    coo = 512 * (64 * 4 + 8) + 512 * (3 * 4 + 8)  # padded to the most rows of a rank
    assert counted.bytes < 1.2 * coo * ranks / 2


def small_sums_take_one_round() -> None:
    """Require one collective for small sums, and two for numbers that fit beside no blocks."""
    reduce, rank = BlockSparseAllReduce(block_size=64), distributed.get_rank()
    for rows, calls in ((1, 1), (12, 1), (400, 2)):
        flat = torch.zeros(5000, 64)
        flat[rank : rank + rows] = 1.0
        with Counted() as counted:
            reduce.sum_(flat.view(-1))
        assert counted.calls == calls, rows
        assert float(flat.sum()) == 64 * rows * distributed.get_world_size()
