"""The worker's side of the protocol: datagrams in, datagrams out.

It does no input or output and reads no clock, as `aggregator`. A tensor's blocks are dealt out to
streams, and each stream has a slot of an aggregator until its last sums are there:

    sends    the first of its blocks that are not zero, as many as fit, and the number of the next
    hears    sums, which it writes back, and the number from which all ranks go on
    sends    its next blocks if that is the number of its next, or no blocks, with the same number
    ...      until no rank has a next block

A datagram that nobody answers is sent again, after longer and longer times.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from graphstash.errors import ConfigError
from graphstash.training.reduce.aggregators.aggregator import DIFFERENT, ranks_text
from graphstash.training.reduce.aggregators.block_rows import BlockRows
from graphstash.training.reduce.aggregators.datagrams import (
    END,
    Header,
    Kind,
    Message,
    Numbers,
    Operation,
    Seal,
    blocks_per_datagram,
)
from graphstash.training.reduce.aggregators.errors import AggregationError

__all__ = ["Outgoing", "Totals", "Worker"]

_FIRST_WAIT: Final = 0.1
_SHORTEST_WAIT: Final = 0.05
_LONGEST_WAIT: Final = 1.0
"""Seconds until a datagram is sent again; and at least five times before anyone is given up."""

_DATAGRAMS_PER_STREAM: Final = 2
"""Of a dense tensor, at least: more streams would send a small tensor in more datagrams."""


class Outgoing(NamedTuple):
    """A datagram, and the number of the aggregator that it goes to.

    Attributes:
        is_again: whether it, or what it asks about, was sent before.
    """

    aggregator: int
    datagram: bytearray
    is_again: bool = False


class Totals(NamedTuple):
    """What one tensor took.

    Attributes:
        union_blocks: whose sums have come.
        rounds: of all streams.
    """

    union_blocks: int
    rounds: int


class Worker:
    """One rank in one session, one tensor after the other.

    Args:
        seals: of the session, one for each aggregator.
        rank: of this worker.
        slots: of each, used at the same time.
        payload_bytes: of the longest datagram.
        lost_after_seconds: how long an aggregator may be silent while it is asked.
        timeout_seconds: how long ranks that live may be late.
    """

    def __init__(
        self,
        seals: Sequence[Seal],
        *,
        rank: int,
        slots: int,
        payload_bytes: int,
        lost_after_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self._seals = seals
        self._rank = rank
        self._aggregators = len(seals)
        self._slots = slots
        self._payload_bytes = payload_bytes
        self._lost_after = lost_after_seconds
        self._timeout = timeout_seconds
        self._rounds: dict[tuple[int, int], int] = {}
        self._tensors = 0
        self._union_blocks = self._finished_rounds = 0
        self._heard = [0.0] * len(seals)
        self._patience = _Patience(min(_LONGEST_WAIT, lost_after_seconds / 5))
        self._streams: dict[tuple[int, int], _Stream] = {}

    @property
    def is_done(self) -> bool:
        """Whether all sums of the tensor are there."""
        return not self._streams

    def begin(
        self,
        blocks: BlockRows,
        nonzero: npt.NDArray[np.bool_],
        *,
        element: int,
        operation: Operation,
        now: float,
    ) -> list[Outgoing]:
        """What to send first of a tensor, alike on all ranks but for its values.

        Args:
            blocks: of the tensor; sums are written to them.
            nonzero: a boolean for each block: whether it is sent.
            element: code of the type in `ELEMENTS`.
            operation: what becomes of the ranks' elements.
            now: seconds of any clock that only goes on.
        """
        assert self.is_done  # noqa: S101 - the caller waits for the end of one tensor
        block_bytes = blocks.block_size * blocks.itemsize
        header = Header(
            Kind.DATA,
            element=element,
            operation=operation,
            rank=self._rank,
            tensor=self._tensors % 2**32,
            capacity=blocks_per_datagram(self._payload_bytes, block_bytes),
            elements=blocks.elements,
            block_size=blocks.block_size,
        )
        self._blocks, self._header = blocks, header
        self._union_blocks = self._finished_rounds = 0
        self._began = now
        self._heard = [now] * self._aggregators
        self._streams = self._deal(nonzero)
        self._tensors += 1
        return [self._send(stream, now) for stream in self._streams.values()]

    def receive(self, aggregator: int, message: Message, now: float) -> list[Outgoing] | None:
        """What to send after a message; None after one that says nothing new.

        Args:
            aggregator: number of the one that it came from.
            message: whose seal was right.
            now: seconds.

        Raises:
            AggregationError: the session is over.
            ConfigError: the ranks have different tensors.
        """
        header = message.header
        if header.aggregator != aggregator:
            return None
        if header.kind == Kind.FAILED:
            is_theirs = message.text.startswith(DIFFERENT)
            raise (ConfigError if is_theirs else AggregationError)(message.text)
        stream = self._streams.get((aggregator, header.slot))
        if stream is None or header.round != stream.round:
            return None
        if header.kind == Kind.RESULT:
            return self._take(stream, message, now)
        if header.kind == Kind.WAITING and header.rank == self._rank:
            self._heard[aggregator] = now
            stream.missing = message.ranks
            stream.datagram = self._seals[aggregator].close(
                stream.header._replace(kind=Kind.ASK, filled=0)
            )
        return None

    def tick(self, now: float) -> list[Outgoing]:
        """What to send again. Call it when `due` has come.

        Raises:
            AggregationError: an aggregator is silent, or ranks are too late.
        """
        if self.is_done:
            return []
        waiting = {stream.aggregator for stream in self._streams.values()}
        silent = [each for each in sorted(waiting) if now - self._heard[each] > self._lost_after]
        if silent:
            raise AggregationError(
                f"aggregator {silent[0]} has not answered rank {self._rank} for "
                f"{self._lost_after:g} seconds"
            )
        if now - self._began > self._timeout:
            missing = sorted({rank for each in self._streams.values() for rank in each.missing})
            late = f"waits for {ranks_text(missing)}" if missing else "has not got all sums"
            raise AggregationError(
                f"rank {self._rank} still {late} after {self._timeout:g} seconds"
            )
        again = []
        for stream in self._streams.values():
            if stream.due <= now:
                stream.is_repeated = True
                stream.wait = min(stream.wait * 2, self._patience.longest)
                stream.due = now + stream.wait
                self._patience.had_to(stream.wait)
                again.append(Outgoing(stream.aggregator, stream.datagram, is_again=True))
        return again

    def due(self) -> float:
        """When to call `tick`, seconds of the clock; only while sums are missing."""
        return min(stream.due for stream in self._streams.values())

    def totals(self) -> Totals:
        """Of the tensor that came last."""
        return Totals(self._union_blocks, self._finished_rounds)

    def _deal(self, nonzero: npt.NDArray[np.bool_]) -> "dict[tuple[int, int], _Stream]":
        """Gives every stream a slot. The first one moves on to the next aggregator with each
        tensor, or one aggregator would have all the small ones.
        """
        datagrams = -(-self._blocks.count // self._header.capacity)
        count = max(1, min(self._aggregators * self._slots, -(-datagrams // _DATAGRAMS_PER_STREAM)))
        streams = {}
        for number, numbers in enumerate(self._blocks.deal(nonzero, count)):
            aggregator = (number + self._header.tensor) % self._aggregators
            slot = number // self._aggregators
            header = self._header._replace(aggregator=aggregator, slot=slot, streams=count)
            streams[aggregator, slot] = _Stream(
                header, numbers, self._rounds.get((aggregator, slot), 0)
            )
        return streams

    def _take(self, stream: "_Stream", message: Message, now: float) -> list[Outgoing] | None:
        """Writes the sums of a round back, and goes on."""
        if message.header.tensor_fields != stream.header.tensor_fields or not message.has_blocks:
            return None
        numbers, sums = message.blocks()
        self._blocks.write(numbers, sums)
        self._union_blocks += len(numbers)
        self._finished_rounds += 1
        self._heard[stream.aggregator] = now
        if not stream.is_repeated:  # or nobody knows which of the two was answered (Karn)
            self._patience.saw(now - stream.sent)
        stream.round += 1
        self._rounds[stream.aggregator, stream.header.slot] = stream.round
        if message.header.next == END:
            del self._streams[stream.aggregator, stream.header.slot]
            return []
        return [self._send(stream, now, until=message.header.next)]

    def _send(self, stream: "_Stream", now: float, *, until: int | None = None) -> Outgoing:
        """The datagram of a stream's round.

        Args:
            stream: at its round.
            now: seconds.
            until: from where all ranks go on; None at the beginning.
        """
        begins = until is None or until == stream.next
        numbers = stream.advance() if begins else stream.nothing
        header = stream.header._replace(filled=len(numbers), round=stream.round, next=stream.next)
        stream.header, stream.missing, stream.is_repeated = header, [], False
        stream.datagram = self._seals[stream.aggregator].close_blocks(
            header, numbers, lambda into: self._blocks.read(numbers, into)
        )
        stream.sent, stream.wait = now, self._patience.seconds
        stream.due = now + stream.wait
        return Outgoing(stream.aggregator, stream.datagram)


class _Stream:
    """One stream of a tensor's blocks, on its way.

    Attributes:
        header: of the round's datagram.
        round: of the slot.
        next: number of the first block that is not sent yet; END after the last.
        datagram: to send again if nobody answers.
        due: when to do so.
        wait: seconds after which it was due.
        sent: when it was sent first.
        is_repeated: whether it was sent again.
        missing: ranks that the aggregator waits for, as it has said.
    """

    def __init__(self, header: Header, numbers: Numbers, round_: int) -> None:
        self.header = header
        self.aggregator = header.aggregator
        self.round = round_
        self.datagram = bytearray()
        self.due = self.wait = self.sent = 0.0
        self.is_repeated = False
        self.missing: list[int] = []
        self._numbers = numbers
        self._done = 0

    @property
    def nothing(self) -> Numbers:
        """No blocks."""
        return self._numbers[:0]

    @property
    def next(self) -> int:
        return int(self._numbers[self._done]) if self._done < len(self._numbers) else END

    def advance(self) -> Numbers:
        """The blocks that come next, as many as fit into a datagram."""
        first, self._done = self._done, self._done + self.header.capacity
        return self._numbers[first : self._done]


class _Patience:
    """How long to wait for an answer: four deviations more than is usual (RFC 6298).

    Attributes:
        longest: that it may be, seconds.
        seconds: of the next wait.
    """

    def __init__(self, longest: float) -> None:
        self.longest = longest
        self.seconds = min(_FIRST_WAIT, longest)
        self._usual: float | None = None
        self._deviation = 0.0

    def had_to(self, wait: float) -> None:
        """Takes what a datagram waits that was sent again. On a link that is slower than the first
        wait, all of them are sent again, and there is nothing else to learn from.
        """
        self.seconds = max(self.seconds, wait)

    def saw(self, seconds: float) -> None:
        """Takes how long an answer took."""
        if self._usual is None:
            self._usual, self._deviation = seconds, seconds / 2
        else:
            self._deviation += (abs(seconds - self._usual) - self._deviation) / 4
            self._usual += (seconds - self._usual) / 8
        wait = self._usual + 4 * self._deviation
        self.seconds = min(max(wait, _SHORTEST_WAIT), self.longest)
