"""Ask the team's memory for the schedule of an invented kernel.

The best tile grows with the shape, so a neighbour's best tile is a good start. Each measurement
appends a line to a file, for tests that wait for it.
"""

import importlib
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphstash._process.session import open_cache
from graphstash.tuning.memory import journal
from graphstash.tuning.memory.findings import Finding
from graphstash.tuning.memory.problem import Problem
from graphstash.tuning.memory.process import ranks_of_job
from graphstash.tuning.memory.team import TeamMemory
from graphstash.tuning.spaces import ParameterSpace
from graphstash_schema import DeviceType

SPACE = ParameterSpace({f"block_{axis}": [2**each for each in range(11)] for axis in "mnk"})


@dataclass
class Kernel:
    """The measurements and the search of a job.

    Attributes:
        measured: file that gets a line for each measurement.
        size: length of each axis.
        noise: relative noise of a measurement.
        hang_after: number of measurements before the job hangs.
        until: a file; the job continues when it exists.
        count: measurements so far.
        report: numbers of known configurations and hints at the start of the last search.
    """

    measured: Path
    size: int
    noise: float
    hang_after: int
    until: str
    chance: random.Random
    count: int = 0
    report: dict[str, int] = field(default_factory=dict)

    def measure(self, configuration: Any) -> Finding:
        self.count += 1
        with self.measured.open("a") as file:
            file.write("measured\n")
        while self.count >= self.hang_after and not (self.until and Path(self.until).exists()):
            time.sleep(0.02)
        best = math.log2(self.size) - 3
        away = sum((math.log2(each) - best) ** 2 for each in configuration)
        cost = 1e-3 * (1 + away) * (1 + self.noise * self.chance.random())
        return Finding(configuration, cost, spread=self.noise * cost / 2, count=3)

    def climb(self, search: Any) -> None:
        """Go downhill from the best of the known configurations, the hints and the start."""
        self.report = {"known": len(search.known), "hints": len(search.hints)}
        costs = {each.configuration: each.cost for each in search.known.values() if each.cost}

        def cost(configuration: Any) -> float:
            if configuration in search.known and configuration not in costs:
                return math.inf
            if configuration not in costs:
                measurement = self.measure(configuration)
                search.publish(measurement)
                costs[configuration] = measurement.cost
            return float(costs[configuration])

        here = min([*search.hints, *costs, SPACE.start], key=cost)
        while cost(best := min(SPACE.neighbours(here), key=cost)) < cost(here):
            here = best


def tuned(
    *,
    measured: str,
    size: int = 1024,
    device: str = "cuda-sm_90",
    noise: float = 0.0,
    seed: int = 0,
    hang_after: int = 10**9,
    until: str = "",
    batch: int = 64,
    batch_seconds: float = 3600.0,
    reject: int = 0,
    ranks: Sequence[Any] = (),
) -> dict[str, Any]:
    """Return the schedule, the known configurations of the last search, and the measurements.

    Args:
        measured, size, noise, hang_after, until: attributes of `Kernel`.
        device: the device type.
        seed: seed of the noise.
        batch: measurements in one artifact.
        batch_seconds: seconds after which fewer measurements are published.
        reject: number of schedules that the job rejects in turn.
        ranks: this rank, the number of ranks, and the file of their store.
    """
    if ranks:
        rank, world, store = ranks
        dist = importlib.import_module("torch.distributed")
        store = dist.FileStore(store, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    kernel = Kernel(Path(measured), size, noise, hang_after, until, random.Random(seed))
    problem = Problem("matmul", (size,) * 3, "float32", DeviceType(device), "made-up 1.0")
    cache = open_cache()
    assert cache is not None
    setattr(journal, "_BATCH_COUNT", batch)  # noqa: B010 - mypy refuses the assignment
    setattr(journal, "_BATCH_SECONDS", batch_seconds)  # noqa: B010 - as above
    memory = TeamMemory(cache, ranks=ranks_of_job)
    schedule = memory.schedule(
        problem, SPACE, kernel.climb, measure=journal.in_turns(kernel.measure)
    )
    for _ in range(reject):
        assert schedule is not None
        memory.reject(schedule, "it does not compile")
        schedule = memory.schedule(
            problem, SPACE, kernel.climb, measure=journal.in_turns(kernel.measure)
        )
    assert schedule is not None
    if ranks:
        dist.barrier()
    return kernel.report | {
        "schedule": SPACE.named(schedule.configuration),
        "was_searched": schedule.was_searched,
        "measured": kernel.count,
    }
