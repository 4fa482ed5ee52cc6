"""The aggregator's side of the protocol: datagrams in, datagrams out.

It does no I/O and reads no clock. A test can therefore drop, duplicate, delay and reorder its
datagrams.

A slot of the pool serves one stream of blocks at a time, in rounds. In a round, every rank sends
as many of its next nonzero blocks as fit into a datagram, and the number of its first block after
them. The blocks below the smallest of these numbers are complete, because no rank sends another
block there. The aggregator adds as many of them as fit into a datagram, in the order of the ranks.
It sends all ranks the sums and the number at which the next round begins. Blocks from that number
on stay in the slot.

The aggregator keeps the sums of a round until the next round is complete. A rank joins the next
round only after it has the sums, so a rank never needs older sums. OmniReduce and SwitchML keep two
versions of a slot for the same reason. They tell the versions apart by one bit, and take a datagram
that is two rounds late for a new one. Here the round is a number of 64 bits.
"""

from collections.abc import Hashable
from typing import Any, Final, NamedTuple

import numpy as np

from graphstash.training.reduce.aggregators.datagrams import (
    END,
    Header,
    Kind,
    Message,
    Numbers,
    Operation,
    Seal,
    Values,
)
from graphstash.training.reduce.aggregators.elements import ELEMENTS

__all__ = ["DIFFERENT", "MAX_SLOTS", "Aggregator", "Reply", "ranks_text"]

MAX_SLOTS: Final = 64
"""Maximum slots of an aggregator in one session. Bounds the memory that workers can make it use."""

_MAX_TEXT_BYTES: Final = 1000


class Reply(NamedTuple):
    """A datagram and its destination address."""

    address: Any
    datagram: bytearray


class Aggregator:
    """Aggregator number `number` in one session with `world` workers.

    A worker counts as dead after `lost_after_seconds` of silence. `now` is always in seconds of the
    same monotonic clock. WELCOME contains `buffer_bytes`, the size of the receive buffer.

    Attributes:
        failure: reason why the session has failed, or None.
    """

    def __init__(
        self,
        seal: Seal,
        *,
        number: int,
        world: int,
        now: float,
        lost_after_seconds: float,
        buffer_bytes: int = 0,
    ) -> None:
        self._seal = seal
        self._number = number
        self._world = world
        self._lost_after = lost_after_seconds
        self._buffer_bytes = buffer_bytes
        self._addresses: dict[int, Hashable] = {}
        self._heard_at = [now] * world
        self._heartbeats = [0] * world
        self._left: set[int] = set()
        self._slots: dict[int, _Slot] = {}
        self.failure: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether every worker has left."""
        return len(self._left) == self._world

    def has_left(self, rank: int) -> bool:
        """Whether the worker with this rank has left."""
        return rank in self._left

    def receive(self, message: Message, source: Hashable, now: float) -> list[Reply]:
        """Process a message whose seal is valid, and return the replies."""
        header = message.header
        if header.aggregator != self._number or header.rank >= self._world:
            return []
        address = self._addresses.get(header.rank)
        if header.kind == Kind.OPEN and address in {None, source}:
            return self._open(header, source, len(message.body), now)
        match header.kind if address == source else None:
            case Kind.ALIVE:
                return self._record_heartbeat(header, source, now)
            case Kind.LEAVE:
                return self._leave(header, message.text, source)
            case Kind.DATA | Kind.ASK if header.slot < MAX_SLOTS:
                return self._contribute(message, source, now)
        return []

    def tick(self, now: float) -> list[Reply]:
        """Fail the session if a worker is silent for too long. Call it about every second."""
        silent = [
            rank
            for rank in range(self._world)
            if rank not in self._left and now - self._heard_at[rank] > self._lost_after
        ]
        if silent and self.failure is None:
            return self.fail(
                f"nothing was heard of {ranks_text(silent)} for {self._lost_after:g} seconds"
            )
        for rank in silent:  # after a failure, do not wait for the LEAVE of a dead worker
            self._left.add(rank)
        return []

    def fail(self, why: str) -> list[Reply]:
        """End the session, and return FAILED for every worker that has not left."""
        if self.failure is None:
            self.failure = why
        return [
            reply
            for rank, address in self._addresses.items()
            if rank not in self._left
            for reply in self._failed_to(address)
        ]

    def _open(self, header: Header, source: Hashable, body_bytes: int, now: float) -> list[Reply]:
        self._addresses[header.rank] = source
        if not self._heartbeats[header.rank]:  # a replayed OPEN must not keep a dead worker alive
            self._heard_at[header.rank] = now
        welcome = header._replace(kind=Kind.WELCOME, filled=0, elements=self._buffer_bytes)
        return [Reply(source, self._seal.close(welcome, bytes(body_bytes)))]

    def _record_heartbeat(self, header: Header, source: Hashable, now: float) -> list[Reply]:
        if header.round > self._heartbeats[header.rank]:  # otherwise a replay
            self._heartbeats[header.rank] = header.round
            self._heard_at[header.rank] = now
        return self._failed_to(source)

    def _leave(self, header: Header, why: str, source: Hashable) -> list[Reply]:
        self._left.add(header.rank)
        replies = [self._reply(source, Kind.LEFT, header)]
        if self.failure is None and why:
            replies += self.fail(why)
        elif self.failure is None and any(slot.arrived for slot in self._slots.values()):
            replies += self.fail(_closed(self._left))
        return replies

    def _contribute(self, message: Message, source: Hashable, now: float) -> list[Reply]:
        header = message.header
        slot = self._slots.setdefault(header.slot, _Slot(self._world))
        if header.round < slot.round:
            is_last = header.round == slot.round - 1
            return [Reply(source, slot.result)] if is_last and slot.result else []
        if self.failure is not None:
            return self._failed_to(source)
        if slot.arrived >> header.rank & 1 and header.round == slot.round:
            missing = [rank for rank in range(self._world) if not slot.arrived >> rank & 1]
            body = np.array(missing, "<u2").tobytes()
            return [self._reply(source, Kind.WAITING, header, body)]
        problem = self._problem_of(message, slot)
        if problem is not None:
            return self.fail(problem)
        slot.take(message)
        self._heard_at[header.rank] = now  # under load, ALIVE may be lost
        if slot.arrived.bit_count() < self._world:
            return []
        result = slot.complete(self._seal, self._number)
        return [Reply(address, result) for address in self._addresses.values()]

    def _problem_of(self, message: Message, slot: "_Slot") -> str | None:
        """Return why a contribution ends the session, or None if it is valid."""
        header = message.header
        if header.round > slot.round:
            return f"rank {header.rank} is ahead of aggregator {self._number}, which was restarted"
        if self._left:
            return _closed(self._left)
        if slot.tensor is not None and slot.tensor.tensor_fields != header.tensor_fields:
            return f"{DIFFERENT}{_tensor_text(slot.tensor)}; {_tensor_text(header)}"
        if header.kind != Kind.DATA or not _is_sound(message) or not slot.accepts(message):
            return f"rank {header.rank} has sent what aggregator {self._number} cannot read"
        return None

    def _failed_to(self, address: Hashable) -> list[Reply]:
        if self.failure is None:
            return []
        header = Header(Kind.FAILED, aggregator=self._number)
        return [Reply(address, self._seal.close(header, self.failure.encode()[:_MAX_TEXT_BYTES]))]

    def _reply(self, address: Hashable, kind: Kind, to: Header, body: bytes = b"") -> Reply:
        header = Header(
            kind,
            rank=to.rank,
            aggregator=self._number,
            slot=to.slot,
            round=to.round,
            filled=to.filled,
        )
        return Reply(address, self._seal.close(header, body))


class _Slot:
    """One slot of the pool.

    Attributes:
        round: number of the round in progress, from 0 and over all tensors.
        arrived: bit mask of the ranks whose DATA for this round has arrived.
        tensor: header of the first DATA of the current tensor. None between tensors.
        result: datagram with the sums of the previous round. None in the first round.
    """

    def __init__(self, world: int) -> None:
        self.round = 0
        self.arrived = 0
        self.tensor: Header | None = None
        self.result: bytearray | None = None
        self._next = [END] * world
        self._begin = 0
        self._waiting: list[list[tuple[Numbers, Values]]] = [[] for _ in range(world)]

    def accepts(self, message: Message) -> bool:
        """Check a rank's DATA against the tensor and the round. Its block numbers must ascend, not
        be below the round's first number, and stay below the rank's next block. A rank must not
        send blocks while its earlier blocks are in the slot.
        """
        header = message.header
        blocks = -(-header.elements // header.block_size)
        if not self._begin < header.next or blocks <= header.next < END:
            return False
        if not header.filled:
            return True
        numbers, _ = message.blocks()
        return (
            not self._waiting[header.rank]
            and self._begin <= int(numbers[0])
            and int(numbers[-1]) < min(blocks, header.next)
            and bool((numbers[1:] > numbers[:-1]).all())
        )

    def take(self, message: Message) -> None:
        header = message.header
        self.tensor = header if self.tensor is None else self.tensor
        self.arrived |= 1 << header.rank
        self._next[header.rank] = header.next
        if header.filled:
            self._waiting[header.rank].append(message.blocks())

    def complete(self, seal: Seal, aggregator: int) -> bytearray:
        assert self.tensor is not None  # noqa: S101 - `take` has set it
        numbers, until = self._complete_numbers(self.tensor.capacity)
        header = self.tensor._replace(
            kind=Kind.RESULT,
            rank=0,
            aggregator=aggregator,
            filled=len(numbers),
            round=self.round,
            next=until,
        )
        self.result = seal.close_blocks(header, numbers, lambda sums: self._add(numbers, sums))
        self._drop(until)
        self.round += 1
        self.arrived = 0
        self._begin = until
        if until == END:
            self.tensor, self._begin = None, 0
        return self.result

    def _complete_numbers(self, capacity: int) -> tuple[Numbers, int]:
        until = min(self._next)
        parts = [numbers for waiting in self._waiting for numbers, _ in waiting]
        if not parts:
            return np.empty(0, np.uint32), until
        numbers = np.unique(np.concatenate(parts))
        complete = int(np.searchsorted(numbers, until)) if until < END else len(numbers)
        if complete > capacity:
            return numbers[:capacity], int(numbers[capacity])
        return numbers[:complete], until

    def _add(self, numbers: Numbers, sums: Values) -> None:
        """Add in the order of the ranks, so that the bits do not depend on the order of arrival."""
        assert self.tensor is not None  # noqa: S101 - `take` has set it
        element = ELEMENTS[self.tensor.element]
        is_sum = self.tensor.operation == Operation.SUM
        combine = np.add if is_sum else np.maximum
        wide = sums if element.is_added_as_sent else element.widen(sums)
        # inf - inf is NaN, integers wrap around, and a sum that is too large for fp16 becomes inf.
        with np.errstate(all="ignore"):
            for waiting in self._waiting:
                for own, values in waiting:
                    count = int(np.searchsorted(own, numbers[-1], side="right"))
                    if count == len(numbers):  # `numbers` includes them, so they are equal
                        combine(wide, element.widen(values[:count]), out=wide)
                    elif count:
                        places = np.searchsorted(numbers, own[:count])
                        wide[places] = combine(wide[places], element.widen(values[:count]))
            if wide is not sums:
                sums[:] = element.narrow(wide)

    def _drop(self, until: int) -> None:
        for rank, waiting in enumerate(self._waiting):
            rest = []
            for numbers, values in waiting:
                done = int(np.searchsorted(numbers, until)) if until < END else len(numbers)
                if done < len(numbers):
                    rest.append((numbers[done:], values[done:]))
            self._waiting[rank] = rest


DIFFERENT: Final = "the ranks want to add up different tensors: "
"""Prefix of a failure whose cause is the user's code; workers raise ConfigError for it."""


def ranks_text(ranks: list[int]) -> str:
    """Return `rank 3` or `ranks 1 and 3` for messages; names at most six ranks."""
    most = 5 if len(ranks) > 6 else 6
    named = [str(rank) for rank in ranks[:most]]
    if ranks[most:]:
        named.append(f"{len(ranks) - most} others")
    if len(named) == 1:
        return f"rank {named[0]}"
    return f"ranks {', '.join(named[:-1])} and {named[-1]}"


def _closed(left: set[int]) -> str:
    return f"{ranks_text(sorted(left))} closed before the others were done"


def _is_sound(message: Message) -> bool:
    header = message.header
    return (
        header.element in ELEMENTS
        and header.operation in set(Operation)
        and header.block_size > 0
        and header.filled <= header.capacity
        and message.has_blocks
    )


def _tensor_text(header: Header) -> str:
    name = ELEMENTS[header.element].name if header.element in ELEMENTS else "unknown"
    return (
        f"rank {header.rank}: tensor {header.tensor} of {header.elements} {name} in blocks of "
        f"{header.block_size}, {header.capacity} in a datagram"
    )
