"""A job that asks the team's memory for the schedule of a made-up kernel.

The best tile grows with the shape, so a neighbour's is a good place to begin at. Measurements are
noisy, and each leaves a line in a file, for those who wait for it. Writes what happened as JSON.
"""

import argparse
import itertools
import json
import math
import random
import time
from pathlib import Path
from typing import Any

from graphstash._process.session import open_cache
from graphstash.tuning.memory.findings import Finding
from graphstash.tuning.memory.problem import Problem
from graphstash.tuning.memory.process import ranks_of_job
from graphstash.tuning.memory.team import TeamMemory
from graphstash.tuning.space import SearchSpace
from graphstash_schema import DeviceType

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--size", type=int, default=1024)
parser.add_argument("--device", default="cuda-sm_90")
parser.add_argument("--noise", type=float, default=0.0, help="of a measurement, as a share")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--hang-after", type=int, default=10**9, help="measurements")
parser.add_argument("--until", type=Path, help="hang no longer than till this file is there")
parser.add_argument("--batch", type=int, default=64, help="measurements in one artifact")
parser.add_argument("--reject", type=int, default=0, help="schedules that do not work here")
parser.add_argument("--rank", type=int)
parser.add_argument("--world", type=int)
parser.add_argument("--rendezvous", type=Path)
options = parser.parse_args()

LARGEST = 10
noise = random.Random(options.seed)
measured = options.report.with_suffix(".measured")
measured.touch()


class Tiles(SearchSpace):
    """Three powers of two, from 1 to 1024."""

    names = ("block_m", "block_n", "block_k")
    moves = 6
    size = (LARGEST + 1) ** 3
    start = (1, 1, 1)

    def __contains__(self, configuration):
        return configuration in set(self)

    def __iter__(self):
        return itertools.product([2**each for each in range(LARGEST + 1)], repeat=3)

    def draw(self, random):
        return random.choice(list(self))

    def moved(self, configuration, move):
        place, is_up = divmod(move, 2)
        values = list(configuration)
        values[place] = values[place] * 2 if is_up else values[place] // 2
        return tuple(values) if tuple(values) in self else None

    def features(self, configuration):
        return [math.log2(each) / LARGEST for each in configuration]

    def describe(self):
        return {"tiles": LARGEST}


def cost_of(configuration):
    best = math.log2(options.size) - 3
    away = sum((math.log2(each) - best) ** 2 for each in configuration)
    return 1e-3 * (1 + away) * (1 + options.noise * noise.random())


def measure(configuration):
    with measured.open("a") as file:
        file.write("measured\n")
    if len(measured.read_text().splitlines()) >= options.hang_after:
        while not (options.until and options.until.exists()):
            time.sleep(0.02)
    cost = cost_of(configuration)
    return Finding(configuration, cost, spread=options.noise * cost / 2, count=3)


def climb(search):
    """Goes downhill from the best of what is known, hinted at, or untiled."""
    report["known"], report["hints"] = len(search.known), len(search.hints)
    costs = {each.configuration: each.cost for each in search.known.values() if each.cost}

    def cost(configuration):
        if configuration in search.known and configuration not in costs:
            return math.inf
        if configuration not in costs:
            measurement = measure(configuration)
            search.publish(measurement)
            costs[configuration] = measurement.cost
        return costs[configuration]

    here = min([*search.hints, *costs, space.start], key=cost)
    while (best := min(space.neighbours(here), key=cost)) and cost(best) < cost(here):
        here = best


report: dict[str, Any] = {}
space = Tiles()
if options.world:
    import torch.distributed as dist

    store = dist.FileStore(str(options.rendezvous), options.world)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.world)
problem = Problem(
    kernel="matmul",
    shape=(options.size,) * 3,
    dtype="float32",
    device_type=DeviceType(options.device),
    compiler="made-up 1.0",
)
cache = open_cache()
assert cache is not None
memory = TeamMemory(cache, ranks=ranks_of_job, batch_count=options.batch)
for number in range(options.reject + 1):
    schedule = memory.schedule(problem, space, climb, measure=measure)
    if number < options.reject:
        assert schedule is not None
        memory.reject(schedule, "it does not compile")
report |= {
    "schedule": schedule and space.named(schedule.configuration),
    "was_searched": schedule and schedule.was_searched,
    "measured": len(measured.read_text().splitlines()),
}
if options.world:
    dist.barrier()
options.report.write_text(json.dumps(report))
