"""The block-sparse all-reduce: first a bitmap, then the blocks of the union, slot by slot.

    hash     -- MAX over the ranks -->  whether all ranks sum the same  (16 bytes)
    bitmap   -- OR over the ranks -->   union                           (a bit per block)
    blocks of the union, packed  -- SUM over the ranks -->  written back in place

Blocks outside the union are never sent: they are zero on all ranks, and so are their sums. A slot
is a group of blocks of up to 4 MiB. Packing, sending and unpacking of slots overlap. A slot has
the same blocks on every rank. The process group therefore adds the elements of a slot in the same
order every time, and gives every rank the same bits.
"""

import hashlib
import time
from collections import deque
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor, distributed

from graphstash.training.reduce.agreement import require_floats, require_same
from graphstash.training.reduce.blocks import BlockView, bits_of, from_bits, written_back

__all__ = ["BLOCK_ELEMENTS", "BlockSparseAllReduce", "Sent"]

BLOCK_ELEMENTS: Final = 256
"""Elements of a block by default, as in the OmniReduce paper: 1 KiB of fp32."""

_SLOT_BYTES: Final = 4 * 1024**2
_SLOTS: Final = 2
"""Slots in flight at the same time."""


class Sent(NamedTuple):
    """What one all-reduce sent, and how long it took.

    Attributes:
        blocks: Blocks of the tensor; 0 if it was sent whole without checking its blocks.
        own_blocks: Blocks that were nonzero on this rank.
        union_blocks: Blocks that were nonzero on at least one rank.
        bitmap_bytes: Bytes of hash and bitmap; with aggregators, all bytes except the blocks.
        block_bytes: Bytes of the blocks that were sent.
        dense_bytes: Bytes of the whole tensor.
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
    pack_seconds: float = 0.0
    send_seconds: float = 0.0
    unpack_seconds: float = 0.0

    @classmethod
    def whole(cls, flat: Tensor, sent_bytes: int) -> Self:
        """Return the record of a tensor that was sent without checking its blocks."""
        return cls(0, 0, 0, 0, sent_bytes, flat.nbytes)

    @property
    def density(self) -> float:
        """Share of blocks that were nonzero on this rank, 0 to 1."""
        return self.own_blocks / self.blocks if self.blocks else 0.0

    @property
    def union_density(self) -> float:
        """Share of blocks that were nonzero on at least one rank, 0 to 1."""
        return self.union_blocks / self.blocks if self.blocks else 0.0


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
        self.group = group if group is not None else distributed.group.WORLD
        self.block_size = block_size

    def union_of(self, nonzero: Tensor) -> tuple[Tensor, int]:
        """Return the flags that are set on at least one rank, and the number of bytes sent."""
        if not nonzero.is_cuda:
            bits = bits_of(nonzero)
            distributed.all_reduce(bits, distributed.ReduceOp.BOR, group=self.group)
            return from_bits(bits, len(nonzero)), bits.nbytes
        flags = nonzero.to(torch.uint8)  # NCCL has no OR, so it sends a byte per block
        distributed.all_reduce(flags, distributed.ReduceOp.MAX, group=self.group)
        return flags.bool(), flags.nbytes

    def sum_(
        self,
        flat: Tensor,
        *,
        scale: float = 1.0,
        wire_dtype: torch.dtype | None = None,
        dense_above: float = 1.0,
    ) -> Sent:
        """Sum a tensor over all ranks, in place.

        Args:
            flat: A tensor of one dimension and any number type, with the same shape and type on all
                ranks. A strided tensor is summed through a copy.
            scale: Factor by which every element is multiplied before it is sent.
            wire_dtype: Type in which elements are sent. Default: their own type.
            dense_above: Share of blocks in the union above which the tensor is sent whole.

        Raises:
            ValueError: the tensor does not have exactly one dimension, is sparse, or has several
                elements at one address.
            ConfigError: the ranks have different tensors or arguments (raised on every rank), or
                `wire_dtype` differs from the tensor's type and one of them is not a float type.
            RuntimeError: a rank is gone.
        """
        with written_back(flat) as contiguous:
            return self._sum(contiguous, scale, wire_dtype, dense_above)

    def _sum(
        self, flat: Tensor, scale: float, wire_dtype: torch.dtype | None, dense_above: float
    ) -> Sent:
        began = time.perf_counter()
        blocks = BlockView(flat, self.block_size)
        check = _SameCallCheck(
            f"{flat.numel()} {flat.dtype} in blocks of {self.block_size}, "
            f"{scale=}, {wire_dtype=}, {dense_above=}",
            flat.device,
            self.group,
        )
        nonzero = blocks.nonzero()
        own = int(nonzero.sum())
        scanned = time.perf_counter()
        check.require_same()
        require_floats(flat, wire_dtype)
        union, bitmap_bytes = self.union_of(nonzero)
        chosen = union.nonzero().flatten()
        agreed = time.perf_counter()
        if len(chosen) > dense_above * blocks.count:
            block_bytes = self.sum_whole_(_scaled(flat, scale, None), wire_dtype=wire_dtype)
            pack, send, unpack = 0.0, time.perf_counter() - agreed, 0.0
        else:
            block_bytes, pack, send, unpack = self._send(blocks, chosen, flat, scale, wire_dtype)
        return Sent(
            blocks.count,
            own,
            len(chosen),
            bitmap_bytes + check.nbytes,
            block_bytes,
            flat.nbytes,
            scanned - began + pack,
            agreed - scanned + send,
            unpack,
        )

    def sum_whole_(self, flat: Tensor, *, wire_dtype: torch.dtype | None = None) -> int:
        """Sum a tensor in place, including its zeros, and return how many bytes were sent."""
        with written_back(flat) as contiguous:
            wire = contiguous if wire_dtype is None else contiguous.to(wire_dtype)
            distributed.all_reduce(wire, group=self.group)
            if wire is not contiguous:
                contiguous.copy_(wire)
        return wire.nbytes

    def _send(
        self,
        blocks: BlockView,
        chosen: Tensor,
        flat: Tensor,
        scale: float,
        wire_dtype: torch.dtype | None,
    ) -> tuple[int, float, float, float]:
        """Return bytes sent, and seconds to pack, send and unpack."""
        pack = send = unpack = 0.0
        sent_bytes = 0
        in_flight: deque[tuple[Tensor, Tensor, Any]] = deque()
        slots = deque(torch.split(chosen, self._blocks_of_a_slot(flat)) if len(chosen) else ())
        while slots or in_flight:
            started = time.perf_counter()
            if slots and len(in_flight) < _SLOTS:
                slot = slots.popleft()
                wire = _scaled(blocks.pack(slot), scale, wire_dtype)
                work = distributed.all_reduce(wire, group=self.group, async_op=True)
                in_flight.append((slot, wire, work))
                sent_bytes += wire.nbytes
                pack += time.perf_counter() - started
                continue
            slot, wire, work = in_flight.popleft()
            work.wait()
            arrived = time.perf_counter()
            blocks.unpack(slot, wire.to(flat.dtype))
            send += arrived - started
            unpack += time.perf_counter() - arrived
        return sent_bytes, pack, send, unpack

    def _blocks_of_a_slot(self, flat: Tensor) -> int:
        return max(1, _SLOT_BYTES // (self.block_size * flat.element_size()))


def _scaled(values: Tensor, scale: float, dtype: torch.dtype | None) -> Tensor:
    if scale != 1.0:
        values.mul_(scale)
    return values if dtype is None else values.to(dtype)


class _SameCallCheck:
    """Checks in the background that all ranks make the same call.

    All ranks max-reduce 8 bytes of a hash, each byte b together with 255 - b. If every pair still
    sums to 255, all ranks hold the same hash.
    """

    def __init__(self, text: str, device: torch.device, group: Any) -> None:
        digest = hashlib.sha256(text.encode()).digest()[:8]
        pairs = [*digest, *(255 - byte for byte in digest)]
        self._text, self._group = text, group
        self._bytes = torch.tensor(pairs, dtype=torch.uint8, device=device)
        self.nbytes = self._bytes.nbytes
        self._work = distributed.all_reduce(
            self._bytes, distributed.ReduceOp.MAX, group=group, async_op=True
        )

    def require_same(self) -> None:
        """Raise ConfigError on every rank if the ranks sum different tensors."""
        self._work.wait()
        digest, rest = self._bytes.int().view(2, 8)
        if bool((digest + rest != 255).any()):
            require_same(
                self._group,
                self._text,
                wrong="the ranks want to add up different tensors",
                way_out="build the same model with the same settings of the hook on each, and add "
                "up in the same order",
            )
