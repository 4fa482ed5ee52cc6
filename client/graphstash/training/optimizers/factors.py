"""Factors: the square matrices that precondition a tensor, one for each of its dimensions.

The statistics of a gradient G of shape [d1, ..., dn] are n matrices. The matrix of dimension i has
the shape [di, di]: it is the product of G with itself over all other dimensions. Preconditioning
multiplies G along each dimension i by another matrix of shape [di, di]. One flat tensor stores all
statistics of a parameter, and another one its preconditioning matrices.

Dimensions that are too large are split into blocks with their own matrices, or have no matrix.
Small neighboring dimensions may be merged. Both follow Anil et al., "Scalable Second Order
Optimization for Deep Learning", 2020, arXiv 2002.09018.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Blocking", "Factors", "factors_of"]


class Blocking(NamedTuple):
    """How tensors are split into blocks."""

    max_dim: int
    """Maximum number of rows of a matrix."""
    splits: bool
    """Whether larger dimensions are split. If not, they have no matrix."""
    merges: bool
    """Whether neighboring dimensions are merged up to a product of `max_dim`."""
    one_dimensional: bool
    """Whether tensors of one dimension have a matrix."""


class Factors:
    """The matrices of tensors of one shape.

    Attributes:
        shape: shape of the tensor after merging.
        dimensions: dimensions that have a matrix, the same in every block.
        numel: number of elements of all matrices; 0 if there is no matrix.
        rows: number of rows of all matrices.
    """

    def __init__(self, shape: Sequence[int], blocking: Blocking) -> None:
        limit = blocking.max_dim
        self.shape = _merged(shape, limit) if blocking.merges else tuple(shape)
        has_any = math.prod(shape) > 0 and len(shape) > (0 if blocking.one_dimensional else 1)
        step = limit if blocking.splits else max(self.shape, default=1) or 1
        self._blocks = list(
            product(*([slice(n, n + step) for n in range(0, d, step)] for d in self.shape))
        )
        self._sizes = [
            [
                length if has_any and (length := min(cut.stop, d) - cut.start) <= limit else 0
                for cut, d in zip(block, self.shape, strict=True)
            ]
            for block in self._blocks
        ]
        self._lengths = [size * size for sizes in self._sizes for size in sizes]
        first = self._sizes[0] if has_any else []
        self.dimensions = [number for number, size in enumerate(first) if size]
        self.numel = sum(self._lengths)
        self.rows = sum(map(sum, self._sizes))

    def matrices(self, flat: Tensor) -> list[list[Tensor | None]]:
        """Return views of `flat` by block and dimension; None for a dimension without a matrix."""
        parts = iter(torch.split(flat, self._lengths))
        return [
            [part.view(size, size) if size else None for size, part in zip(sizes, parts)]  # noqa: B905 - `parts` continues with the next block
            for sizes in self._sizes
        ]

    def identity(self, like: Tensor) -> Tensor:
        """Return flat identity matrices, with the device and dtype of `like`."""
        sizes = [size for sizes in self._sizes for size in sizes]
        eyes = [torch.eye(size, dtype=like.dtype, device=like.device).flatten() for size in sizes]
        return torch.cat(eyes) if eyes else like.new_zeros(0)

    def statistics(self, gradient: Tensor) -> list[Tensor]:
        """Return the statistics of a gradient: the matrices that exist, in the order of `flat`."""
        products = []
        for part, sizes in zip(self._parts(gradient), self._sizes, strict=True):
            for dimension, size in enumerate(sizes):
                if size:
                    others = [n for n in range(part.dim()) if n != dimension]
                    products.append(torch.tensordot(part, part, dims=(others, others)))
        return products

    def apply(self, flat: Tensor, tensor: Tensor, *, transposed: bool = False) -> Tensor:
        """Multiply a tensor along each dimension by its matrix, or by the transposed matrix."""
        if not self.numel:
            return tensor
        results = []
        for part, matrices in zip(self._parts(tensor), self.matrices(flat), strict=True):
            turned = part
            for matrix in matrices:  # each pass takes the first dimension and puts it last
                turned = (
                    turned.movedim(0, -1)
                    if matrix is None
                    else torch.tensordot(turned, matrix, dims=([0], [int(transposed)]))
                )
            results.append(turned)
        if len(results) == 1:
            return results[0].reshape(tensor.shape)
        whole = tensor.new_empty(self.shape)
        for block, result in zip(self._blocks, results, strict=True):
            whole[block] = result
        return whole.reshape(tensor.shape)

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        whole = tensor.reshape(self.shape)
        return [whole[block] for block in self._blocks]


@lru_cache(maxsize=4096)
def factors_of(shape: torch.Size, blocking: Blocking) -> Factors:
    """Return the `Factors` of a shape, from a cache."""
    return Factors(shape, blocking)


def _merged(shape: Sequence[int], limit: int) -> tuple[int, ...]:
    merged = [1]
    for size in shape:
        if merged[-1] * size <= limit:
            merged[-1] *= size
        else:
            merged.append(size)
    return tuple(merged[1:] if merged[0] == 1 and len(merged) > 1 else merged)
