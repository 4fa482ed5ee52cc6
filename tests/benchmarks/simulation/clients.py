"""The clients, as simpy processes. They use the product's own `WaitBudget` and `CircuitBreaker`.

A process follows `graphstash._compile.cache`: this host's disk, a download by one process of the
host, a lease, a wait, a compilation. A client that gets no answer in time compiles.
"""

from collections import Counter
from math import ceil
from typing import Any, NamedTuple

from benchmarks.simulation.servers import Answer, Connection, Flow
from benchmarks.simulation.settings import Bytes
from graphstash._compile.waiting import WaitBudget
from graphstash._http.circuit_breaker import CircuitBreaker
from graphstash.errors import BusyError

MAX_POLL_SECONDS = 20.0  # these are constants of graphstash._compile.cache
MIN_POLL_SECONDS = 0.5
POLL_SHARE = 0.1
FULL_SECONDS = 30.0
MIN_BUSY_SECONDS = 1.0  # of graphstash._compile.in_flight
UPLOAD_PATIENCE_SECONDS = 10.0  # of graphstash._http.transport, like the next two
SLOW_SECONDS = 1.0
MAX_SLOW_SECONDS = 10.0


class FailedError(Exception):
    """The cache cannot help: the process compiles."""


class Call(NamedTuple):
    kind: str
    graph: int
    caller: Any
    wait_seconds: float = 0.0
    is_redirected: bool = False


class Host:
    """A host: the graphs on its disk, and who waits for the download of another process."""

    def __init__(self):
        self.disk = set()
        self.locks = {}


class Client:
    """A process of a job."""

    counts: "Counter[str]"

    def __init__(self, cluster, fleet, host, *, random, counts):
        self.cluster, self.env, self.fleet, self.host = cluster, cluster.env, fleet, host
        self.random, self.counts = random, counts

        def clock():
            return cluster.env.now

        self.budget = WaitBudget(fleet.wait_seconds, clock=clock)
        self.upload_budget = WaitBudget(fleet.wait_seconds, clock=clock)
        self.breaker = CircuitBreaker(clock=clock)
        self.takes_redirects = cluster.deployment.bytes_by is Bytes.BUCKET
        self._kept = []

    def run(self):
        """Start at a random time, and get every graph."""
        fleet, uniform = self.fleet, self.random.uniform
        yield self.env.timeout(uniform(0.0, fleet.start_seconds))
        for graph in range(fleet.graphs):
            if fleet.trace_seconds:
                yield self.env.timeout(fleet.trace_seconds * uniform(0.5, 1.5))
            yield from self._get_or_compile(graph)
        self.counts["finished"] += 1

    def _get_or_compile(self, graph):
        has_lease = False
        try:
            if (yield from self._found(graph)):
                return
            has_lease = yield from self._lease(graph)
            if not has_lease:
                return
        except FailedError:
            self.counts["fallbacks"] += 1
        is_renewing = [has_lease]
        self.env.process(self._renew(graph, is_renewing))
        yield self.env.timeout(self.fleet.compile_seconds)
        self.counts["compiles"] += 1
        self.budget.add_compilation(self.fleet.compile_seconds)
        self.host.disk.add(graph)
        self.env.process(self._publish(graph, is_renewing))

    def _found(self, graph):
        """Take the graph from the disk, or download it unless another process of the host does."""
        locks = self.host.locks
        if graph not in self.host.disk:
            if graph in locks:
                turn = self.env.event()
                locks[graph].append(turn)
                yield turn
            else:
                locks[graph] = []
            try:
                if graph not in self.host.disk:
                    return (yield from self._download(graph))
            finally:
                if locks[graph]:
                    locks[graph].pop(0).succeed()
                else:
                    del locks[graph]
        self.counts["local"] += 1
        return True

    def _download(self, graph):
        is_found = yield from self._when_free("get", graph)
        if is_found and graph not in self.host.disk:
            self.host.disk.add(graph)
            self.counts["downloads"] += 1
        return is_found

    def _lease(self, graph):
        """Return whether this process has the lease. False: it has the graph."""
        with self.budget.wait() as wait:
            started = self.env.now
            while True:
                asked_at, seconds = self.env.now, min(MAX_POLL_SECONDS, wait.left)
                answer = yield from self._when_free("lease", graph, wait_seconds=ceil(seconds))
                if answer is Answer.GRANTED:
                    return True
                if answer is Answer.READY:
                    if (yield from self._found(graph)):
                        wait.saved_seconds = self.fleet.compile_seconds
                        return False
                    continue
                if wait.reason_to_skip(str(id(self.cluster.holder_of(graph)))) is not None:
                    raise FailedError
                if seconds:
                    share = POLL_SHARE * (asked_at - started)
                    until = asked_at + min(seconds, max(MIN_POLL_SECONDS, share))
                    pause = min(until - self.env.now, wait.left)
                    yield self.env.timeout(max(0.0, pause))

    def _renew(self, graph, is_renewing):
        interval = pause = self.fleet.lease_seconds / 3
        while True:
            yield self.env.timeout(pause)
            if not is_renewing[0]:
                return
            pause = interval
            try:
                if (yield from self._call("renew", graph)) is Answer.LOST:
                    return
            except BusyError as busy:
                pause = min(interval, max(MIN_BUSY_SECONDS, busy.retry_after_seconds))
            except FailedError:
                continue

    def _publish(self, graph, is_renewing):
        try:
            yield from self._when_free("put", graph, budget=self.upload_budget)
        except FailedError:
            self.counts["failed uploads"] += 1
        is_renewing[0] = False

    def _when_free(self, kind, graph, *, budget=None, wait_seconds=0.0):
        """Repeat a call while the server is busy and the budget allows a wait."""
        with (budget or self.budget).wait() as wait:
            while True:
                try:
                    answer = yield from self._call(kind, graph, wait_seconds=wait_seconds)
                except BusyError as busy:
                    seconds = wait.pause_seconds(busy)
                    if seconds is None:
                        if busy.is_full and wait.left < busy.retry_after_seconds:
                            self.breaker.pause(FULL_SECONDS)
                        raise FailedError from None
                    yield self.env.timeout(seconds)
                    wait.deduct()
                    if kind == "get" and graph in self.host.disk:  # compiled here meanwhile
                        return True
                else:
                    wait.saved_seconds = 0.0
                    return answer

    def _call(self, kind, graph, *, wait_seconds=0.0):
        """Make one call. Return its answer; for a GET, whether the client has the bytes."""
        if not self.breaker.allows():
            raise FailedError
        fleet, env = self.fleet, self.env
        patience = {"lease": wait_seconds, "put": UPLOAD_PATIENCE_SECONDS}.get(kind, 0.0)
        connection = self._kept.pop() if self._kept else self._connection()
        reply, began = env.event(), env.now
        self.counts["calls"] += 1
        is_redirected = kind == "get" and self.takes_redirects
        call = Call(kind, graph, self, wait_seconds, is_redirected)
        env.process(connection.worker.serve(connection, call, reply))
        timer = env.timeout(fleet.first_byte_seconds + patience)
        timer.callbacks.append(lambda _: reply.triggered or reply.succeed(Answer.LATE))
        answer = yield reply
        self.counts[kind if isinstance(answer, Flow) else f"{kind} {answer.name.lower()}"] += 1
        if answer is Answer.FULL:
            self.breaker.record_success()
            raise BusyError("full", retry_after_seconds=1.0, is_full=True)
        if answer is Answer.LATE:
            self._failed(may_be_slow=kind == "get")
        if kind != "get":
            self.breaker.record_success()
            return answer
        if isinstance(answer, Flow):
            yield from self._receive(answer, connection.worker.link, began)
        elif answer is Answer.FOUND and not (yield from self._from_bucket()):
            self.takes_redirects = False
            return (yield from self._call(kind, graph))
        self.breaker.record_success()
        return answer is not Answer.ABSENT

    def _connection(self):
        return Connection(self.random.choice(self.cluster.workers), self._kept)

    def _receive(self, flow, link, began):
        fleet = self.fleet
        most = min(fleet.fetch_seconds, max(fleet.compile_seconds, fleet.first_byte_seconds))
        timer = self.env.timeout(max(0.0, began + most - self.env.now))
        timer.callbacks.append(lambda _: link.cancel(flow))
        if not (yield flow.done):
            self.counts["cut downloads"] += 1
            self._failed()

    def _from_bucket(self):
        delay = self.cluster.bucket_delay()
        yield self.env.timeout(min(delay, self.fleet.first_byte_seconds))
        is_in_time = delay < self.fleet.first_byte_seconds
        self.counts["bucket" if is_in_time else "bucket late"] += 1
        return is_in_time

    def _failed(self, *, may_be_slow=False):
        if not self.breaker.record_failure() and may_be_slow:
            raise BusyError(
                "late", retry_after_seconds=SLOW_SECONDS, patience_seconds=MAX_SLOW_SECONDS
            )
        raise FailedError
