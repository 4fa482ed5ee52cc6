"""The worker's side of the protocol: datagrams in, datagrams out.

Like `aggregator`, this module does no I/O and reads no clock. The worker deals the nonzero blocks
of a tensor out to streams. Each stream uses one slot of an aggregator until its last sums arrive:

    sends     its first blocks, as many as fit, and the number of its first block after them
    receives  sums, which it writes back, and the number of the block where the next round begins
    sends     further blocks, as before, if its next block has that number; otherwise no blocks, and
              the number of its next block once more
    ...       until no rank has a next block

The worker resends a datagram that is not answered, at growing intervals.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from graphstash.errors import ConfigError, GraphstashError
from graphstash.training.reduce.aggregators.aggregator import DIFFERENT, ranks_text
from graphstash.training.reduce.aggregators.datagrams import (
    END,
    Header,
    Kind,
    Message,
    Numbers,
    Operation,
    Seal,
    Values,
    blocks_per_datagram,
)

__all__ = ["AggregationError", "BlockRows", "Outgoing", "Totals", "Worker"]

_FIRST_RESEND_SECONDS: Final = 0.1
_MIN_RESEND_SECONDS: Final = 0.05
_MAX_RESEND_SECONDS: Final = 1.0
"""Seconds until a datagram is resent: the first wait, and limits of later waits. No wait is over a
fifth of `lost_after_seconds`, so a worker sends a datagram about five times or more before the
aggregator counts as dead."""

_DATAGRAMS_PER_STREAM: Final = 2
"""Approximate number of datagrams that a stream sends for a dense tensor; more if there are too few
slots for such short streams. Even a stream without nonzero blocks sends one datagram, so shorter
streams would cost a sparse tensor more datagrams."""


class BlockRows:
    """Reads and writes the blocks of a contiguous, one-dimensional array of a wire type.

    Of n streams, stream i has the blocks i, i + n, i + 2n, and so on. Clustered nonzero blocks are
    therefore spread over all streams. The last of the `count` blocks may be shorter.
    """

    def __init__(self, flat: Values, block_size: int) -> None:
        whole = len(flat) // block_size
        self.elements = len(flat)
        self.block_size = block_size
        self.itemsize = flat.itemsize
        self.count = -(-len(flat) // block_size)
        self._rows = flat[: whole * block_size].reshape(whole, block_size)
        self._tail = flat[whole * block_size :]

    def deal(self, nonzero: npt.NDArray[np.bool_], streams: int) -> list[Numbers]:
        """Return each stream's numbers of nonzero blocks, ascending."""
        table = np.zeros(-(-self.count // streams) * streams, np.bool_)
        table[: self.count] = nonzero
        stream, row = np.nonzero(table.reshape(-1, streams).T)
        numbers = (row * streams + stream).astype(np.uint32)
        return np.split(numbers, np.searchsorted(stream, np.arange(1, streams)))

    def read(self, numbers: Numbers, into: Values) -> None:
        """Copy the blocks with ascending `numbers` to the zeros [len(numbers), block_size]."""
        whole = self._whole_of(numbers)
        np.take(self._rows, numbers[:whole], axis=0, out=into[:whole], mode="clip")
        if whole < len(numbers):
            into[whole, : len(self._tail)] = self._tail

    def write(self, numbers: Numbers, values: Values) -> None:
        """Write values to the blocks; the inverse of `read`."""
        whole = self._whole_of(numbers)
        self._rows[numbers[:whole]] = values[:whole]
        if whole < len(numbers):
            self._tail[:] = values[whole, : len(self._tail)]

    def _whole_of(self, numbers: Numbers) -> int:
        ends_short = len(numbers) > 0 and int(numbers[-1]) == len(self._rows)
        return len(numbers) - ends_short


class AggregationError(GraphstashError, RuntimeError):
    """A worker or an aggregator is dead, late or inconsistent. The message names it.

    Every rank raises it. The tensor contains only some of the sums, and the session is over: create
    another `AggregatedAllReduce`.
    """


class Outgoing(NamedTuple):
    """A datagram for the aggregator with this number. `is_resend` marks a datagram sent before, and
    an ASK about one.
    """

    aggregator: int
    datagram: bytearray
    is_resend: bool = False


class Totals(NamedTuple):
    """Blocks of a tensor that any rank sent, and rounds of all streams."""

    union_blocks: int
    rounds: int


class Worker:
    """One rank in one session. Reduces one tensor at a time.

    It uses up to `slots` slots of each aggregator. An aggregator counts as dead after
    `lost_after_seconds` without an answer. The sums of a tensor must arrive within
    `timeout_seconds`, even if a rank that is alive begins late.
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
        self._last_heard = [0.0] * len(seals)
        self._resend_timeout = _ResendTimeout(min(_MAX_RESEND_SECONDS, lost_after_seconds / 5))
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

        `blocks` receives the sums, and `nonzero` selects the blocks to send. Values, `nonzero` and
        `now` may differ between ranks; everything else must be equal. `element` is the code of the
        type in `ELEMENTS`. `now` is in seconds of any monotonic clock.
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
        self._last_heard = [now] * self._aggregators
        self._streams = self._deal(nonzero)
        self._tensors += 1
        return [self._send(stream, now) for stream in self._streams.values()]

    def receive(self, aggregator: int, message: Message, now: float) -> list[Outgoing] | None:
        """Process a message with a valid seal, and return the datagrams to send. Return None if the
        message contains no new sums.

        Raises:
            AggregationError: the aggregator reports that the session has failed.
            ConfigError: the aggregator reports that the ranks have different tensors.
        """
        header = message.header
        if header.aggregator != aggregator:
            return None
        if header.kind == Kind.FAILED:
            is_callers_fault = message.text.startswith(DIFFERENT)
            raise (ConfigError if is_callers_fault else AggregationError)(message.text)
        stream = self._streams.get((aggregator, header.slot))
        if stream is None or header.round != stream.round:
            return None
        if header.kind == Kind.RESULT:
            return self._store_sums(stream, message, now)
        if header.kind == Kind.WAITING and header.rank == self._rank:
            self._last_heard[aggregator] = now
            stream.missing = message.ranks
            stream.datagram = self._seals[aggregator].close(
                stream.header._replace(kind=Kind.ASK, filled=0)
            )
        return None

    def tick(self, now: float) -> list[Outgoing]:
        """Return the datagrams to resend. Call it at the time that `due` returns.

        Raises:
            AggregationError: an aggregator counts as dead, or the sums have not arrived in time.
        """
        if self.is_done:
            return []
        waiting = {stream.aggregator for stream in self._streams.values()}
        silent = [
            each for each in sorted(waiting) if now - self._last_heard[each] > self._lost_after
        ]
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
                stream.wait = min(stream.wait * 2, self._resend_timeout.longest)
                stream.due = now + stream.wait
                self._resend_timeout.record_resend(stream.wait)
                again.append(Outgoing(stream.aggregator, stream.datagram, is_resend=True))
        return again

    def due(self) -> float:
        """Return the time of the next `tick`. Call it only while `is_done` is false."""
        return min(stream.due for stream in self._streams.values())

    def totals(self) -> Totals:
        """Return the counts of the latest tensor."""
        return Totals(self._union_blocks, self._finished_rounds)

    def _deal(self, nonzero: npt.NDArray[np.bool_]) -> "dict[tuple[int, int], _Stream]":
        """Assign blocks and a slot to every stream. The first stream of each tensor uses the next
        aggregator. Otherwise one aggregator would get all small tensors.
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

    def _store_sums(self, stream: "_Stream", message: Message, now: float) -> list[Outgoing] | None:
        if message.header.tensor_fields != stream.header.tensor_fields or not message.has_blocks:
            return None
        numbers, sums = message.blocks()
        self._blocks.write(numbers, sums)
        self._union_blocks += len(numbers)
        self._finished_rounds += 1
        self._last_heard[stream.aggregator] = now
        if not stream.is_repeated:  # after a resend, the round trip is ambiguous (Karn)
            self._resend_timeout.record_round_trip(now - stream.sent)
        stream.round += 1
        self._rounds[stream.aggregator, stream.header.slot] = stream.round
        if message.header.next == END:
            del self._streams[stream.aggregator, stream.header.slot]
            return []
        return [self._send(stream, now, start=message.header.next)]

    def _send(self, stream: "_Stream", now: float, *, start: int | None = None) -> Outgoing:
        """Begin a round at block `start`, and return its datagram, without blocks if the stream's
        next block is a later one. `start` is None in the first round.
        """
        begins = start is None or start == stream.next
        numbers = stream.advance() if begins else stream.nothing
        header = stream.header._replace(filled=len(numbers), round=stream.round, next=stream.next)
        stream.header, stream.missing, stream.is_repeated = header, [], False
        stream.datagram = self._seals[stream.aggregator].close_blocks(
            header, numbers, lambda into: self._blocks.read(numbers, into)
        )
        stream.sent, stream.wait = now, self._resend_timeout.seconds
        stream.due = now + stream.wait
        return Outgoing(stream.aggregator, stream.datagram)


class _Stream:
    """One stream of a tensor's blocks.

    Attributes:
        next: Number of the next block to send, END after the last one.
        due: Time of the next resend, `wait` seconds after the previous send.
        sent: Time of the first send in this round.
        missing: Ranks for which the aggregator waits, by its last WAITING of this round.
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


class _ResendTimeout:
    """Seconds until a resend: the mean round trip plus four deviations (RFC 6298)."""

    def __init__(self, longest: float) -> None:
        self.longest = longest
        self.seconds = min(_FIRST_RESEND_SECONDS, longest)
        self._mean: float | None = None
        self._deviation = 0.0

    def record_resend(self, wait: float) -> None:
        """Raise the wait to that of a resend. On a link slower than the first wait, each datagram
        is resent, and no round trip can be measured.
        """
        self.seconds = max(self.seconds, wait)

    def record_round_trip(self, seconds: float) -> None:
        if self._mean is None:
            self._mean, self._deviation = seconds, seconds / 2
        else:
            self._deviation += (abs(seconds - self._mean) - self._deviation) / 4
            self._mean += (seconds - self._mean) / 8
        wait = self._mean + 4 * self._deviation
        self.seconds = min(max(wait, _MIN_RESEND_SECONDS), self.longest)
