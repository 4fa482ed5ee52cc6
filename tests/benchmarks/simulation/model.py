"""Run the model: a fleet starts one job on a deployment."""

import random
from collections import Counter
from dataclasses import dataclass

import simpy

from benchmarks.simulation.clients import Client, Host
from benchmarks.simulation.servers import Cluster
from benchmarks.simulation.settings import Costs


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run took.

    Attributes:
        seconds: from the first start to the last graph of the last process.
        counts: calls, and what became of them, summed over all clients.
        answered: answers of the servers, also to clients that had left.
        longest_queue_seconds: of the event loop of a worker.
        most_places: connections of a worker at once.
    """

    seconds: float
    counts: Counter
    answered: int
    server_cpu_seconds: float
    busiest_worker_cpu_seconds: float
    database_cpu_seconds: float
    statements: float
    most_statements_per_second: float
    served_bytes: float
    longest_queue_seconds: float
    most_places: int


def simulate(fleet, deployment, costs=None, *, seed=1):
    """Simulate one start of a fleet, to its end."""
    costs = costs or Costs()
    env, dice, counts = simpy.Environment(), random.Random(seed), Counter()
    random.seed(seed)  # the product's jitter
    cluster = Cluster(
        env,
        deployment,
        costs,
        stored=range(fleet.new, fleet.graphs),
        size_bytes=fleet.size_bytes,
        lease_seconds=fleet.lease_seconds,
    )
    processes = [
        env.process(Client(cluster, fleet, host, random=dice, counts=counts).run())
        for host in [Host() for _ in range(fleet.hosts)]
        for _ in range(fleet.processes)
    ]
    env.run(env.all_of(processes))
    seconds = env.now
    env.run(until=seconds + 2 * fleet.wait_seconds)  # the last uploads
    workers, database = cluster.workers, cluster.database
    flushes = costs.flush_statements * sum(len(each.active_seconds) for each in workers)
    return Outcome(
        seconds=seconds,
        counts=counts,
        answered=cluster.answered,
        server_cpu_seconds=sum(each.cpu_seconds for each in workers),
        busiest_worker_cpu_seconds=max(each.cpu_seconds for each in workers),
        database_cpu_seconds=database.cpu_seconds + flushes * costs.statement,
        statements=sum(database.per_second.values()) + flushes,
        most_statements_per_second=max(database.per_second.values(), default=0),
        served_bytes=sum(each.sent_bytes for each in cluster.links),
        longest_queue_seconds=max(each.longest_queue_seconds for each in workers),
        most_places=max(each.most_places for each in workers),
    )
