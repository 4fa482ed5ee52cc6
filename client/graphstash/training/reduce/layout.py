"""How the gradients of a bucket are divided into blocks."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from torch import Tensor

__all__ = ["BLOCK_ELEMENTS", "BlockLayout", "layout_of"]

BLOCK_ELEMENTS: Final = 256
"""Elements of a block by default, as in the OmniReduce paper: 1 KiB of fp32."""

_MIN_ELEMENTS: Final = 16
_TABLE_ROWS: Final = 1024
"""Minimum rows of a parameter whose rows decide about the size of the blocks."""

_LARGE_BLOCKS: Final = 256
"""Minimum blocks of a parameter that starts with a block of its own. Each costs a few calls."""


class BlockLayout(NamedTuple):
    """The division of a flat tensor into blocks.

    Attributes:
        size: Elements of a block.
        parts: Lengths of the parts. Each part starts with a new block. If there are none, the
            whole tensor is one part.
    """

    size: int
    parts: tuple[int, ...] = ()


def layout_of(parameters: Sequence[Tensor], size: int | None = None) -> BlockLayout:
    """Return a layout in which the blocks of large parameters hold elements of no other parameter.

    Args:
        parameters: The parameters of a bucket, in the order of their gradients.
        size: Elements of a block. By default, it depends on the largest parameter. If that has
            1,024 rows or more, such as the table of an embedding, a block is one row, because a
            batch uses whole rows. A row of more than 256 elements is divided evenly if possible,
            and rows of fewer than 16 elements are joined. Otherwise, a block has 256 elements.
    """
    if size is None:
        size = _row_elements(max(parameters, key=Tensor.numel))
    parts: list[int] = []
    was_small = False
    for elements in map(Tensor.numel, parameters):
        is_small = elements < _LARGE_BLOCKS * size
        if is_small and was_small:
            parts[-1] += elements
        else:
            parts.append(elements)
        was_small = is_small
    return BlockLayout(size, tuple(parts))


def _row_elements(table: Tensor) -> int:
    if table.dim() < 2 or len(table) < _TABLE_ROWS or not table.numel():
        return BLOCK_ELEMENTS
    row = table.numel() // len(table)
    if row < _MIN_ELEMENTS:
        return row * -(-_MIN_ELEMENTS // row)
    pieces = -(-row // BLOCK_ELEMENTS)
    even = (row // number for number in range(pieces, 4 * pieces + 1) if row % number == 0)
    return next(even, BLOCK_ELEMENTS)
