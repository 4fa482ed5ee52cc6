"""The aggregator's side of the protocol: datagrams in, datagrams out.

It does no input or output and reads no clock, so that a test can lose, double, delay and reorder
what it says and hears.

A slot of the pool serves one stream of blocks at a time, in rounds. In each, every rank says which
of its blocks come next, how many fit, and the number of its next one after these. All blocks below
the smallest of these numbers are complete: no rank has another one there. They are added up in the
order of the ranks, whatever the order of arrival, and sent to all with the number from which to go
on. A block above it waits.

The sums of a round are kept until the next one is complete: no rank takes part in that before it
has them. So every rank needs at most the last sums again, as with the two versions of a slot in
OmniReduce and SwitchML. There, a bit tells the two apart, and a datagram that is two rounds late
counts for the new one; here, it is a number of 64 bits.
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
"""Of one aggregator and session; bounds what its workers can make it keep."""

_MAX_TEXT_BYTES: Final = 1000


class Reply(NamedTuple):
    """A datagram, and the address that it goes to."""

    address: Any
    datagram: bytearray


class Aggregator:
    """One aggregator in one session.

    Args:
        seal: of the session.
        number: of this aggregator, from 0.
        world: how many workers there are.
        now: seconds of any clock that only goes on.
        lost_after_seconds: how long a worker may be silent.
        room_bytes: how much may wait to be received, which workers are told.

    Attributes:
        failure: why the session is over; None while it goes on.
    """

    def __init__(
        self,
        seal: Seal,
        *,
        number: int,
        world: int,
        now: float,
        lost_after_seconds: float,
        room_bytes: int = 0,
    ) -> None:
        self._seal = seal
        self._number = number
        self._world = world
        self._lost_after = lost_after_seconds
        self._room_bytes = room_bytes
        self._addresses: dict[int, Hashable] = {}
        self._heard = [now] * world
        self._alive = [0] * world
        self._left: set[int] = set()
        self._slots: dict[int, _Slot] = {}
        self.failure: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether every worker has left."""
        return len(self._left) == self._world

    def has_left(self, rank: int) -> bool:
        """Whether a worker has."""
        return rank in self._left

    def receive(self, message: Message, source: Hashable, now: float) -> list[Reply]:
        """What to answer to a message of the session.

        Args:
            message: whose seal was right.
            source: the address that it came from.
            now: seconds.
        """
        header = message.header
        if header.aggregator != self._number or header.rank >= self._world:
            return []
        address = self._addresses.get(header.rank)
        if header.kind == Kind.OPEN and address in {None, source}:
            return self._open(header, source, len(message.body), now)
        match header.kind if address == source else None:
            case Kind.ALIVE:
                return self._alive_again(header, source, now)
            case Kind.LEAVE:
                return self._leave(header, message.text, source)
            case Kind.DATA | Kind.ASK if header.slot < MAX_SLOTS:
                return self._contribute(message, source, now)
        return []

    def tick(self, now: float) -> list[Reply]:
        """Call it about every second: finds out who is silent."""
        silent = [
            rank
            for rank in range(self._world)
            if rank not in self._left and now - self._heard[rank] > self._lost_after
        ]
        if silent and self.failure is None:
            return self.fail(
                f"nothing was heard of {ranks_text(silent)} for {self._lost_after:g} seconds"
            )
        for rank in silent:  # of a session that is over nobody expects a farewell
            self._left.add(rank)
        return []

    def fail(self, why: str) -> list[Reply]:
        """Ends the session, and tells all workers."""
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
        if not self._alive[header.rank]:  # or somebody may repeat it
            self._heard[header.rank] = now
        welcome = header._replace(kind=Kind.WELCOME, filled=0, elements=self._room_bytes)
        return [Reply(source, self._seal.close(welcome, bytes(body_bytes)))]

    def _alive_again(self, header: Header, source: Hashable, now: float) -> list[Reply]:
        if header.round > self._alive[header.rank]:  # not one that somebody repeats
            self._alive[header.rank] = header.round
            self._heard[header.rank] = now
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
        self._heard[header.rank] = now  # ALIVE may be lost where much is sent
        if slot.arrived.bit_count() < self._world:
            return []
        result = slot.complete(self._seal, self._number)
        return [Reply(address, result) for address in self._addresses.values()]

    def _problem_of(self, message: Message, slot: "_Slot") -> str | None:
        """Why a contribution ends the session; None when it does not."""
        header = message.header
        if header.round > slot.round:
            return (
                f"rank {header.rank} is ahead of aggregator {self._number}, which was started anew"
            )
        if self._left:
            return _closed(self._left)
        if slot.tensor is not None and slot.tensor.tensor_fields != header.tensor_fields:
            return f"{DIFFERENT}{_tensor_text(slot.tensor)}; {_tensor_text(header)}"
        if header.kind != Kind.DATA or not _is_sound(message) or not slot.goes_on_with(message):
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
        round: that is being collected, from 0, over all tensors.
        arrived: a bit for each rank of whom this round is there.
        tensor: a header of this round's tensor; None before the first.
        result: the datagram with the sums of the round before; None before there is one.
    """

    def __init__(self, world: int) -> None:
        self.round = 0
        self.arrived = 0
        self.tensor: Header | None = None
        self.result: bytearray | None = None
        self._next = [END] * world
        self._begin = 0
        self._waiting: list[list[tuple[Numbers, Values]]] = [[] for _ in range(world)]

    def goes_on_with(self, message: Message) -> bool:
        """Whether a rank's blocks and its next one are the tensor's, ascending, from where the
        round begins: each begins behind the one before, and a rank has one datagram waiting.
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
        """Notes what a rank has sent."""
        header = message.header
        self.tensor = header if self.tensor is None else self.tensor
        self.arrived |= 1 << header.rank
        self._next[header.rank] = header.next
        if header.filled:
            self._waiting[header.rank].append(message.blocks())

    def complete(self, seal: Seal, aggregator: int) -> bytearray:
        """Adds up what is complete, and begins the next round."""
        assert self.tensor is not None  # noqa: S101 - a round ends with what somebody has sent
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
        """The numbers of blocks that are complete, as many as fit, and the one to go on from."""
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
        """Rank by rank, so that the bits do not depend on who came first."""
        assert self.tensor is not None  # noqa: S101 - as above
        element = ELEMENTS[self.tensor.element]
        is_sum = self.tensor.operation == Operation.SUM
        combine = np.add if is_sum else np.maximum
        wide = sums if element.is_added_as_sent else element.widen(sums)
        with np.errstate(all="ignore"):  # infinities add up to NaN, and integers wrap around
            for waiting in self._waiting:
                for own, values in waiting:
                    there = int(np.searchsorted(own, numbers[-1], side="right"))
                    if there == len(numbers):  # the same, for both are ascending and one's are all
                        combine(wide, element.widen(values[:there]), out=wide)
                    elif there:
                        places = np.searchsorted(numbers, own[:there])
                        wide[places] = combine(wide[places], element.widen(values[:there]))
        if wide is not sums:
            sums[:] = element.narrow(wide)

    def _drop(self, until: int) -> None:
        """Forgets the blocks below a number."""
        for rank, waiting in enumerate(self._waiting):
            rest = []
            for numbers, values in waiting:
                done = int(np.searchsorted(numbers, until)) if until < END else len(numbers)
                if done < len(numbers):
                    rest.append((numbers[done:], values[done:]))
            self._waiting[rank] = rest


DIFFERENT: Final = "the ranks want to add up different tensors: "
"""How a failure begins that a user's own code is the reason of."""


def ranks_text(ranks: list[int]) -> str:
    """For people: `rank 3`, `ranks 1 and 3`, and no more than five of them."""
    named = [str(rank) for rank in ranks[:5]] + ([f"{len(ranks) - 5} others"] if ranks[5:] else [])
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
