"""The block-sparse all-reduce: agree on the blocks that are not zero on some rank, and sum these.

    opening -- GATHER of up to 16 KiB -->  whether all ranks make the same call, their numbers of
                                           blocks, and what else fits (`opening.py`)
    union   -- OR of a bit per block, or GATHER of the numbers of blocks: only if the numbers did
               not fit
    blocks  -- SUM of the union's blocks, or GATHER of each rank's own blocks

A grid is all blocks of one size, such as the rows of tables of one width. Each grid takes the
cheaper way for its union and for its blocks. For N ranks with at most m blocks and a union of u, a
ring sends 2(N-1)/N u blocks one after another in 2(N-1) messages, and a gather (N-1) m blocks in
N-1 messages. A message counts as 4 KiB. The choice depends only on values that all ranks have, and
not on earlier calls.

Blocks outside the union are never sent: they are zero on all ranks, and so are their sums. -0.0
counts as zero, or gradients under a mask would be sent whole: a negative number times 0 is -0.0.
Where a dense all-reduce would give -0.0, because all ranks have it, the sum may be 0.0 instead.

The blocks travel in slots (`slots.py`), and every rank gets the same bits.
"""

import math
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor, distributed

from graphstash.errors import ConfigError
from graphstash.training.lent import Lent
from graphstash.training.reduce.agreement import require_floats, require_same, require_scale
from graphstash.training.reduce.blocks import (
    BLOCK_ELEMENTS,
    MAX_GRIDS,
    BlockGrid,
    BlockLayout,
    BlockView,
    SparseRows,
    bits_of,
    from_bits,
    written_back,
)
from graphstash.training.reduce.opening import MAX_NUMBER, NUMBER_BYTES, Opening
from graphstash.training.reduce.slots import Blocks, Slots, Union, Wire, gathers, pad, send

__all__ = ["BlockSparseAllReduce", "Sent"]

_NOT_ADDED: Final = (torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64)
"""Types that gloo and NCCL do not add. gloo adds the bytes of bools, and stores a 2 or more."""


class Sent(NamedTuple):
    """What one all-reduce sent, and how long it took.

    Bytes are those of a ring all-reduce that would send as much: of N ranks, a ring sends each byte
    2(N-1)/N times and a gather N-1 times, so gathered bytes count N/2 times.

    Attributes:
        blocks: Blocks of the tensor; 0 if it was sent whole without checking its blocks.
        own_blocks: Blocks that were nonzero on this rank.
        union_blocks: Blocks that were nonzero on at least one rank.
        bitmap_bytes: Bytes sent to agree on the blocks, and small blocks beside them; with
            aggregators, all bytes except the blocks.
        block_bytes: Bytes of the blocks that were sent.
        dense_bytes: Bytes of the whole tensor.
        density: Share of the elements that are in `own_blocks`, 0 to 1.
        union_density: Share of the elements that are in `union_blocks`, 0 to 1.
        pack_seconds: Time to find the nonzero blocks and pack them.
        send_seconds: Time spent waiting for the process group or the aggregators.
        unpack_seconds: Time to write the sums back.
    """

    blocks: int
    own_blocks: int
    union_blocks: int
    bitmap_bytes: int
    block_bytes: int
    dense_bytes: int
    density: float = 0.0
    union_density: float = 0.0
    pack_seconds: float = 0.0
    send_seconds: float = 0.0
    unpack_seconds: float = 0.0

    @classmethod
    def whole(cls, flat: Tensor, sent_bytes: int) -> Self:
        """Return the record of a tensor that was sent without checking its blocks."""
        return cls(0, 0, 0, 0, sent_bytes, flat.nbytes)


class BlockSparseAllReduce:
    """Sums tensors over the ranks of a process group.

    Every rank makes the same calls in the same order, from one thread at a time. Other
    collectives of the ranks need another process group.
    """

    def __init__(
        self, group: distributed.ProcessGroup | None = None, *, block_size: int = BLOCK_ELEMENTS
    ) -> None:
        """Take a process group and a block size.

        Args:
            group: Process group of the ranks. Default: the default group.
            block_size: Elements of a block, 1 or more. Smaller blocks send fewer zeros and take
                longer to pack.

        Raises:
            ValueError: `block_size` is below 1.
        """
        if block_size < 1:
            raise ValueError(f"a block of {block_size} elements: take 1 or more, 256 is usual")
        self.group: Any = group if group is not None else distributed.group.WORLD
        self.block_size = block_size

    def sum_(
        self,
        flat: Tensor,
        *,
        scale: float = 1.0,
        wire_dtype: torch.dtype | None = None,
        dense_above: float = 1.0,
        layout: BlockLayout | None = None,
    ) -> Sent:
        """Sum a tensor over all ranks, in place.

        Args:
            flat: A tensor of one dimension with the same shape and type on all ranks: integers
                (uint8, int8, int32, int64), complex, or floats of 16 to 64 bits. A strided
                tensor is summed through a copy. -0.0 counts as zero, and a sum of -0.0 may become
                0.0, with the same bits on all ranks.
            scale: Finite factor by which every element is multiplied before it is sent.
            wire_dtype: Type in which elements are sent. Default: their own type.
            dense_above: Share of elements in the union's blocks above which the tensor is sent
                whole.
            layout: Division into blocks, of at most eight sizes. Default: blocks of `block_size`
                elements.

        Raises:
            ValueError: the tensor does not have exactly one dimension, is sparse, or has several
                elements at one address; or the layout is of another tensor, or has more sizes.
            ConfigError: the ranks have different tensors or arguments (raised on every rank), or
                `wire_dtype` differs from the tensor's type and one of them is not a float type; or
                elements would be sent as a type that process groups do not add; or `scale` is
                infinite or NaN.
            RuntimeError: a rank is gone.
        """
        if layout is None:
            layout = (BlockGrid(self.block_size, ((0, len(flat)),)),) if flat.dim() == 1 else ()
        with written_back(flat) as contiguous:
            _require_division(layout, len(contiguous))
            return self._sum(contiguous, scale, wire_dtype, dense_above, layout)

    def _sum(
        self,
        flat: Tensor,
        scale: float,
        wire_dtype: torch.dtype | None,
        dense_above: float,
        layout: BlockLayout,
    ) -> Sent:
        began = time.perf_counter()
        views = [BlockView(flat, size, parts=parts) for size, parts in layout]
        own = [view.nonzero(one_zero=True).nonzero().flatten() for view in views]
        return self._exchange(
            f"{flat.numel()} {flat.dtype} in blocks of {_named(layout, len(flat))}, "
            f"{scale=}, {wire_dtype=}, {dense_above=}",
            views,
            own,
            flat,
            wire=Wire(scale, wire_dtype),
            limit=dense_above,
            began=began,
        )

    def sum_sparse(
        self, values: Tensor, *, scale: float = 1.0, wire_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Sent]:
        """Return the sum of a sparse tensor (COO) over all ranks, coalesced, and what was sent.

        The sum has each row that some rank has, including rows of zeros.

        Args:
            values: A tensor with the same shape and type on all ranks; see `sum_`.
            scale: Finite factor by which every element is multiplied before it is sent.
            wire_dtype: Type in which elements are sent. Default: their own type.

        Raises:
            ConfigError: see `sum_`.
            RuntimeError: a rank is gone.
        """
        began = time.perf_counter()
        values = values.detach().coalesce()
        shape, sparse_dims = values.shape, values.sparse_dim()
        places = values.indices()
        numbers = places[0]
        for dim in range(1, sparse_dims):
            numbers = numbers * shape[dim] + places[dim]
        elements = values.values().reshape(len(numbers), shape[sparse_dims:].numel())
        rows = SparseRows(numbers, elements, count=shape[:sparse_dims].numel())
        sent = self._exchange(
            f"sparse {tuple(shape)} {values.dtype}, {sparse_dims=}, {scale=}, {wire_dtype=}",
            [rows],
            [numbers],
            values,
            wire=Wire(scale, wire_dtype),
            limit=math.inf,
            began=began,
        )
        sums = rows.sums.view(len(rows.union), *shape[sparse_dims:])
        indices = [rows.union]
        for dim in range(sparse_dims - 1, 0, -1):  # torch.unravel_index imports sympy, in seconds
            indices[:1] = indices[0] // shape[dim], indices[0] % shape[dim]
        return torch.sparse_coo_tensor(torch.stack(indices), sums, shape, is_coalesced=True), sent

    def sum_whole_(self, flat: Tensor, *, wire_dtype: torch.dtype | None = None) -> int:
        """Sum a tensor in place, including its zeros, and return how many bytes were sent.

        Raises:
            ConfigError: see `sum_`.
        """
        _require_added(flat.dtype, wire_dtype)
        with written_back(flat) as contiguous:
            wire = contiguous if wire_dtype is None else contiguous.to(wire_dtype)
            with Lent(wire):
                distributed.all_reduce(wire, group=self.group)
            if wire is not contiguous:
                contiguous.copy_(wire)
        return wire.nbytes

    def _exchange(
        self,
        call: str,
        views: Sequence[Blocks],
        own: Sequence[Tensor],
        values: Tensor,
        *,
        wire: Wire,
        limit: float,
        began: float,
    ) -> Sent:
        """Sum the blocks of `values`, or the whole tensor if the union has a larger share of its
        elements than `limit`.
        """
        scanned = time.perf_counter()
        refusal = _refusal_of(values, wire)
        slots = [Slots(self.group, view, wire) for view in views]
        opening = Opening(
            self.group,
            call,
            own,
            [each.form for each in slots],
            [] if refusal else [each.packed for each in slots],
            device=values.device,
        )
        if not opening.is_same:
            require_same(
                self.group,
                call,
                wrong="the ranks want to add up different tensors",
                advice="build the same model with the same settings of the hook on each, and add "
                "up in the same order",
            )
        if refusal:
            raise refusal
        unions = [
            self._union(opening, grid, each.blocks.count, own[grid])
            for grid, each in enumerate(slots)
        ]
        agreed = time.perf_counter()
        elements = values.numel()
        in_own = sum(view.elements(each) for view, each in zip(views, own, strict=True))
        in_union = sum(
            view.elements(each.numbers) for view, each in zip(views, unions, strict=True)
        )
        pack = waited = unpack = 0.0
        if in_union > limit * elements:
            whole = Wire(wire.scale, None).of(values)
            block_bytes = self.sum_whole_(whole, wire_dtype=wire.dtype)
            waited = time.perf_counter() - agreed
        else:
            sending = [
                each.sent(opening, grid, own[grid], unions[grid]) for grid, each in enumerate(slots)
            ]
            block_bytes, pack, waited, unpack = send(chain.from_iterable(sending))
        return Sent(
            sum(view.count for view in views),
            sum(map(len, own)),
            sum(len(union.numbers) for union in unions),
            opening.nbytes + sum(union.nbytes for union in unions),
            block_bytes,
            elements * values.dtype.itemsize,
            in_own / (elements or 1),
            in_union / (elements or 1),
            scanned - began + pack,
            agreed - scanned + waited,
            unpack,
        )

    def _union(self, opening: Opening, grid: int, blocks: int, own: Tensor) -> Union:
        """Return the numbers of the blocks of a grid that some rank has."""
        by_rank = opening.numbers(grid)
        if by_rank is not None:
            return Union(torch.cat(by_rank).unique(), by_rank, 0)
        counts = opening.counts(grid)
        ranks, most = len(counts), max(counts)
        # NCCL has no OR, so it sends a byte per block.
        flag_bytes = blocks if own.is_cuda else -(-blocks // 8)
        if gathers(ranks, most * NUMBER_BYTES, flag_bytes) and blocks < MAX_NUMBER:
            numbers = pad(own, most)
            received = numbers.new_empty(ranks * most)
            with Lent(received, numbers):
                distributed.all_gather_into_tensor(received, numbers, group=self.group)
            rows = received.view(ranks, most).long()
            by_rank = [row[:count] for row, count in zip(rows, counts, strict=True)]
            return Union(torch.cat(by_rank).unique(), by_rank, ranks * numbers.nbytes // 2)
        flags = own.new_zeros(blocks, dtype=torch.bool)
        flags[own] = True
        if own.is_cuda:
            bits = flags.to(torch.uint8)
            distributed.all_reduce(bits, distributed.ReduceOp.MAX, group=self.group)
            return Union(bits.nonzero().flatten(), None, bits.nbytes)
        bits = bits_of(flags)
        with Lent(bits):
            distributed.all_reduce(bits, distributed.ReduceOp.BOR, group=self.group)
        return Union(from_bits(bits, blocks).nonzero().flatten(), None, bits.nbytes)


def _named(layout: BlockLayout, elements: int) -> str:
    """Return the layout as users read it: the size of the blocks, or all sizes with their parts."""
    if len(layout) == 1 and layout[0].parts == ((0, elements),):
        return str(layout[0].size)
    return "; ".join(f"{size} in {parts}" for size, parts in layout)


def _require_division(layout: BlockLayout, elements: int) -> None:
    """Reject a layout that leaves out elements, or has one element twice."""
    parts = sorted(part for grid in layout for part in grid.parts)
    edges = [0, *(edge for part in parts for edge in part), elements]
    if edges[::2] != edges[1::2] or any(size < 1 for size, _ in layout):
        raise ValueError(f"a layout of {layout} does not divide {elements} elements")
    if len(layout) > MAX_GRIDS:
        raise ValueError(f"blocks of {len(layout)} sizes: a tensor has {MAX_GRIDS} at most")


def _refusal_of(values: Tensor, wire: Wire) -> ConfigError | None:
    """Return why a tensor is not added up. All ranks first compare their calls."""
    dtype = values.dtype
    if values.is_sparse and (places := values.shape[: values.sparse_dim()].numel()) >= MAX_NUMBER:
        return ConfigError(
            f"the tensor has {places} sparse places, at most {MAX_NUMBER - 1} are possible: make "
            "its last dimensions dense"
        )
    try:
        _require_added(dtype, wire.dtype)
        require_scale(wire.scale, dtype)
    except ConfigError as error:
        return error
    return None


def _require_added(dtype: torch.dtype, wire_dtype: torch.dtype | None) -> None:
    """Reject types that not every process group adds. A gather adds them, a ring does not, and the
    density decides between the two.
    """
    require_floats(dtype, wire_dtype)
    if dtype in _NOT_ADDED:
        raise ConfigError(f"process groups do not add {dtype}: convert it to torch.int64")
