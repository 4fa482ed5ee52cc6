"""The block-sparse all-reduce: agree on the blocks that are not zero on some rank, and sum these.

    call   -- MAX over the ranks -->  whether all ranks make the same call, and the most blocks
                                      of a rank (24 bytes)
    union  -- OR of a bit per block, or a gather of the numbers of blocks: the smaller of the two
    blocks -- SUM of the union's blocks, or a gather of each rank's own blocks

Blocks outside the union are never sent: they are zero on all ranks, and so are their sums. -0.0
counts as zero, or gradients under a mask would be sent whole: a negative number times 0 is -0.0.
Where a dense all-reduce would give -0.0, because all ranks have it, the sum may be 0.0 instead. For
N ranks with at most m blocks and a union of u, a ring sends 2(N-1)/N u blocks and a gather (N-1) m.
The choice depends only on values that all ranks have, and not on earlier calls.

A slot is a group of blocks of up to 4 MiB, of which two are in flight; a gather receives a slot
from each rank. The process group adds the elements of a slot in the same order every time, and a
gathered slot is added in the order of the ranks, so every rank gets the same bits.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor, distributed

from graphstash.errors import ConfigError
from graphstash.training.reduce.agreement import require_floats, require_same, require_scale
from graphstash.training.reduce.blocks import (
    BLOCK_ELEMENTS,
    BlockLayout,
    BlockView,
    bits_of,
    from_bits,
    written_back,
)

__all__ = ["BlockSparseAllReduce", "Sent"]

_SLOT_BYTES: Final = 4 * 1024**2
_SLOTS: Final = 2
"""Slots in flight at the same time."""

_CALL_BYTES: Final = 24
_NUMBER_BYTES: Final = 4
_MAX_NUMBER: Final = 2**31
_NOT_ADDED: Final = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
"""Types that gloo and NCCL do not add."""

_ALIGNMENT: Final = 16
"""Bytes of the largest element, complex128."""


class Sent(NamedTuple):
    """What one all-reduce sent, and how long it took.

    Bytes are those of a ring all-reduce that would send as much: of N ranks, a ring sends each byte
    2(N-1)/N times and a gather N-1 times, so gathered bytes count N/2 times.

    Attributes:
        blocks: Blocks of the tensor; 0 if it was sent whole without checking its blocks.
        own_blocks: Blocks that were nonzero on this rank.
        union_blocks: Blocks that were nonzero on at least one rank.
        bitmap_bytes: Bytes sent to agree on the blocks; with aggregators, all bytes except the
            blocks.
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
                (uint8, int8, int32, int64), bool, complex, or floats of 16 to 64 bits. A strided
                tensor is summed through a copy. -0.0 counts as zero, and a sum of -0.0 may become
                0.0, with the same bits on all ranks.
            scale: Finite factor by which every element is multiplied before it is sent.
            wire_dtype: Type in which elements are sent. Default: their own type.
            dense_above: Share of blocks in the union above which the tensor is sent whole.
            layout: Division into blocks. Default: blocks of `block_size` elements.

        Raises:
            ValueError: the tensor does not have exactly one dimension, is sparse, or has several
                elements at one address.
            ConfigError: the ranks have different tensors or arguments (raised on every rank), or
                `wire_dtype` differs from the tensor's type and one of them is not a float type; or
                elements would be sent as a type that process groups do not add; or `scale` is
                infinite or NaN.
            RuntimeError: a rank is gone.
        """
        layout = layout or BlockLayout(self.block_size)
        with written_back(flat) as contiguous:
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
        blocks = BlockView(flat, layout.size, parts=layout.parts)
        nonzero = blocks.nonzero(one_zero=True)
        own = nonzero.nonzero().flatten()
        scanned = time.perf_counter()
        most = self._most_blocks(
            len(own),
            f"{flat.numel()} {flat.dtype} in blocks of {layout.size}, parts={layout.parts}, "
            f"{scale=}, {wire_dtype=}, {dense_above=}",
            flat.device,
        )
        _require_added(flat, wire_dtype)
        require_scale(scale)
        union, union_bytes = self._union(nonzero, own, most)
        agreed = time.perf_counter()
        pack = send = unpack = 0.0
        if len(union) > dense_above * blocks.count:
            block_bytes = self.sum_whole_(_scaled(flat, scale, None), wire_dtype=wire_dtype)
            send = time.perf_counter() - agreed
        else:
            slots = _Slots(self.group, blocks, scale=scale, wire_dtype=wire_dtype)
            gathered = slots.ranks * most * (slots.block_bytes + _NUMBER_BYTES)
            gathers = gathered < 2 * len(union) * slots.block_bytes and blocks.count < _MAX_NUMBER
            sending = slots.gathered(own, most, union) if gathers else slots.summed(union)
            block_bytes, pack, send, unpack = _send(sending)
        return Sent(
            blocks.count,
            len(own),
            len(union),
            _CALL_BYTES + union_bytes,
            block_bytes,
            flat.nbytes,
            scanned - began + pack,
            agreed - scanned + send,
            unpack,
        )

    def sum_whole_(self, flat: Tensor, *, wire_dtype: torch.dtype | None = None) -> int:
        """Sum a tensor in place, including its zeros, and return how many bytes were sent.

        Raises:
            ConfigError: see `sum_`.
        """
        _require_added(flat, wire_dtype)
        with written_back(flat) as contiguous:
            wire = contiguous if wire_dtype is None else contiguous.to(wire_dtype)
            distributed.all_reduce(wire, group=self.group)
            if wire is not contiguous:
                contiguous.copy_(wire)
        return wire.nbytes

    def _most_blocks(self, own: int, call: str, device: torch.device) -> int:
        """Return the largest `own` of the ranks.

        Raises:
            ConfigError: the ranks make different calls; on every rank.
        """
        # If the maxima of a hash and of its negative are negatives, all ranks have the same hash.
        digest = int.from_bytes(hashlib.sha256(call.encode()).digest()[:7])
        maxima = torch.tensor([digest, -digest, own], device=device)
        distributed.all_reduce(maxima, distributed.ReduceOp.MAX, group=self.group)
        high, low, most = maxima.tolist()
        if high != -low:
            require_same(
                self.group,
                call,
                wrong="the ranks want to add up different tensors",
                advice="build the same model with the same settings of the hook on each, and add "
                "up in the same order",
            )
        return int(most)

    def _union(self, nonzero: Tensor, own: Tensor, most: int) -> tuple[Tensor, int]:
        """Return the numbers of the blocks that are nonzero on some rank, and the bytes sent.

        `own` are the numbers of this rank's nonzero blocks, and `most` is its largest length.
        """
        ranks = distributed.get_world_size(self.group)
        # NCCL has no OR, so it sends a byte per block.
        bits = nonzero.to(torch.uint8) if nonzero.is_cuda else bits_of(nonzero)
        if ranks * most * _NUMBER_BYTES < 2 * bits.nbytes and len(nonzero) < _MAX_NUMBER:
            numbers = _padded(own, most)
            received = numbers.new_empty(ranks * most)
            distributed.all_gather_into_tensor(received, numbers, group=self.group)
            return received[received >= 0].long().unique(), ranks * numbers.nbytes // 2
        if nonzero.is_cuda:
            distributed.all_reduce(bits, distributed.ReduceOp.MAX, group=self.group)
            return bits.nonzero().flatten(), bits.nbytes
        distributed.all_reduce(bits, distributed.ReduceOp.BOR, group=self.group)
        return from_bits(bits, len(nonzero)).nonzero().flatten(), bits.nbytes


def _require_added(flat: Tensor, wire_dtype: torch.dtype | None) -> None:
    """Reject types that not every process group adds. A gather adds them, a ring does not, and the
    density decides between the two.
    """
    require_floats(flat, wire_dtype)
    if flat.dtype in _NOT_ADDED:
        raise ConfigError(f"process groups do not add {flat.dtype}: convert it to torch.int64")


class _Sending(NamedTuple):
    """A slot whose collective has started, and what writes its result back."""

    nbytes: int
    work: Any
    write: Callable[[], None]


def _send(slots: Iterator[_Sending]) -> tuple[int, float, float, float]:
    """Return bytes sent, and seconds to pack, send and unpack."""
    pack = send = unpack = 0.0
    sent_bytes = 0
    in_flight: deque[_Sending] = deque()
    while True:
        started = time.perf_counter()
        if len(in_flight) < _SLOTS and (packed := next(slots, None)) is not None:
            in_flight.append(packed)
            sent_bytes += packed.nbytes
            pack += time.perf_counter() - started
            continue
        if not in_flight:
            return sent_bytes, pack, send, unpack
        slot = in_flight.popleft()
        slot.work.wait()
        arrived = time.perf_counter()
        slot.write()
        send += arrived - started
        unpack += time.perf_counter() - arrived


class _Slots:
    """Packs blocks into slots, and starts to send each slot when it is taken from the iterator."""

    def __init__(
        self,
        group: distributed.ProcessGroup | None,
        blocks: BlockView,
        *,
        scale: float,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.ranks = distributed.get_world_size(group)
        self.block_bytes = blocks.size * (wire_dtype or blocks.dtype).itemsize
        self._group, self._blocks = group, blocks
        self._scale, self._wire_dtype = scale, wire_dtype
        self._most = max(1, _SLOT_BYTES // (blocks.size * blocks.dtype.itemsize))

    def summed(self, union: Tensor) -> Iterator[_Sending]:
        for numbers in torch.split(union, self._most) if len(union) else ():
            wire = self._packed(numbers)
            work = distributed.all_reduce(wire, group=self._group, async_op=True)
            yield _Sending(wire.nbytes, work, partial(self._unpack, numbers, wire))

    def gathered(self, own: Tensor, most: int, union: Tensor) -> Iterator[_Sending]:
        """Gather the blocks of all ranks, each with its number, and add them up in rank order."""
        messages = [
            self._message(own[start : start + self._most], min(self._most, most - start))
            for start in range(0, most, self._most)
        ]
        self._blocks.clear(union)  # -0.0 becomes 0.0: all ranks get the same bits
        for start, message in zip(range(0, most, self._most), messages, strict=True):
            received = message.new_empty(self.ranks * len(message))
            work = distributed.all_gather_into_tensor(
                received, message, group=self._group, async_op=True
            )
            add = partial(self._add, received, min(self._most, most - start))
            yield _Sending(received.nbytes // 2, work, add)

    def _packed(self, numbers: Tensor) -> Tensor:
        return _scaled(self._blocks.pack(numbers), self._scale, self._wire_dtype)

    def _unpack(self, numbers: Tensor, wire: Tensor) -> None:
        self._blocks.unpack(numbers, wire.to(self._blocks.dtype))

    def _message(self, numbers: Tensor, capacity: int) -> Tensor:
        """Return bytes: room for the numbers of `capacity` blocks, and for the blocks."""
        head = _aligned(capacity * _NUMBER_BYTES)
        message = numbers.new_zeros(head + _aligned(capacity * self.block_bytes), dtype=torch.uint8)
        message[: capacity * _NUMBER_BYTES] = _padded(numbers, capacity).view(torch.uint8)
        packed = self._packed(numbers).view(torch.uint8)
        message[head : head + len(packed)] = packed
        return message

    def _add(self, received: Tensor, capacity: int) -> None:
        head = _aligned(capacity * _NUMBER_BYTES)
        for message in received.view(self.ranks, -1):
            numbers = message[: capacity * _NUMBER_BYTES].view(torch.int32)
            numbers = numbers[numbers >= 0].long()
            values = message[head:].view(self._wire_dtype or self._blocks.dtype)
            values = values[: len(numbers) * self._blocks.size]
            self._blocks.add(numbers, values.to(self._blocks.dtype))


def _padded(numbers: Tensor, length: int) -> Tensor:
    """Return the numbers as int32, filled up with -1."""
    padded = numbers.new_full((length,), -1, dtype=torch.int32)
    padded[: len(numbers)] = numbers
    return padded


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _scaled(values: Tensor, scale: float, dtype: torch.dtype | None) -> Tensor:
    if scale != 1.0:
        values.mul_(scale)
    return values if dtype is None else values.to(dtype)
