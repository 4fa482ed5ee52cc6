"""Noncontiguous tensors, summed by blocks and whole, with the memory around them."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from graphstash.training.reduce import AggregatedAllReduce, BlockSparseAllReduce, SparseState
from support.cases.ranks import assert_same_bits, error_of

SMALL: list[torch.dtype] = [torch.float8_e4m3fn, torch.float8_e5m2]

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda memory: memory[:40],
    "every second": lambda memory: memory[1::2],
    "a column": lambda memory: memory.view(-1, 10)[:, 3],
    "a row of a transposed one": lambda memory: memory.view(-1, 10).t()[7],
    "the diagonal": lambda memory: memory[:100].view(10, 10).diagonal(),
}
REFUSED: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.ones(1).expand(40),
    "transposed": lambda: torch.ones(4, 10).t(),
    "sparse": lambda: torch.ones(40).to_sparse(),
}


def memory_of(seed: int, *, is_sparse: bool) -> Tensor:
    values = torch.randn(200, generator=torch.Generator().manual_seed(seed))
    if is_sparse:
        values[10:] = 0
    return values


def call(reduce: Any, way: str, flat: Tensor, scale: float) -> None:
    if way == "whole":
        reduce.sum_whole_(flat)
    else:
        reduce.sum_(flat, scale=scale, dense_above={"dense": 0.0, "blocks": 1.0}[way])


def require_exact(reduce: Any, layout: str, way: str, *, is_sparse: bool) -> None:
    """Require the sum in the tensor, and no change in the memory beside it."""
    scale = 1.0 if way == "whole" else 0.5
    memory = memory_of(distributed.get_rank(), is_sparse=is_sparse)
    expected = memory.clone()
    of_ranks = [LAYOUTS[layout](memory_of(rank, is_sparse=is_sparse)) for rank in range(2)]
    LAYOUTS[layout](expected).copy_(of_ranks[0] * scale + of_ranks[1] * scale)
    call(reduce, way, LAYOUTS[layout](memory), scale)
    assert torch.equal(memory, expected), (layout, way, is_sparse)


def imaginary_part() -> Tensor:
    """Return a plain view on one rank, and on the other a view of conj(), with negated memory."""
    values = torch.view_as_complex(torch.arange(1.0, 9.0).view(4, 2))
    return (values.conj() if distributed.get_rank() else values).imag


def require_one_zero(reduce: Any, way: str) -> None:
    """Require one sign for blocks of zeros on both ranks, and the sums of all other elements."""
    flat = torch.zeros(40)
    if distributed.get_rank():
        flat.neg_()  # one rank has -0.0, and the other 0.0
    flat[8:16] = -0.0
    flat[8] = 1.0  # a block that both send
    flat[20] = float(distributed.get_rank())
    flat[24:28] = -0.0  # a block that neither sends
    call(reduce, way, flat, 1.0)
    expected = torch.zeros(40)
    expected[[8, 20]] = torch.tensor([2.0, 1.0])
    assert torch.equal(flat, expected)
    assert_same_bits(way, flat)


def refused_types() -> dict[str, list[str]]:
    """Return the errors for 8-bit floats, in a tensor and on the wire, by kind of sum."""
    results = {}
    with AggregatedAllReduce(block_size=4) as aggregated:
        for kind, reduce in (
            ("group", BlockSparseAllReduce(block_size=4)),
            ("through", aggregated),
        ):
            for way in ("blocks", "dense"):
                require_one_zero(reduce, way)
            results[kind] = [
                error_of(partial(method, values, wire_dtype=wire))
                for method in (reduce.sum_, reduce.sum_whole_)
                for values in (torch.ones(40), torch.zeros(40))  # ring and gather
                for wire in SMALL
            ] + [error_of(partial(reduce.sum_, torch.ones(40).to(small))) for small in SMALL]
    results["state"] = [error_of(partial(SparseState, wire_dtype=small)) for small in SMALL]
    return results


def refused_values() -> dict[str, list[str]]:
    """Return the errors for integers that process groups do not add, and for infinite factors."""
    group = BlockSparseAllReduce(block_size=4)
    of_one_rank = torch.eye(1, 400).flatten() * (distributed.get_rank() == 0)
    sparse = torch.sparse_coo_tensor(torch.zeros(3, 1), torch.ones(1), (3000, 3000, 3000))
    types = (torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64)
    with AggregatedAllReduce(block_size=4) as aggregated:
        return {
            "types": [
                error_of(partial(method, values.to(kind)))
                for kind in types
                for method in (group.sum_, group.sum_whole_)
                for values in (torch.ones(40), torch.eye(1, 400).flatten())  # ring and gather
            ],
            "scales": [
                error_of(partial(reduce.sum_, torch.ones(40), scale=scale))
                for reduce in (group, aggregated)
                for scale in (float("inf"), float("nan"))
            ],
            "fractions": [
                error_of(partial(reduce.sum_, of_one_rank.to(torch.int32), scale=0.5))
                for reduce in (group, aggregated)
            ]
            + [error_of(partial(group.sum_sparse, of_one_rank.int().to_sparse(), scale=0.5))],
            "small floats": [
                error_of(
                    partial(reduce.sum_, of_one_rank.neg().to(small), wire_dtype=torch.float16)
                )
                for small in SMALL
                for reduce in (group, aggregated)
            ],
            "places": [error_of(partial(group.sum_sparse, sparse))],
        }


def layouts() -> dict[str, dict[str, str]]:
    """Return the messages for tensors that cannot be summed in place, by kind of sum and name."""
    results = {}
    with AggregatedAllReduce(block_size=4) as aggregated:
        for kind, reduce in (
            ("group", BlockSparseAllReduce(block_size=4)),
            ("through", aggregated),
        ):
            for layout, way in itertools.product(LAYOUTS, ("blocks", "dense", "whole")):
                for is_sparse in (False, True):
                    require_exact(reduce, layout, way, is_sparse=is_sparse)
            parts = imaginary_part()
            call(reduce, "blocks", parts, 1.0)
            assert parts.tolist() == [0.0] * 4
            results[kind] = {
                name: error_of(partial(call, reduce, "blocks", made(), 1.0))
                for name, made in REFUSED.items()
            }
    return results
