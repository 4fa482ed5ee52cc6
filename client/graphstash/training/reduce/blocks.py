"""A flat tensor as blocks: find the nonzero blocks, pack them and write them back.

The last block (the tail) is shorter if the length is not a multiple of the block size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

__all__ = ["BlockView", "bits_of", "from_bits", "written_back"]

_CHUNK_ELEMENTS: Final = 512 * 1024
"""Elements to check at once on a CPU, so that their absolute values stay in its cache."""


@contextmanager
def written_back(flat: Tensor) -> Iterator[Tensor]:
    """Yield a contiguous tensor with the same values, and copy back what the caller writes to it.

    Collectives and numpy access memory. A strided tensor has other elements in between, and a
    `conj()` view has other values than its memory. Yields every other tensor itself.

    Raises:
        ValueError: the tensor does not have exactly one dimension, is sparse, or has several
            elements at one address.
    """
    if flat.layout is not torch.strided:
        raise ValueError(f"a tensor of layout {flat.layout}: give a dense one")
    if flat.dim() != 1:
        raise ValueError(
            f"a tensor of shape {tuple(flat.shape)}: give one dimension, such as .view(-1) of "
            "a contiguous one has"
        )
    if flat.stride(0) == 0 and len(flat) > 1:
        raise ValueError(
            "an expanded tensor, whose elements share one address: give a copy by .contiguous()"
        )
    here = flat.detach().resolve_conj().resolve_neg().contiguous()
    if here.data_ptr() == flat.data_ptr():
        yield flat
        return
    yield here
    flat.detach().copy_(here)


class BlockView:
    """A flat, contiguous tensor as blocks of `size` elements.

    Attributes:
        count: Number of blocks, including the tail.

    Raises:
        ValueError: the tensor does not have exactly one dimension, or is not contiguous.
    """

    def __init__(self, flat: Tensor, size: int) -> None:
        if flat.dim() != 1:
            raise ValueError(
                f"a tensor of shape {tuple(flat.shape)}: give one dimension, such as .view(-1) of "
                "a contiguous one has"
            )
        if not flat.is_contiguous():  # a collective would write the memory between them
            raise ValueError(
                f"a tensor of stride {flat.stride(0)}: give a contiguous one, such as a copy by "
                ".contiguous()"
            )
        flat = flat.detach()  # autograd forbids writing to a parameter in place
        whole = flat.numel() // size
        self.count = -(-flat.numel() // size)
        self._size = size
        self._whole = flat[: whole * size].view(whole, size)
        self._tail = flat[whole * size :]

    def nonzero(self) -> Tensor:
        """Return for each block whether it has a nonzero element, such as NaN."""
        result = torch.empty(self.count, dtype=torch.bool, device=self._tail.device)
        whole = len(self._whole)
        chunk_blocks = max(1, whole if self._tail.is_cuda else _CHUNK_ELEMENTS // self._size)
        pieces = torch.split(self._whole, chunk_blocks), torch.split(result[:whole], chunk_blocks)
        for blocks, out in zip(*pieces, strict=True):
            if blocks.is_floating_point():  # twice as fast as any(); amax() keeps NaN
                torch.ne(blocks.abs().amax(dim=1), 0, out=out)
            else:  # abs() of the smallest integer overflows
                torch.any(blocks.ne(0), dim=1, out=out)
        if whole < self.count:
            result[whole] = self._tail.ne(0).any()
        return result

    def norms(self) -> Tensor:
        """Return the Euclidean norm of each block, in fp32 or a wider type."""
        wide = torch.promote_types(self._tail.dtype, torch.float32)
        result = torch.empty(self.count, dtype=wide, device=self._tail.device)
        whole = len(self._whole)
        torch.linalg.vector_norm(self._whole, dim=1, dtype=wide, out=result[:whole])
        if whole < self.count:
            result[whole] = torch.linalg.vector_norm(self._tail, dtype=wide)
        return result

    def zero_(self, flags: Tensor) -> None:
        """Zero the blocks whose flag is set, in place."""
        whole = len(self._whole)
        self._whole.masked_fill_(flags[:whole].unsqueeze(1), 0)
        if whole < self.count:
            self._tail.masked_fill_(flags[whole], 0)

    def pack(self, chosen: Tensor) -> Tensor:
        """Return the chosen blocks one after the other in a new tensor.

        Args:
            chosen: Numbers of the blocks, int64, ascending.
        """
        ends_short = self._ends_with_tail(chosen)
        full = chosen[:-1] if ends_short else chosen
        elements = len(full) * self._size
        packed = self._tail.new_empty(elements + (len(self._tail) if ends_short else 0))
        torch.index_select(self._whole, 0, full, out=packed[:elements].view(len(full), self._size))
        packed[elements:] = self._tail if ends_short else self._tail[:0]
        return packed

    def unpack(self, chosen: Tensor, packed: Tensor) -> None:
        """Write packed blocks back, in place. The inverse of `pack`."""
        ends_short = self._ends_with_tail(chosen)
        full = chosen[:-1] if ends_short else chosen
        elements = len(full) * self._size
        self._whole.index_copy_(0, full, packed[:elements].view(len(full), self._size))
        if ends_short:
            self._tail.copy_(packed[elements:])

    def _ends_with_tail(self, chosen: Tensor) -> bool:
        return len(self._tail) > 0 and len(chosen) > 0 and int(chosen[-1]) == len(self._whole)


def bits_of(flags: Tensor) -> Tensor:
    """Pack booleans into uint8, eight per byte, and fill the last byte with zeros."""
    padded = flags.new_zeros(-(-len(flags) // 8) * 8)
    padded[: len(flags)] = flags
    return (padded.view(-1, 8) * _weights(flags)).sum(dim=1, dtype=torch.uint8)


def from_bits(bits: Tensor, count: int) -> Tensor:
    """Unpack `count` booleans. The inverse of `bits_of`."""
    return (bits.unsqueeze(1) & _weights(bits)).ne(0).flatten()[:count]


def _weights(like: Tensor) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=like.device)
