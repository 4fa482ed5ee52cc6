"""Which addresses tensors use, and whether tensors overlap."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Extent", "extent_of", "overlapping"]


class Extent(NamedTuple):
    """The first address of a tensor's elements, and the address after the last."""

    first: int
    end: int


def extent_of(tensor: Tensor) -> Extent:
    """Return the addresses of a strided tensor on CPU or CUDA."""
    first = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return Extent(first, first + count * tensor.element_size())


def overlapping(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return a group of tensors in which two share an address, or an empty list if no two do.

    The tensors have the same dtype and device. Tensors may interleave without an overlap, such as
    two halves of the columns of a matrix.
    """
    found = [(extent_of(tensor), tensor) for tensor in tensors if tensor.numel()]
    chain: list[tuple[Extent, Tensor]] = []
    for extent, tensor in sorted(found, key=lambda each: each[0]):
        if chain and extent.first >= max(before.end for before, _ in chain):
            chain.clear()
        chain.append((extent, tensor))
        if len(chain) > 1 and _has_overlap(chain):
            return [tensor for _, tensor in chain]
    return []


def _has_overlap(chain: list[tuple[Extent, Tensor]]) -> bool:
    """Count the tensors at each address. The first tensor has the first address."""
    start = chain[0][0].first
    size = chain[0][1].element_size()
    counts = torch.zeros(
        -(-(max(extent.end for extent, _ in chain) - start) // size), dtype=torch.uint8
    )
    for extent, tensor in chain:
        place, misaligned = divmod(extent.first - start, size)
        if misaligned:
            return True
        counts.as_strided(tensor.shape, tensor.stride(), place).add_(1)
    return bool((counts > 1).any())
