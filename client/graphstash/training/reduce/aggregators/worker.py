"""The worker's side of the protocol: datagrams in, datagrams out.

Like `aggregator`, it does no I/O and reads no clock. The worker deals the blocks of a tensor out
to streams. Each stream uses one slot of an aggregator until its last sums have arrived:

    sends     its first nonzero blocks, as many as fit, and the number of the block after them
    receives  sums, which it writes back, and the number at which all ranks continue
    sends     its next blocks if they begin at that number; otherwise no blocks and the same number
    ...       until no rank has a next block

The worker resends a datagram that is not answered, at growing intervals.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from graphstash.errors import ConfigError, GraphstashError
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

__all__ = ["AggregationError", "Outgoing", "Totals", "Worker"]

_FIRST_WAIT: Final = 0.1
_SHORTEST_WAIT: Final = 0.05
_LONGEST_WAIT: Final = 1.0
"""Seconds until a datagram is resent: the first, the shortest and the longest wait. The longest
is also at most a fifth of `lost_after_seconds`: five resends before a process counts as dead.
"""

_DATAGRAMS_PER_STREAM: Final = 2
"""Minimum for a dense tensor. More streams would split a small tensor into more datagrams."""


class AggregationError(GraphstashError, RuntimeError):
    """A worker or an aggregator is dead, late or inconsistent with the others; names it.

    Every rank gets the error. The tensor holds sums only in part, and the session is over: create
    another `AggregatedAllReduce`.
    """


class Outgoing(NamedTuple):
    """A datagram for the aggregator with this number. `is_again` marks a resend, or an ASK about a
    datagram that was sent before.
    """

    aggregator: int
    datagram: bytearray
    is_again: bool = False


class Totals(NamedTuple):
    """Blocks whose sums have arrived, and rounds of all streams, for one tensor."""

    union_blocks: int
    rounds: int


class Worker:
    """One rank in one session. Reduces one tensor at a time.

    `slots` is how many slots of each aggregator to use at the same time. An aggregator counts as
    dead after `lost_after_seconds` without an answer. Ranks that are alive may be late by
    `timeout_seconds`.
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
        """Whether all sums of the tensor have arrived."""
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
        """Start a tensor, and return the first datagrams to send.

        All ranks pass the same arguments, apart from the values in `blocks`, which receive the
        sums, and `nonzero`, the blocks to send. `element` is the code of their type in `ELEMENTS`.
        `now` is in seconds of any monotonic clock.
        """
        assert self.is_done  # noqa: S101 - the caller finishes a tensor before the next
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
        """Process a message with a valid seal, and return the datagrams to send. Return None if the
        message contains no news.

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
        """Return the datagrams to resend. Call it at the time that `due` returns.

        Raises:
            AggregationError: an aggregator does not answer, or ranks are too late.
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
                self._patience.record_resend(stream.wait)
                again.append(Outgoing(stream.aggregator, stream.datagram, is_again=True))
        return again

    def due(self) -> float:
        """Return when to call `tick`, in seconds of the clock. Sums must still be missing."""
        return min(stream.due for stream in self._streams.values())

    def totals(self) -> Totals:
        """Return the counts for the last tensor."""
        return Totals(self._union_blocks, self._finished_rounds)

    def _deal(self, nonzero: npt.NDArray[np.bool_]) -> "dict[tuple[int, int], _Stream]":
        """Assign a slot to every stream. The first stream moves on to the next aggregator with each
        tensor. Otherwise one aggregator would get all small tensors.
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
        if message.header.tensor_fields != stream.header.tensor_fields or not message.has_blocks:
            return None
        numbers, sums = message.blocks()
        self._blocks.write(numbers, sums)
        self._union_blocks += len(numbers)
        self._finished_rounds += 1
        self._heard[stream.aggregator] = now
        if not stream.is_repeated:  # after a resend, the round trip is ambiguous (Karn)
            self._patience.record_round_trip(now - stream.sent)
        stream.round += 1
        self._rounds[stream.aggregator, stream.header.slot] = stream.round
        if message.header.next == END:
            del self._streams[stream.aggregator, stream.header.slot]
            return []
        return [self._send(stream, now, until=message.header.next)]

    def _send(self, stream: "_Stream", now: float, *, until: int | None = None) -> Outgoing:
        """Return a round's datagram. All ranks continue at `until`; None in the first round."""
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
    """One stream of a tensor's blocks.

    Attributes:
        next: Number of the first block that is not sent yet; END after the last.
        due: Time of the next resend, which is `wait` seconds after the previous send.
        sent: Time of the first send in this round.
        missing: Ranks that the aggregator still waits for, by its last WAITING.
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
        return self._numbers[:0]

    @property
    def next(self) -> int:
        return int(self._numbers[self._done]) if self._done < len(self._numbers) else END

    def advance(self) -> Numbers:
        first, self._done = self._done, self._done + self.header.capacity
        return self._numbers[first : self._done]


class _Patience:
    """Seconds before a resend: the mean round trip plus four deviations (RFC 6298)."""

    def __init__(self, longest: float) -> None:
        self.longest = longest
        self.seconds = min(_FIRST_WAIT, longest)
        self._usual: float | None = None
        self._deviation = 0.0

    def record_resend(self, wait: float) -> None:
        """Raise the next wait to that of a resent datagram. On a link slower than the first wait,
        every datagram is resent, and no round trip can be measured.
        """
        self.seconds = max(self.seconds, wait)

    def record_round_trip(self, seconds: float) -> None:
        if self._usual is None:
            self._usual, self._deviation = seconds, seconds / 2
        else:
            self._deviation += (abs(seconds - self._usual) - self._deviation) / 4
            self._usual += (seconds - self._usual) / 8
        wait = self._usual + 4 * self._deviation
        self.seconds = min(max(wait, _SHORTEST_WAIT), self.longest)
