"""Adds up tensors that are not contiguous, by blocks and whole; reports the memory around them."""

import argparse
import json
import os
from pathlib import Path

import torch
from torch import distributed

from graphstash.training.reduce import AggregatedAllReduce, BlockSparseAllReduce

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--on", choices=("gloo",))
parser.add_argument("--rank", type=int)
parser.add_argument("--world", type=int)
parser.add_argument("--rendezvous", type=Path)
options = parser.parse_args()

LAYOUTS = {
    "contiguous": lambda memory: memory[:40],
    "every second": lambda memory: memory[1::2],
    "a column": lambda memory: memory.view(-1, 10)[:, 3],
    "a row of a transposed one": lambda memory: memory.view(-1, 10).t()[7],
    "the diagonal": lambda memory: memory[:100].view(10, 10).diagonal(),
}


def memory_of(seed, *, is_sparse):
    values = torch.randn(200, generator=torch.Generator().manual_seed(seed))
    if is_sparse:
        values[10:] = 0
    return values


def call(reduce, name, flat, scale):
    if name == "whole":
        reduce.sum_whole_(flat)
    else:
        reduce.sum_(flat, scale=scale, dense_above={"dense": 0.0, "blocks": 1.0}[name])


def case(reduce, name, layout, *, is_sparse):
    """Whether all of the memory is what it should be: sums in the tensor, nothing new beside it."""
    scale = 1.0 if name == "whole" else 0.5
    memory = memory_of(options.rank, is_sparse=is_sparse)
    expected = memory.clone()
    of_ranks = [LAYOUTS[layout](memory_of(rank, is_sparse=is_sparse)) for rank in range(2)]
    LAYOUTS[layout](expected).copy_(of_ranks[0] * scale + of_ranks[1] * scale)
    call(reduce, name, LAYOUTS[layout](memory), scale)
    return torch.equal(memory, expected)


def imaginary_part():
    """On one rank a plain view, on the other a view of conj(), whose memory has other signs."""
    values = torch.view_as_complex(torch.arange(1.0, 9.0).view(4, 2))
    return (values.conj() if options.rank else values).imag


def refusal(reduce, tensor):
    try:
        reduce.sum_(tensor)
    except ValueError as error:
        return str(error)
    return None


distributed.init_process_group(
    "gloo",
    store=distributed.FileStore(str(options.rendezvous), options.world),
    rank=options.rank,
    world_size=options.world,
)
REFUSED = {
    "expanded": lambda: torch.ones(1).expand(40),
    "transposed": lambda: torch.ones(4, 10).t(),
    "sparse": lambda: torch.ones(40).to_sparse(),
}
report = {}
with AggregatedAllReduce(block_size=4) as aggregated:
    for kind, reduce in (("group", BlockSparseAllReduce(block_size=4)), ("through", aggregated)):
        for layout in LAYOUTS:
            for name in ("blocks", "dense", "whole"):
                for is_sparse in (False, True):
                    right = case(reduce, name, layout, is_sparse=is_sparse)
                    report[f"{kind}, {layout}, {name}, {is_sparse=}"] = right
        parts = imaginary_part()
        reduce.sum_(parts)
        report[f"{kind}, conjugated"] = parts.tolist() == [0.0] * 4
        report[f"{kind}, refused"] = {
            name: refusal(reduce, make()) for name, make in REFUSED.items()
        }
options.report.write_text(json.dumps(report))
distributed.barrier()
os._exit(0)
