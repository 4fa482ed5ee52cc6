"""One rank's sockets in a session: the I/O for a `Worker`.

A thread sends a heartbeat five times per `lost_after_seconds`. Without it, aggregators would take
a rank with a long computation for dead.
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
from graphstash.training.reduce.aggregators.awake_clock import AwakeClock
from graphstash.training.reduce.aggregators.block_rows import BlockRows
from graphstash.training.reduce.aggregators.datagrams import (
    OVERHEAD_BYTES,
    Header,
    Kind,
    Operation,
    Seal,
)
from graphstash.training.reduce.aggregators.worker import AggregationError, Outgoing, Totals, Worker

__all__ = ["Client", "Counters", "PathLimits"]

_OPEN_AGAIN_SECONDS: Final = 0.1
_LARGEST_SECONDS: Final = 1.0
_LEAVE_SECONDS: Final = 1.0
_LEAVE_AGAIN_SECONDS: Final = 0.05
_LOOK_SECONDS: Final = 0.5

_MAX_WHY_BYTES: Final = 1000


@dataclass
class Counters:
    """UDP datagrams of this protocol that a rank has sent and received since the beginning.

    Bytes include the headers of this protocol. IP and UDP add 28 bytes per datagram (IPv6: 48).

    Attributes:
        sent_bytes: Bytes of datagrams with tensors, each counted once.
        sent_datagrams: Number of these datagrams.
        received_bytes: Bytes of datagrams with new sums.
        received_datagrams: Number of these datagrams.
        resent_bytes: Bytes of datagrams that were resent because no answer had arrived in time.
        resent_datagrams: Number of resends.
        ignored_datagrams: Number of datagrams without new sums: duplicates, late ones, WAITING,
            and datagrams without a valid seal.
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
    """How one rank reaches the aggregators: sizes of datagrams that reach all aggregators and come
    back, ascending, and the smallest receive buffer of this rank and the aggregators, in bytes.
    """

    payload_bytes: list[int]
    buffer_bytes: int


class Client:
    """The sockets of one rank. `addresses` and `seals` are ordered by aggregator number.

    A process counts as dead after `lost_after_seconds` of silence.

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
        self._clock = AwakeClock()
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
        """Begin the session with every aggregator, and find out which datagram sizes pass.

        Tries all `sizes`, in bytes, and stops a second after the first size has passed everywhere.

        Raises:
            AggregationError: an aggregator does not answer, or refuses the session.
        """
        passed: list[set[int]] = [set() for _ in self._addresses]
        buffers = [sockets.receive_buffer_of(each) for each in self._sockets]
        began = again = since = time.monotonic()
        while True:
            now = time.monotonic()
            common = set.intersection(*passed)
            since = since if common else now
            if set(sizes) <= common or now - since > _LARGEST_SECONDS:
                break
            if now - began > self._lost_after:
                lost = next(number for number, each in enumerate(passed) if not each)
                host, port = self._addresses[lost]
                raise AggregationError(
                    f"aggregator {lost} at {host}:{port} has not answered rank {self._rank} for "
                    f"{self._lost_after:g} seconds: the address has to be one that every rank "
                    "reaches by UDP"
                )
            if now >= again:
                again = now + _OPEN_AGAIN_SECONDS
                for number in range(len(passed)):
                    self._send_open(number, set(sizes) - passed[number])
            for number, datagram in self._received(again - now):
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
        look: Callable[[], None],
    ) -> Totals:
        """Reduce a tensor over all ranks, in place; see `Worker.begin`.

        Calls `look` about every half second; it raises if waiting has become useless.

        Raises:
            AggregationError: the session is over.
        """
        now = looked = self._clock()
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
            if now - looked > _LOOK_SECONDS:
                looked = now
                look()
        return worker.totals()

    def leave(self, why: str = "") -> None:
        """Tell the aggregators that this rank is done, or why it gives up, and disconnect."""
        self._closing.set()
        until = time.monotonic() + _LEAVE_SECONDS
        missing = set(range(len(self._sockets)))
        while missing and time.monotonic() < until:
            for number in sorted(missing):
                header = Header(Kind.LEAVE, rank=self._rank, aggregator=number)
                farewell = self._seals[number].close(header, why.encode()[:_MAX_WHY_BYTES])
                sockets.send(self._sockets[number], farewell)
            missing -= self._await_leaves(time.monotonic() + _LEAVE_AGAIN_SECONDS, len(missing))
        if self._thread.ident is not None:
            self._thread.join()
        self._close_sockets()

    def _await_leaves(self, until: float, missing: int) -> set[int]:
        """Return the aggregators that have confirmed LEAVE or are gone."""
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
        """Yield aggregator numbers and datagrams. Waits up to `seconds` for the first."""
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
