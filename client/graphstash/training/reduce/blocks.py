"""A flat tensor as blocks: divide it, find the nonzero blocks, pack them and write them back.

The last block of each part (the tail) is shorter if the part's length is not a multiple of the
block size.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "BLOCK_ELEMENTS",
    "MAX_GRIDS",
    "BlockGrid",
    "BlockLayout",
    "BlockView",
    "SparseRows",
    "bits_of",
    "block_elements",
    "from_bits",
    "layout_of",
    "written_back",
]

_CHUNK_ELEMENTS: Final = 512 * 1024
"""Elements to check closely at once on a CPU, so that they stay in its cache."""


BLOCK_ELEMENTS: Final = 256
"""Elements of a block by default, as in the OmniReduce paper: 1 KiB of fp32."""

_INTEGERS: Final = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
"""By floating-point type: integers of the same width."""

_GROUP_ELEMENTS: Final = 256
_MAX_GROUP_ROWS: Final = 64
"""Blocks to check together on a CPU: as many as have 256 elements, and at most 64."""

_SAMPLE_GROUPS: Final = 256

_TABLE_ROWS: Final = 1024
"""Minimum rows of a parameter whose blocks are its rows."""

_LARGE_BLOCKS: Final = 256
"""Minimum blocks of a parameter that starts with a block of its own. Each costs a few calls."""

MAX_GRIDS: Final = 8
"""Most sizes of blocks in one tensor. Each has a count in the first message of a sum."""


class BlockGrid(NamedTuple):
    """Parts of a flat tensor whose blocks have one size.

    Attributes:
        size: Elements of a block.
        parts: First element of each part, and the element after its last one, ascending. Each part
            starts with a new block.
    """

    size: int
    parts: tuple[tuple[int, int], ...]


BlockLayout: TypeAlias = tuple[BlockGrid, ...]
"""The division of a flat tensor into blocks: every element is in one part of one grid."""


def layout_of(parameters: Sequence[Tensor], size: int | None = None) -> BlockLayout:
    """Return a layout in which the blocks of a large parameter hold elements of no other parameter.

    The layout depends only on shapes and strides, which are equal on all ranks.

    Args:
        parameters: The parameters of a bucket, in the order of their gradients.
        size: Elements of a block. Default: `block_elements` of each parameter.
    """
    sizes = [block_elements(each) if size is None else size for each in parameters]
    elements = Counter[int]()
    for each, block in zip(parameters, sizes, strict=True):
        elements[block] += each.numel()
    del elements[BLOCK_ELEMENTS]
    kept = {block for block, _ in elements.most_common(MAX_GRIDS - 1)}
    grids: dict[int, list[tuple[int, int]]] = {}
    start, joined = 0, 0  # `joined` is the size of the small part that ends at `start`, or 0
    for each, wanted in zip(parameters, sizes, strict=True):
        if not (count := each.numel()):
            continue
        block = wanted if wanted in kept else BLOCK_ELEMENTS
        parts = grids.setdefault(block, [])
        is_small = count < _LARGE_BLOCKS * block
        if is_small and joined == block:
            parts[-1] = parts[-1][0], start + count
        else:
            parts.append((start, start + count))
        joined = block if is_small else 0
        start += count
    return tuple(BlockGrid(block, tuple(parts)) for block, parts in sorted(grids.items()))


def block_elements(parameter: Tensor) -> int:
    """Return the elements of a block of a parameter.

    A batch uses whole rows of an embedding's table. So if a parameter has two dimensions or more,
    and 1,024 rows or more, a block is one row. A row of more than 256 elements is divided evenly if
    possible. Other parameters have blocks of 256 elements.
    """
    rows = len(parameter) if parameter.dim() > 1 else 0
    row = parameter.numel() // rows if rows else 0
    if rows < _TABLE_ROWS or not row or parameter.stride(0) != row:
        return BLOCK_ELEMENTS
    pieces = -(-row // BLOCK_ELEMENTS)
    even = (row // number for number in range(pieces, 4 * pieces + 1) if row % number == 0)
    return next(even, row)


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


class _Part(NamedTuple):
    """Consecutive blocks: whole ones as rows, and a shorter tail, which may be empty."""

    rows: Tensor
    tail: Tensor
    first: int


class BlockView:
    """Parts of a flat, contiguous tensor as blocks of `size` elements; see `BlockGrid`.

    Attributes:
        count: Number of blocks, including the tails.
    """

    def __init__(
        self, flat: Tensor, size: int, *, parts: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Divide a tensor, or `parts` of it, into blocks. Default: the whole tensor."""
        flat = flat.detach()  # autograd forbids writing to a parameter in place
        self.size = size
        self.dtype = flat.dtype
        self._flat = flat
        self._parts: list[_Part] = []
        self.count = 0
        for start, end in ((0, len(flat)),) if parts is None else parts:
            part = flat[start:end]
            whole = len(part) // size
            rows, tail = part[: whole * size].view(whole, size), part[whole * size :]
            self._parts.append(_Part(rows, tail, self.count))
            self.count += whole + (len(tail) > 0)

    @cached_property
    def _edges(self) -> Tensor:
        """The first block and the tail of each part, and the number of blocks."""
        edges = [edge for part in self._parts for edge in (part.first, part.first + len(part.rows))]
        return torch.tensor([*edges, self.count], device=self._flat.device)

    def nonzero(self, *, one_zero: bool = False) -> Tensor:
        """Return for each block whether it has a nonzero element, such as NaN; -0.0 is zero.

        Args:
            one_zero: Whether to make each -0.0 a 0.0, in place, in blocks without a nonzero
                element. Blocks that no rank sends then have the same bits on all ranks.
        """
        result = torch.empty(self.count, dtype=torch.bool, device=self._flat.device)
        for rows, tail, first in self._parts:
            ends = first + len(rows)
            if len(rows):
                _find_nonzero(rows, result[first:ends], one_zero=one_zero)
            if len(tail):
                _find_nonzero(tail.unsqueeze(0), result[ends : ends + 1], one_zero=one_zero)
        return result

    def norms(self) -> Tensor:
        """Return the Euclidean norm of each block, in fp32 or a wider type."""
        wide = torch.promote_types(self._flat.dtype, torch.float32)
        result = torch.empty(self.count, dtype=wide, device=self._flat.device)
        for rows, tail, first in self._parts:
            whole = result[first : first + len(rows)]
            torch.linalg.vector_norm(rows, dim=1, dtype=wide, out=whole)
            if len(tail):
                result[first + len(rows)] = torch.linalg.vector_norm(tail, dtype=wide)
        return result

    def zero_(self, flags: Tensor) -> None:
        """Zero the blocks whose flag is set, in place."""
        for rows, tail, first in self._parts:
            rows.masked_fill_(flags[first : first + len(rows)].unsqueeze(1), 0)
            if len(tail):
                tail.masked_fill_(flags[first + len(rows)], 0)

    def pack(self, chosen: Tensor) -> Tensor:
        """Return the chosen blocks one after the other in a new tensor.

        `chosen` are numbers of blocks, int64, ascending.
        """
        packed = self._flat.new_empty(len(chosen) * self.size)
        length = 0
        for rows, numbers, tail in self._chosen(chosen):
            tail_starts = length + len(numbers) * self.size
            out = packed[length:tail_starts].view(-1, self.size)
            torch.index_select(rows, 0, numbers, out=out)
            length = tail_starts + len(tail)
            packed[tail_starts:length] = tail
        return packed[:length]

    def unpack(self, chosen: Tensor, packed: Tensor) -> None:
        """Write packed blocks back, in place. The inverse of `pack`."""
        for rows, numbers, tail, values, tail_values in self._beside(chosen, packed):
            rows.index_copy_(0, numbers, values)
            tail.copy_(tail_values)

    def add(self, chosen: Tensor, packed: Tensor) -> None:
        """Add packed blocks, in place."""
        for rows, numbers, tail, values, tail_values in self._beside(chosen, packed):
            rows.index_copy_(0, numbers, rows.index_select(0, numbers).add_(values))
            tail.add_(tail_values)

    def elements(self, chosen: Tensor) -> int:
        """Return the number of elements in the chosen blocks."""
        found = self._chosen(chosen)
        return sum(len(numbers) * self.size + len(tail) for _, numbers, tail in found)

    def clear(self, chosen: Tensor) -> None:
        """Zero the chosen blocks, in place."""
        for rows, numbers, tail in self._chosen(chosen):
            rows.index_fill_(0, numbers, 0)
            tail.zero_()

    def _chosen(self, chosen: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield rows, numbers of the chosen rows, and tail of each part with a chosen block.

        The tail is empty if it is not chosen.
        """
        if len(self._parts) == 1 and not len(self._parts[0].tail):  # needs no search
            if len(chosen):
                yield self._parts[0].rows, chosen, self._parts[0].tail
            return
        places = torch.searchsorted(chosen, self._edges).tolist()
        for number, (rows, tail, first) in enumerate(self._parts):
            starts, tail_starts, ends = places[2 * number : 2 * number + 3]
            if starts < ends:
                in_tail = tail if tail_starts < ends else tail[:0]
                yield rows, chosen[starts:tail_starts] - first, in_tail

    def _beside(
        self, chosen: Tensor, packed: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """Yield what `_chosen` yields, and the packed values of the rows and of the tail."""
        length = 0
        for rows, numbers, tail in self._chosen(chosen):
            tail_starts = length + len(numbers) * self.size
            values = packed[length:tail_starts].view(-1, self.size)
            length = tail_starts + len(tail)
            yield rows, numbers, tail, values, packed[tail_starts:length]


def _find_nonzero(blocks: Tensor, out: Tensor, *, one_zero: bool) -> None:
    """Write for each row whether it has a nonzero element; see `BlockView.nonzero`.

    On a CPU, the highest byte of a group of rows shows whether any bit is set, in one pass over
    memory. If most groups of a sample have no bit set, only rows of groups with bits are compared.
    """
    if blocks.is_complex():
        blocks = torch.view_as_real(blocks).flatten(1)
    elif blocks.dtype not in _INTEGERS:
        blocks = blocks.view(torch.uint8)  # torch does not index 8-bit floats or torch.uint16
    size = blocks.shape[1]
    if blocks.is_cuda:
        _find_in_rows(blocks, out, one_zero=one_zero)
        return
    joined = min(max(1, _GROUP_ELEMENTS // size), _MAX_GROUP_ROWS)
    grouped = len(blocks) // joined * joined
    groups, flags = blocks[:grouped].view(-1, joined * size), out[:grouped].view(-1, joined)
    sample = groups[:: len(groups) // _SAMPLE_GROUPS or 1]
    if 2 * len(_with_bits(sample)) <= len(sample):
        flags.zero_()
        chosen = _with_bits(groups)
        for some in torch.split(chosen, max(1, _CHUNK_ELEMENTS // (joined * size))):
            rows, found = groups[some].view(-1, size), flags[some].flatten()
            if _find_in_rows(rows, found, one_zero=one_zero):
                groups[some] = rows.view(len(some), -1)
            flags[some] = found.view(-1, joined)
        blocks, out = blocks[grouped:], out[grouped:]
    if len(blocks):
        piece = max(1, _CHUNK_ELEMENTS // size)
        for rows, found in zip(torch.split(blocks, piece), torch.split(out, piece), strict=True):
            _find_in_rows(rows, found, one_zero=one_zero)


def _with_bits(groups: Tensor) -> Tensor:
    """Return the numbers of the rows in which a bit is set."""
    return groups.view(torch.uint8).amax(dim=1).nonzero().flatten()


def _find_in_rows(blocks: Tensor, out: Tensor, *, one_zero: bool) -> bool:
    """Write for each row whether it has a nonzero element. Return whether a row was changed."""
    if (kind := _INTEGERS.get(blocks.dtype)) is None:
        torch.gt(blocks.amax(dim=1), 0, out=out)
        return False
    # The bits as integers, which is faster than abs(). -0.0 has the bits of the smallest integer.
    bits = blocks.view(kind)
    least = torch.iinfo(kind).min
    low, high = bits.aminmax(dim=1) if kind is torch.int64 else (bits.amin(dim=1), bits.amax(dim=1))
    torch.logical_or(high > 0, (low < 0) & (low > least), out=out)
    unclear = ((low == least) & ~out).nonzero().flatten()
    if not len(unclear):
        return False
    found = blocks.index_select(0, unclear).ne(0).any(dim=1)
    out[unclear] = found
    if one_zero:
        blocks.index_fill_(0, unclear[~found], 0)
    return one_zero


class SparseRows:
    """The rows of a table that a sparse gradient has, as blocks: a row is a block.

    Attributes:
        count: Rows of the table.
        size: Elements of a row.
        own: Numbers of the rows of this rank's gradient, int64, ascending. Its rows of zeros are
            sent as well, because optimizers such as SparseAdam update them.
        union: Numbers of the rows of all ranks, after the sum.
        sums: Their sums, [rows, size].
    """

    def __init__(self, own: Tensor, values: Tensor, *, count: int) -> None:
        self.own, self._values = own, values
        self.count, self.size, self.dtype = count, values.shape[1], values.dtype
        self.union, self.sums = own[:0], values[:0]

    def pack(self, chosen: Tensor) -> Tensor:
        """Return the chosen rows one after the other; zeros for rows that the gradient lacks."""
        packed = self._values.new_zeros(len(chosen), self.size)
        places = torch.searchsorted(chosen, self.own)
        has = torch.isin(self.own, chosen, assume_unique=True)
        return packed.index_copy_(0, places[has], self._values[has]).flatten()

    def unpack(self, chosen: Tensor, packed: Tensor) -> None:
        """Append sums of rows, which follow the rows so far."""
        self.union = torch.cat([self.union, chosen])
        self.sums = torch.cat([self.sums, packed.view(-1, self.size)])

    def clear(self, chosen: Tensor) -> None:
        """Make the sums of the chosen rows zeros."""
        self.union, self.sums = chosen, self._values.new_zeros(len(chosen), self.size)

    def add(self, chosen: Tensor, packed: Tensor) -> None:
        """Add rows to their sums."""
        places = torch.searchsorted(self.union, chosen)
        values = packed[: len(chosen) * self.size].view(-1, self.size)
        self.sums.index_copy_(0, places, self.sums.index_select(0, places).add_(values))

    def elements(self, chosen: Tensor) -> int:
        """Return the number of elements in the chosen rows."""
        return len(chosen) * self.size


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
