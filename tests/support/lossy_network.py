"""Workers and aggregators in one process, on a network that loses, doubles, delays and reorders.

Time is a number here, so two runs with one seed are equal.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from graphstash.errors import GraphstashError
from graphstash.training.reduce.aggregators.aggregator import Aggregator, Reply
from graphstash.training.reduce.aggregators.datagrams import Header, Kind, Operation, Seal
from graphstash.training.reduce.aggregators.worker import BlockRows, Outgoing, Totals, Worker


class Faults(NamedTuple):
    """Faults of datagrams.

    Attributes:
        drop: share of lost datagrams, 0 to 1.
        double: share of duplicated datagrams.
        delay: mean seconds; each datagram has its own delay, so datagrams overtake each other.
        late: share with a hundredfold delay.
    """

    drop: float = 0.0
    double: float = 0.0
    delay: float = 0.001
    late: float = 0.0


_NO_FAULTS: Final = Faults()


class Network:
    """Workers and aggregators of one session.

    Attributes:
        workers: by rank.
        aggregators: by number.
        now: seconds.
        sent_bytes: bytes of each rank's first transmissions.
        received_bytes: bytes of the sums that each rank could use.
        resent: number of repeated datagrams.
        resent_bytes: bytes of repeated datagrams.
        failures: error of each rank whose sum failed.
        dead: ranks that neither send nor receive any more.
        dead_aggregators: aggregators that neither send nor receive any more.
        tap: called with each datagram before its delivery; may add others.
    """

    def __init__(
        self,
        seed: int,
        *,
        world: int,
        aggregators: int,
        slots: int = 3,
        payload_bytes: int = 300,
        faults: Faults = _NO_FAULTS,
        has_one_key: bool = False,
        lost_after_seconds: float = 1e9,
        timeout_seconds: float = 1e9,
    ) -> None:
        keys = [bytes(32) if has_one_key else bytes([number] * 32) for number in range(aggregators)]
        self.seals = [Seal(key, seed) for key in keys]
        self.aggregators = [
            Aggregator(
                seal, number=number, world=world, now=0.0, lost_after_seconds=lost_after_seconds
            )
            for number, seal in enumerate(self.seals)
        ]
        self.workers = [
            Worker(
                self.seals,
                rank=rank,
                slots=slots,
                payload_bytes=payload_bytes,
                lost_after_seconds=lost_after_seconds,
                timeout_seconds=timeout_seconds,
            )
            for rank in range(world)
        ]
        self.now = 0.0
        self.sent_bytes = [0] * world
        self.received_bytes = [0] * world
        self.resent = self.resent_bytes = 0
        self.failures: dict[int, GraphstashError] = {}
        self.dead: set[int] = set()
        self.dead_aggregators: set[int] = set()
        self._alive = 0
        self.tap: Callable[[str, int, int, bytes], None] = lambda *_: None
        self._random = random.Random(seed)
        self._faults = faults
        self._numbers = itertools.count()
        self._under_way: list[tuple[float, int, str, int, int, bytes]] = []
        for rank, aggregator in itertools.product(range(world), range(aggregators)):
            header = Header(Kind.OPEN, rank=rank, aggregator=aggregator, filled=world)
            self.deliver("aggregator", rank, aggregator, self.seals[aggregator].close(header))

    def sum(
        self,
        tensors: list[npt.NDArray[Any]],
        nonzero: list[npt.NDArray[np.bool_]],
        *,
        block_size: int | list[int],
        element: int = 1,
        operation: Operation = Operation.SUM,
        starts: list[float] | None = None,
    ) -> list[Totals]:
        """Add up a tensor of each rank, in place.

        Args:
            tensors: by rank.
            nonzero: by rank, a boolean for each block.
            block_size: elements of a block; a list has one size for each rank.
            element: code of the type.
            operation: SUM or MAX.
            starts: seconds from now until each rank begins.
        """
        sizes = block_size if isinstance(block_size, list) else [block_size] * len(self.workers)
        waiting = sorted(
            (self.now + start, rank)
            for rank, start in enumerate(starts or [0.0] * len(self.workers))
        )
        second = self.now + 1
        while waiting or any(True for _ in self._busy()):
            due = min((worker.due() for _, worker in self._busy()), default=math.inf)
            begin = waiting[0][0] if waiting else math.inf
            arrival = self._under_way[0][0] if self._under_way else math.inf
            self.now = max(self.now, min(due, begin, arrival, second))
            if begin <= self.now:
                _, rank = waiting.pop(0)
                if rank in self.dead or rank in self.failures:
                    continue
                blocks = BlockRows(tensors[rank], sizes[rank])
                first = self.workers[rank].begin(
                    blocks, nonzero[rank], element=element, operation=operation, now=self.now
                )
                self._post(rank, first)
            elif arrival <= self.now:
                _, _, to, rank, aggregator, datagram = heapq.heappop(self._under_way)
                self.tap(to, rank, aggregator, datagram)
                self.deliver(to, rank, aggregator, datagram)
            elif second <= self.now:
                second += 1
                self._live()
            else:
                for rank, worker in list(self._busy()):
                    try:
                        self._post(rank, worker.tick(self.now))
                    except GraphstashError as error:
                        self._give_up(rank, error)
        return [worker.totals() for worker in self.workers]

    def start_anew(self, number: int) -> None:
        """Replace an aggregator by one without the session's state, as a restart does."""
        self.aggregators[number] = Aggregator(
            self.seals[number],
            number=number,
            world=len(self.workers),
            now=self.now,
            lost_after_seconds=1e9,
        )
        for rank in range(len(self.workers)):
            header = Header(Kind.OPEN, rank=rank, aggregator=number)
            self.deliver("aggregator", rank, number, self.seals[number].close(header))

    def deliver(self, to: str, rank: int, aggregator: int, datagram: bytes | bytearray) -> None:
        """Deliver a datagram at once, to an "aggregator" from the rank, or to a "worker"."""
        message = self.seals[aggregator].open(datagram)
        if message is None or rank in self.dead or aggregator in self.dead_aggregators:
            return
        if to == "aggregator":
            self._reply(aggregator, self.aggregators[aggregator].receive(message, rank, self.now))
        elif not self.workers[rank].is_done and rank not in self.failures:
            try:
                answer = self.workers[rank].receive(aggregator, message, self.now)
            except GraphstashError as error:
                self._give_up(rank, error)
                return
            if answer is not None:
                self.received_bytes[rank] += len(datagram)
                self._post(rank, answer)

    def _busy(self) -> Iterator[tuple[int, Worker]]:
        for rank, worker in enumerate(self.workers):
            if not worker.is_done and rank not in self.dead and rank not in self.failures:
                yield rank, worker

    def _live(self) -> None:
        """Do the work of each second: ranks send ALIVE, and aggregators check for silent ranks."""
        self._alive += 1
        for number, aggregator in enumerate(self.aggregators):
            if number in self.dead_aggregators:
                continue
            self._reply(number, aggregator.tick(self.now))
            for rank in range(len(self.workers)):
                if rank not in self.dead and rank not in self.failures:
                    header = Header(Kind.ALIVE, rank=rank, aggregator=number, round=self._alive)
                    self._send("aggregator", rank, number, self.seals[number].close(header))

    def _give_up(self, rank: int, error: GraphstashError) -> None:
        self.failures[rank] = error
        for number, seal in enumerate(self.seals):
            header = Header(Kind.LEAVE, rank=rank, aggregator=number)
            self.deliver("aggregator", rank, number, seal.close(header, str(error).encode()))

    def _reply(self, aggregator: int, replies: list[Reply]) -> None:
        for rank, datagram in replies:
            self._send("worker", rank, aggregator, datagram)

    def _post(self, rank: int, outgoing: list[Outgoing]) -> None:
        for aggregator, datagram, is_resend in outgoing:
            self.resent += is_resend
            self.resent_bytes += len(datagram) if is_resend else 0
            self.sent_bytes[rank] += 0 if is_resend else len(datagram)
            self._send("aggregator", rank, aggregator, datagram)

    def _send(self, to: str, rank: int, aggregator: int, datagram: bytearray) -> None:
        faults, chance = self._faults, self._random.random
        for _ in range(2 if chance() < faults.double else 1):
            if chance() < faults.drop:
                continue
            delay = self._random.expovariate(1 / faults.delay)
            delay *= 100 if chance() < faults.late else 1
            item = (self.now + delay, next(self._numbers), to, rank, aggregator, bytes(datagram))
            heapq.heappush(self._under_way, item)
