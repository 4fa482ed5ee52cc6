"""The blocks of a grid on their way: summed by a ring, or gathered from each rank and added up.

A slot is a group of blocks of up to 4 MiB. Two slots are in flight at a time, and a gather receives
a slot from each rank. The process group adds the elements of a slot in the same order every time,
and gathered blocks are added in an order that is the same on all ranks, so every rank gets the same
bits.
"""

import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, distributed

from graphstash.training.lent import Lent
from graphstash.training.reduce.blocks import BlockView, SparseRows
from graphstash.training.reduce.opening import MAX_NUMBER, NUMBER_BYTES, Form, Opening, aligned

__all__ = ["Blocks", "Slots", "Union", "Wire", "gathers", "pad", "send"]

Blocks: TypeAlias = BlockView | SparseRows

_SLOT_BYTES: Final = 4 * 1024**2
_SLOTS: Final = 2
"""Slots in flight at the same time."""

_MESSAGE_BYTES: Final = 4 * 1024
"""Bytes that a link of 1 Gbit/s carries in the time that a ring takes for one more message."""


class Wire(NamedTuple):
    """How elements are sent: multiplied by a factor, and as a type. None is their own type."""

    scale: float
    dtype: torch.dtype | None

    def of(self, values: Tensor) -> Tensor:
        """Return the values as they are sent. Changes them in place if there is a factor."""
        if self.scale != 1.0:
            values.mul_(self.scale)
        return values if self.dtype is None else values.to(self.dtype)


class Union(NamedTuple):
    """The blocks of a grid that some rank has.

    Attributes:
        numbers: Their numbers, int64, ascending.
        by_rank: Numbers of each rank's blocks, if the ranks have exchanged them.
        nbytes: Bytes of a ring all-reduce that would send as much as the exchange.
    """

    numbers: Tensor
    by_rank: list[Tensor] | None
    nbytes: int


def gathers(ranks: int, most_bytes: int, union_bytes: int) -> bool:
    """Return whether a gather of `most_bytes` from each rank is cheaper than a ring.

    A ring sends 2(N-1)/N times `union_bytes` in 2(N-1) messages, one after another, and a gather
    N-1 times `most_bytes` in N-1 messages. Each message costs as much as 4 KiB.
    """
    return ranks * most_bytes < 2 * union_bytes + ranks * _MESSAGE_BYTES


def pad(numbers: Tensor, length: int) -> Tensor:
    """Return the numbers as int32, filled up with -1."""
    result = numbers.new_full((length,), -1, dtype=torch.int32)
    result[: len(numbers)] = numbers
    return result


class _Sending(NamedTuple):
    """A slot whose collective has started, its tensors, and a function that writes the result."""

    nbytes: int
    lent: Lent
    write: Callable[[], None]


def send(slots: Iterator[_Sending]) -> tuple[int, float, float, float]:
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
        slot.lent.take_back()
        arrived = time.perf_counter()
        slot.write()
        send += arrived - started
        unpack += time.perf_counter() - arrived


class Slots:
    """Packs blocks of a grid into slots, and starts to send a slot when it is taken.

    Attributes:
        blocks: The blocks.
        form: Their number and size, as in the first message.
    """

    def __init__(self, group: distributed.ProcessGroup, blocks: Blocks, wire: Wire) -> None:
        self.blocks = blocks
        size = max(1, blocks.size)  # a sparse tensor may have rows without elements
        self.form = Form(blocks.count, size * (wire.dtype or blocks.dtype).itemsize)
        self._group, self._wire = group, wire
        self._most = max(1, _SLOT_BYTES // (size * blocks.dtype.itemsize))

    def packed(self, numbers: Tensor) -> Tensor:
        """Return blocks as they are sent."""
        return self._wire.of(self.blocks.pack(numbers))

    def sent(self, opening: Opening, grid: int, own: Tensor, union: Union) -> Iterator[_Sending]:
        """Send the blocks that the first messages lack, in the cheaper way.

        Args:
            opening: The first messages.
            grid: Number of the grid.
            own: Numbers of this rank's blocks.
            union: The blocks to sum.
        """
        filled = opening.filled(grid)
        most = max(map(operator.sub, opening.counts(grid), filled))
        number_bytes = NUMBER_BYTES if union.by_rank is None else 0
        gathered_bytes = most * (self.form.block_bytes + number_bytes)
        union_bytes = len(union.numbers) * self.form.block_bytes
        if gathers(len(filled), gathered_bytes, union_bytes) and self.form.blocks < MAX_NUMBER:
            first = opening.blocks(grid, self._wire.dtype or self.blocks.dtype)
            return self._gather_slots(own, union, filled, first, most)
        return self._sum_slots(union.numbers)

    def _sum_slots(self, union: Tensor) -> Iterator[_Sending]:
        for numbers in torch.split(union, self._most) if len(union) else ():
            wire = self.packed(numbers)
            lent = Lent(wire)
            lent.work = distributed.all_reduce(wire, group=self._group, async_op=True)
            yield _Sending(wire.nbytes, lent, partial(self._unpack, numbers, wire))

    def _gather_slots(
        self,
        own: Tensor,
        union: Union,
        filled: Sequence[int],
        first: Sequence[Tensor],
        most: int,
    ) -> Iterator[_Sending]:
        """Add the `filled` blocks that each rank sent `first`, then gather the rest."""
        rest = own[filled[distributed.get_rank(self._group)] :]
        starts = range(0, most, self._most)
        slots = [slice(start, min(most, start + self._most)) for start in starts]
        messages = [self._message(rest[slot], slot, parsed=union.by_rank is None) for slot in slots]
        self.blocks.clear(union.numbers)  # -0.0 becomes 0.0: all ranks get the same bits
        by_rank = None
        if union.by_rank is not None:
            for numbers, count, values in zip(union.by_rank, filled, first, strict=True):
                self._add(numbers[:count], values)
            by_rank = [each[count:] for each, count in zip(union.by_rank, filled, strict=True)]
        for slot, message in zip(slots, messages, strict=True):
            received = message.new_empty(len(filled) * len(message))
            lent = Lent(received, message)
            lent.work = distributed.all_gather_into_tensor(
                received, message, group=self._group, async_op=True
            )
            numbers_of = None if by_rank is None else [each[slot] for each in by_rank]
            write = partial(self._add_all, received, slot, numbers_of)
            yield _Sending(received.nbytes // 2, lent, write)

    def _unpack(self, numbers: Tensor, wire: Tensor) -> None:
        self.blocks.unpack(numbers, wire.to(self.blocks.dtype))

    def _message(self, numbers: Tensor, slot: slice, *, parsed: bool) -> Tensor:
        """Return bytes: room for the blocks of a slot, after their numbers if those are parsed."""
        capacity = slot.stop - slot.start
        head = aligned(capacity * NUMBER_BYTES) if parsed else 0
        length = head + aligned(capacity * self.form.block_bytes)
        message = numbers.new_zeros(length, dtype=torch.uint8)
        if parsed:
            message[: capacity * NUMBER_BYTES] = pad(numbers, capacity).view(torch.uint8)
        packed = self.packed(numbers).view(torch.uint8)
        message[head : head + len(packed)] = packed
        return message

    def _add_all(self, received: Tensor, slot: slice, numbers_of: Sequence[Tensor] | None) -> None:
        messages = received.view(distributed.get_world_size(self._group), -1)
        dtype = self._wire.dtype or self.blocks.dtype
        if numbers_of is not None:
            for numbers, message in zip(numbers_of, messages, strict=True):
                self._add(numbers, message.view(dtype))
            return
        listed = (slot.stop - slot.start) * NUMBER_BYTES
        for message in messages:
            numbers = message[:listed].view(torch.int32)
            self._add(numbers[numbers >= 0].long(), message[aligned(listed) :].view(dtype))

    def _add(self, numbers: Tensor, values: Tensor) -> None:
        if len(numbers):
            values = values[: len(numbers) * self.blocks.size]
            self.blocks.add(numbers, values.to(self.blocks.dtype))
