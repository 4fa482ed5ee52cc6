"""One rank's UDP sockets in a session: the I/O for a `Worker`.

A thread sends five heartbeats per `lost_after_seconds`. Otherwise the aggregators would declare a
rank dead during a long computation.
"""

import selectors
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from graphstash.training.reduce.aggregators import sockets
from graphstash.training.reduce.aggregators.datagrams import (
    OVERHEAD_BYTES,
    Header,
    Kind,
    Operation,
    Seal,
)
from graphstash.training.reduce.aggregators.worker import (
    AggregationError,
    BlockRows,
    Outgoing,
    Totals,
    Worker,
)

__all__ = ["Client", "Counters", "PathLimits"]

_OPEN_RETRY_SECONDS: Final = 0.1
_PROBE_SECONDS: Final = 1.0
_LEAVE_TIMEOUT_SECONDS: Final = 1.0
_LEAVE_RETRY_SECONDS: Final = 0.05
_CHECK_SECONDS: Final = 0.5

_MAX_REASON_BYTES: Final = 1000


@dataclass
class Counters:
    """Datagrams of one rank's reductions in a session. Heartbeats, OPEN and LEAVE are not counted.

    Bytes include this protocol's headers. IP and UDP add 28 bytes per datagram (IPv6: 48).

    Attributes:
        sent_bytes: Bytes of datagrams with tensors, without resends.
        sent_datagrams: Number of these datagrams.
        received_bytes: Bytes of datagrams with new sums.
        received_datagrams: Number of these datagrams.
        resent_bytes: Bytes of datagrams that were sent because an answer was overdue.
        resent_datagrams: Number of these datagrams.
        ignored_datagrams: Number of received datagrams without new sums: duplicates, late
            datagrams, WAITING, and datagrams without a valid seal.
    """

    sent_bytes: int = 0
    sent_datagrams: int = 0
    received_bytes: int = 0
    received_datagrams: int = 0
    resent_bytes: int = 0
    resent_datagrams: int = 0
    ignored_datagrams: int = 0


@dataclass
class PathLimits:
    """Limits of the path between one rank and all aggregators, in bytes."""

    payload_bytes: list[int]
    """Datagram sizes that reach every aggregator and return, ascending."""
    buffer_bytes: int
    """The smallest receive buffer of the rank and the aggregators."""


class Client:
    """The sockets of one rank. `addresses` and `seals` are ordered by aggregator number.

    Aggregators declare a rank dead after `lost_after_seconds` of silence, and ranks an aggregator.

    Raises:
        ConfigError: an address is invalid or not routable.
    """

    def __init__(
        self,
        addresses: Sequence[sockets.Address],
        seals: Sequence[Seal],
        *,
        rank: int,
        world: int,
        lost_after_seconds: float,
        counters: Counters,
    ) -> None:
        self._counters = counters
        self._addresses = addresses
        self._seals = seals
        self._rank = rank
        self._world = world
        self._lost_after = lost_after_seconds
        self._selector = selectors.DefaultSelector()
        self._sockets = []
        self._clock = sockets.AwakeClock()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._send_heartbeats, name="graphstash-alive", daemon=True
        )
        try:
            for number, address in enumerate(addresses):
                self._sockets.append(sockets.connected(address))
                self._selector.register(self._sockets[-1], selectors.EVENT_READ, number)
        except BaseException:
            self._close_sockets()
            raise

    def open(self, sizes: Sequence[int]) -> PathLimits:
        """Open the session with every aggregator, and measure which datagram sizes pass.

        Tries all `sizes`, in bytes, for at most a second after a first size has passed to every
        aggregator and back.

        Raises:
            AggregationError: an aggregator does not answer, or refuses the session.
        """
        passed: list[set[int]] = [set() for _ in self._addresses]
        buffers = [sockets.receive_buffer_of(each) for each in self._sockets]
        began = next_open = since = time.monotonic()
        while True:
            now = time.monotonic()
            common = set.intersection(*passed)
            since = since if common else now
            if set(sizes) <= common or now - since > _PROBE_SECONDS:
                break
            if now - began > self._lost_after:
                lost = next(number for number, each in enumerate(passed) if not each)
                host, port = self._addresses[lost]
                raise AggregationError(
                    f"aggregator {lost} at {host}:{port} has not answered rank {self._rank} for "
                    f"{self._lost_after:g} seconds: the address has to be one that every rank "
                    "reaches by UDP"
                )
            if now >= next_open:
                next_open = now + _OPEN_RETRY_SECONDS
                for number in range(len(passed)):
                    self._send_open(number, set(sizes) - passed[number])
            for number, datagram in self._received(next_open - now):
                message = self._seals[number].open(datagram)
                if message is None:
                    continue
                if message.header.kind == Kind.FAILED:
                    raise AggregationError(message.text)
                if message.header.kind == Kind.WELCOME:
                    passed[number].add(len(datagram))
                    buffers.append(message.header.elements)
        self._thread.start()
        return PathLimits(sorted(common), min(buffers))

    def reduce(
        self,
        worker: Worker,
        blocks: BlockRows,
        nonzero: npt.NDArray[np.bool_],
        *,
        element: int,
        operation: Operation,
        check: Callable[[], None],
    ) -> Totals:
        """Reduce a tensor over all ranks, in place; see `Worker.begin`.

        Calls `check` about every half second. It raises an error to end the wait.

        Raises:
            AggregationError: the session is over.
            ConfigError: the ranks have different tensors.
        """
        now = checked = self._clock()
        self._send(worker.begin(blocks, nonzero, element=element, operation=operation, now=now))
        while not worker.is_done:
            due = worker.due()
            for number, datagram in self._received(due - now):
                message = self._seals[number].open(datagram)
                now = self._clock()
                answer = worker.receive(number, message, now) if message is not None else None
                if answer is None:
                    self._counters.ignored_datagrams += 1
                    continue
                self._counters.received_bytes += len(datagram)
                self._counters.received_datagrams += 1
                self._send(answer)
            now = self._clock()
            if now >= due:
                self._send(worker.tick(now))
            if now - checked > _CHECK_SECONDS:
                checked = now
                check()
        return worker.totals()

    def leave(self, reason: str = "") -> None:
        """Send LEAVE until every aggregator has answered, for at most a second. Close the sockets.

        A rank that gives up sends its `reason`.
        """
        self._closing.set()
        until = time.monotonic() + _LEAVE_TIMEOUT_SECONDS
        missing = set(range(len(self._sockets)))
        while missing and time.monotonic() < until:
            for number in sorted(missing):
                header = Header(Kind.LEAVE, rank=self._rank, aggregator=number)
                datagram = self._seals[number].close(header, reason.encode()[:_MAX_REASON_BYTES])
                sockets.send(self._sockets[number], datagram)
            missing -= self._await_leaves(time.monotonic() + _LEAVE_RETRY_SECONDS, len(missing))
        if self._thread.ident is not None:
            self._thread.join()
        self._close_sockets()

    def _await_leaves(self, until: float, missing: int) -> set[int]:
        """Return the aggregators that have confirmed LEAVE or whose port is closed."""
        gone: set[int] = set()
        while len(gone) < missing and (now := time.monotonic()) < until:
            for key, _ in self._selector.select(until - now):
                if sockets.is_refused(self._sockets[key.data]):
                    gone.add(key.data)
                for datagram, _ in sockets.received(self._sockets[key.data]):
                    message = self._seals[key.data].open(datagram)
                    if message is not None and message.header.kind == Kind.LEFT:
                        gone.add(key.data)
        return gone

    def _received(self, seconds: float) -> Iterator[tuple[int, bytes]]:
        """Yield aggregator numbers and datagrams. Wait up to `seconds` for the first datagram."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            for datagram, _ in sockets.received(self._sockets[key.data]):
                yield key.data, datagram

    def _send(self, outgoing: Sequence[Outgoing]) -> None:
        for aggregator, datagram, is_resend in outgoing:
            sockets.send(self._sockets[aggregator], datagram)
            if is_resend:
                self._counters.resent_bytes += len(datagram)
                self._counters.resent_datagrams += 1
            else:
                self._counters.sent_bytes += len(datagram)
                self._counters.sent_datagrams += 1

    def _send_open(self, aggregator: int, sizes: set[int]) -> None:
        header = Header(
            Kind.OPEN,
            rank=self._rank,
            aggregator=aggregator,
            filled=self._world,
            round=int(self._lost_after * 1000),
        )
        for size in sizes:
            body = bytes(size - OVERHEAD_BYTES)
            sockets.send(self._sockets[aggregator], self._seals[aggregator].close(header, body))

    def _send_heartbeats(self) -> None:
        count = 0
        while not self._closing.wait(self._lost_after / 5):
            count += 1
            for number, seal in enumerate(self._seals):
                header = Header(Kind.ALIVE, rank=self._rank, aggregator=number, round=count)
                sockets.send(self._sockets[number], seal.close(header))

    def _close_sockets(self) -> None:
        self._selector.close()
        for each in self._sockets:
            each.close()
