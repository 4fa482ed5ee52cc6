"""The servers, their database and their links, as simpy processes.

A worker runs one event loop, so its CPU is one queue. It has places for connections: a busy one
keeps its place, an idle one yields it. A connection without a place waits for a second. After that,
it gets 503.
"""

from collections import Counter, deque
from enum import Enum, auto
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import ceil

import simpy

from benchmarks.simulation.settings import MIB, Bytes

WAITING_SECONDS = 1.0  # as in graphstash_server.api.connection, like the next one
MAX_WAITING = 1024
FREE_SHARE = 1 / 8  # as in graphstash_server.services.wait_queue
LANES = 2  # as in graphstash_server.db.engine


class Answer(Enum):
    """The outcome of a call."""

    FOUND = auto()
    ABSENT = auto()
    GRANTED = auto()
    READY = auto()
    HELD = auto()
    RENEWED = auto()
    LOST = auto()
    STORED = auto()
    EXISTS = auto()
    FULL = auto()
    LATE = auto()
    """The client left before the first byte. The server still does the work."""


class Connection:
    """A connection of a client to a worker."""

    __slots__ = ("kept_by", "worker")

    def __init__(self, worker, kept_by):
        self.worker = worker
        self.kept_by = kept_by


class Flow:
    """The body of an answer. `done` succeeds with whether the client got all bytes."""

    __slots__ = ("done", "end", "size_bytes")

    def __init__(self, done, end, size_bytes):
        self.done, self.end, self.size_bytes = done, end, size_bytes


class Link:
    """A link whose flows share its rate equally."""

    def __init__(self, env, bytes_per_second):
        self.env, self.rate = env, bytes_per_second
        self.sent_bytes = 0.0
        self._flows, self._numbers = [], count()
        self._each_bytes = 0.0  # sent for each flow since the start
        self._at, self._open, self._plan_number = 0.0, 0, 0

    def start(self, size_bytes):
        self._advance()
        flow = Flow(self.env.event(), self._each_bytes + size_bytes, size_bytes)
        heappush(self._flows, (flow.end, next(self._numbers), flow))
        self._open += 1
        self._plan()
        return flow

    def cancel(self, flow):
        if not flow.done.triggered:
            self._advance()
            self._end(flow, is_complete=False)
            self._plan()

    def _end(self, flow, *, is_complete):
        self._open -= 1
        self.sent_bytes += flow.size_bytes - max(0.0, flow.end - self._each_bytes)
        flow.done.succeed(is_complete)

    def _advance(self):
        now = self.env.now
        if self._open:
            self._each_bytes += (now - self._at) * self.rate / self._open
        self._at = now

    def _plan(self):
        """Set a timer for the next end; an earlier timer finds that its number is outdated."""
        while self._flows and self._flows[0][2].done.triggered:
            heappop(self._flows)
        self._plan_number += 1
        if self._flows:
            left = max(0.0, self._flows[0][0] - self._each_bytes)
            timer = self.env.timeout(left * self._open / self.rate, self._plan_number)
            timer.callbacks.append(self._finish)

    def _finish(self, timer):
        if timer.value != self._plan_number:
            return
        self._advance()
        self._each_bytes = max(self._each_bytes, self._flows[0][0])
        while self._flows and self._flows[0][0] <= self._each_bytes + 1.0:
            flow = heappop(self._flows)[2]
            if not flow.done.triggered:
                self._end(flow, is_complete=True)
        self._plan()


class Database:
    """PostgreSQL: cores with one queue."""

    def __init__(self, env, cores, costs):
        self.env, self.costs = env, costs
        self.cpu_seconds = 0.0
        self.per_second = Counter()
        self._free = [0.0] * cores
        heapify(self._free)

    def call(self, statements):
        """Return the seconds until the last statement of a connection is answered."""
        now = self.env.now
        work = statements * self.costs.statement
        self.cpu_seconds += work
        self.per_second[int(now)] += statements
        end = max(now, self._free[0]) + work
        heapreplace(self._free, end)
        return end - now + statements * self.costs.round_trip


class Worker:
    """A process of a server."""

    def __init__(self, cluster, link):
        self.cluster, self.env, self.link = cluster, cluster.env, link
        self.costs, self.deployment = cluster.costs, cluster.deployment
        self.cpu_seconds = 0.0
        self.longest_queue_seconds = 0.0
        self.most_places = 0
        free = self.deployment.database_connections - LANES
        self._slots = simpy.Resource(self.env, max(1, free - 2))  # of calls for leases
        self._lanes = simpy.Resource(self.env, LANES)
        self._commits = simpy.Resource(self.env, 1)
        self._shared = {}
        self._next_tries = {}
        self._rows = {}
        self._ready = {}  # graph -> event: a commit, or its notification
        self._idle, self._waiting = {}, deque()
        self._busy = self._waiters = 0
        self._free_at = 0.0
        self.active_seconds = set()

    def work(self, seconds):
        """Queue work of the event loop. Return the event of its end."""
        now = self.env.now
        self._free_at = max(now, self._free_at) + seconds
        self.cpu_seconds += seconds
        self.longest_queue_seconds = max(self.longest_queue_seconds, self._free_at - now)
        return self.env.timeout(self._free_at - now)

    def serve(self, connection, call, reply):
        """Answer one call. `reply` succeeds with the answer, unless the client has left."""
        if connection in self._idle:
            del self._idle[connection]
            self._busy += 1
        else:
            self.work(self.costs.connect)
            has_place = self._enter()
            if not isinstance(has_place, bool):
                has_place = yield has_place
            if not has_place:
                yield self.work(self.costs.refusal)
                self.answer(reply, Answer.FULL)
                return
        self.most_places = max(self.most_places, self._busy + len(self._idle))
        answer = yield from getattr(self, call.kind)(call)
        self.answer(reply, answer)
        if isinstance(answer, Flow):
            if reply.value is Answer.LATE:
                self.link.cancel(answer)
            yield answer.done
        self._leave(connection, is_gone=reply.value is Answer.LATE)

    def answer(self, reply, answer):
        self.cluster.answered += 1
        if not reply.triggered:
            reply.succeed(answer)

    def _enter(self):
        """Return whether there is a place, or an event with that for a connection that waits."""
        most = self.deployment.max_connections
        if self._busy + len(self._idle) >= most:
            if self._idle:
                idlest = next(iter(self._idle))
                del self._idle[idlest]
                idlest.kept_by.remove(idlest)
            elif len(self._waiting) < min(most, MAX_WAITING):
                place = self.env.event()
                self._waiting.append(place)
                self.env.timeout(WAITING_SECONDS).callbacks.append(lambda _: self._refuse(place))
                return place
            else:
                return False
        self._busy += 1
        return True

    def _refuse(self, place):
        if not place.triggered:
            self._waiting.remove(place)
            place.succeed(False)

    def _leave(self, connection, *, is_gone):
        self._busy -= 1
        if self._waiting:
            self._busy += 1
            self._waiting.popleft().succeed(True)
        elif not is_gone:
            self._idle[connection] = None
            connection.kept_by.append(connection)

    def get(self, call):
        costs, graph, now = self.costs, call.graph, self.env.now
        self.active_seconds.add(int(now))
        is_stored = graph in self.cluster.stored
        if is_stored and self._rows.get(graph, -1.0) > now:
            yield self.work(costs.get_hot)
        else:
            yield self.work(costs.get_cold if is_stored else costs.miss)
            yield self._read("artifact", graph)
            if graph not in self.cluster.stored:
                return Answer.ABSENT
            self._rows[graph] = self.env.now + costs.row_seconds
        if call.is_redirected:
            return Answer.FOUND
        size = self.cluster.size_bytes
        if self.deployment.bytes_by is not Bytes.NGINX:
            self.work(costs.per_mib * size / MIB)
        return self.link.start(size)

    def lease(self, call):
        """Try, wait for the artifact, and try again."""
        graph, cluster = call.graph, self.cluster
        yield self.work(self.costs.lease / 2)
        answer = yield from self._try(call)
        places = self.deployment.max_connections
        has_room = self._waiters < places - ceil(places * FREE_SHARE)
        if answer is Answer.HELD and call.wait_seconds and has_room:
            ready = self._ready.setdefault(graph, self.env.event())
            if not ready.triggered:
                self._waiters += 1
                yield ready | self.env.timeout(call.wait_seconds)
                self._waiters -= 1
            answer = Answer.READY if graph in cluster.stored else (yield from self._try(call))
        yield self.work(self.costs.lease / 2)
        return answer

    def _try(self, call):
        graph, cluster, costs = call.graph, self.cluster, self.costs
        while graph in self._next_tries:  # a try that has not begun serves all who wait for it
            answer = yield self._next_tries[graph]
            if answer is not Answer.GRANTED:
                return answer
        done = self._next_tries[graph] = self.env.event()
        with self._slots.request() as turn:
            yield turn
            del self._next_tries[graph]
            yield self._read("artifact", graph)
            answer = Answer.READY if graph in cluster.stored else None
            if answer is None:
                yield self._read("lease", graph)
                answer = Answer.HELD if cluster.is_held(graph) else Answer.GRANTED
            if answer is Answer.GRANTED:
                cluster.hold(graph, call.caller)
                yield self.work(costs.grant)
                yield self.env.timeout(cluster.database.call(costs.grant_statements))
                if graph in cluster.stored:  # the transaction looks for the artifact last
                    del cluster.holders[graph]
                    answer = Answer.READY
        done.succeed(answer)
        return answer

    def renew(self, call):
        graph, cluster = call.graph, self.cluster
        yield self.work(self.costs.renewal)
        yield self.env.timeout(cluster.database.call(self.costs.renewal_statements))
        if cluster.holder_of(graph) is not call.caller:
            return Answer.LOST
        cluster.hold(graph, call.caller)
        return Answer.RENEWED

    def put(self, call):
        size = 0 if call.graph in self.cluster.stored else self.cluster.size_bytes
        yield self.work(self.costs.put + self.costs.put_per_mib * size / MIB)
        yield self._once(self._commits, ("commit",), self.costs.put_statements)
        is_first = call.graph not in self.cluster.stored
        self.cluster.store(call.graph, self)
        return Answer.STORED if is_first else Answer.EXISTS

    def notify(self, graph):
        """Wake the waiters of a graph."""
        ready = self._ready.setdefault(graph, self.env.event())
        if not ready.triggered:
            ready.succeed()

    def _read(self, *key):
        return self._once(self._lanes, key, 1)

    def _once(self, lanes, key, statements):
        """Return the event of a call of the database, shared with the equal calls that wait."""
        if key not in self._shared:
            self._shared[key] = self.env.event()
            self.env.process(self._run(lanes, key, statements))
        return self._shared[key]

    def _run(self, lanes, key, statements):
        with lanes.request() as turn:
            yield turn
            done = self._shared.pop(key)
            self.work(statements * self.costs.read)
            yield self.env.timeout(self.cluster.database.call(statements))
        done.succeed()


class Cluster:
    """All servers. `stored` and `holders` are the rows of the database."""

    def __init__(self, env, deployment, costs, *, stored, size_bytes, lease_seconds):
        self.env, self.deployment, self.costs = env, deployment, costs
        self.size_bytes, self.lease_seconds = size_bytes, lease_seconds
        self.stored, self.holders = set(stored), {}  # graph -> holder and end of the lease
        self.answered = 0
        self.database = Database(env, deployment.database_cores, costs)
        rate = deployment.link_bits_per_second / 8
        self.links = [Link(env, rate) for _ in range(deployment.servers)]
        self.workers = [
            Worker(self, link) for link in self.links for _ in range(deployment.workers)
        ]
        self._bucket_free_at = 0.0

    def hold(self, graph, caller):
        self.holders[graph] = caller, self.env.now + self.lease_seconds

    def holder_of(self, graph):
        return self.holders.get(graph, (None, 0.0))[0]

    def is_held(self, graph):
        return self.holders.get(graph, (None, 0.0))[1] > self.env.now

    def store(self, graph, worker):
        self.stored.add(graph)
        self.holders.pop(graph, None)
        worker.notify(graph)
        self.env.process(self._notify_all(graph))

    def _notify_all(self, graph):
        yield self.env.timeout(self.costs.notify_seconds)
        for worker in self.workers:
            worker.notify(graph)

    def bucket_delay(self):
        """Return the seconds until a bucket sends the first byte of one more GET."""
        now = self.env.now
        self._bucket_free_at = max(now, self._bucket_free_at)
        delay = self._bucket_free_at - now + self.deployment.bucket_seconds
        self._bucket_free_at += 1.0 / self.deployment.bucket_gets_per_second
        return delay
