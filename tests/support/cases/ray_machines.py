"""Measure on the machines of a Ray cluster. Each machine is a node on this host.

The tuned target is defined here, and Ray sends it to the machines.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import ray
from ray.cluster_utils import Cluster

from graphstash.tuning.measuring import Budget, MeasuringError, Method, Target, ray_pool
from graphstash.tuning.measuring.ray_pool import RayPool
from graphstash.tuning.search import make_searcher
from graphstash.tuning.spaces import ParameterSpace
from graphstash.tuning.tuner import search

METHOD = Method(samples=2, trial_seconds=1e6, timeout_seconds=5.0)
ON_MACHINES: dict[str, Any] = {"options": {"resources": {"machine": 1}}, "modules": [__name__]}
KERNEL = Path(__file__).parents[1] / "tuned_kernel.py"


class Numbers(Target):
    """A target whose configurations name their costs or faults."""

    def __init__(self, folder: Path, *, is_prepared: bool = True) -> None:
        self.folder, self.is_prepared = folder, is_prepared

    def describe(self) -> dict[str, Any]:
        return {"target": "numbers"}

    def prepare(self) -> None:
        if not self.is_prepared:
            raise RuntimeError("no such device")

    def build(self, configuration: Any) -> Any:
        does = configuration.get("does")
        if does == "does not compile":
            raise ValueError(does)
        if does == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if does == "hangs":
            time.sleep(1000)
        if does == "waits":
            with (self.folder / "waiting").open("a") as file:
                file.write(f"{raylet_of(os.getppid())}\n")
            while not (self.folder / "go on").exists():
                time.sleep(0.01)
        return Kernel(configuration)

    def cost(self, kernel: Any, calls: int) -> Any:
        return kernel.configuration["x"]


class Kernel:
    def __init__(self, configuration: Any) -> None:
        self.configuration = configuration

    def __call__(self) -> None:
        pass


def raylet_of(pid: int) -> int:
    """Return the process of Ray's node, which starts actors. An actor starts the guard `pid`."""
    return parent_of(parent_of(pid))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def results(pool: RayPool, *configurations: Any) -> dict[str, Any]:
    for configuration in configurations:
        pool.submit(configuration)
    found: list[Any] = []
    while pool.pending:
        found += pool.results()
    return {str(each.configuration): [each.cost, each.failure] for each in found}


def error_of(pool: RayPool) -> str | None:
    try:
        results(pool, {"x": 1})
    except MeasuringError as error:
        return str(error)
    return None


class Machines:
    """A cluster of two machines, beside a head that runs nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        head = {"num_cpus": 0, "include_dashboard": False}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        one = {"num_cpus": 1, "num_gpus": 1, "resources": {"machine": 1}}
        self.machines = [self.cluster.add_node(**one) for _ in range(2)]
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address=self.cluster.address, **quiet)

    def kill_the_waiting_one(self, is_over: Event) -> None:
        waiting = self.folder / "waiting"
        while not (waiting.exists() and waiting.read_text().endswith("\n")):
            time.sleep(0.01)
        raylet = int(waiting.read_text())
        processes = [each.all_processes["raylet"][0].process.pid for each in self.machines]
        self.kill(processes.index(raylet))
        while len(waiting.read_text().splitlines()) < 2 and not is_over.is_set():
            time.sleep(0.01)
        (self.folder / "go on").touch()

    def kill(self, number: int = -1) -> None:
        self.cluster.remove_node(self.machines.pop(number), allow_graceful=False)

    def after_a_death(self) -> dict[str, Any]:
        """Return the result of a trial whose machine dies, and the number of machines it used."""
        is_over = Event()
        method = Method(samples=1, timeout_seconds=60)
        with RayPool(Numbers(self.folder), workers=2, method=method, **ON_MACHINES) as pool:
            killer = Thread(target=self.kill_the_waiting_one, args=(is_over,))
            killer.start()
            found = results(pool, {"x": 7, "does": "waits"})
            is_over.set()
            killer.join()
        lines = (self.folder / "waiting").read_text().split()
        return {"measured": found, "machines": len(set(lines))}

    def searched_by_the_command(self) -> Any:
        """Return the output of `graphstash tune search` on a script that no machine can import."""
        command = [sys.executable, "-m", "graphstash", "tune", "search", f"{KERNEL}:task", "--json"]
        done = subprocess.run(
            [*command, "--trials", "8", "--workers", "2", "--ray", "--ray-gpus", "1"],
            env=os.environ | {"RAY_ADDRESS": self.cluster.address, "GRAPHSTASH_ENABLED": "false"},
            cwd=self.folder,
            check=True,
            stdout=subprocess.PIPE,
        )
        return json.loads(done.stdout)


def guards() -> list[bytes]:
    """Return the guards of this environment's measuring processes."""
    lines = map(read, Path("/proc").glob("[0-9]*/cmdline"))
    return [each for each in lines if b"guard.py" in each and sys.executable.encode() in each]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def searched(folder: Path) -> dict[str, Any]:
    found = search(
        make_searcher("random", ParameterSpace({"x": list(range(1, 33))}), seed=0),
        Numbers(folder),
        budget=Budget(measurements=8),
        workers=2,
        finalists=2,
        method=METHOD,
        executor=partial(RayPool, **ON_MACHINES),
    )
    return {"best": found.best, "measured": len(found.measurements)}


def measured(*, folder: str) -> dict[str, Any]:
    """Return the measurements of a cluster whose machines die in turn."""
    place = Path(folder)
    make: Callable[..., RayPool] = partial(RayPool, workers=2, method=METHOD, **ON_MACHINES)
    report: dict[str, Any] = {}
    os.environ["RAY_ADDRESS"] = "ray://127.0.0.1:1"
    with make(Numbers(place)) as pool:
        report["without a cluster"] = error_of(pool)
    del os.environ["RAY_ADDRESS"]
    built = place / "built"
    os.environ["BUILT"] = str(built)  # the machines inherit it
    logging.basicConfig(level=logging.ERROR)
    machines = Machines(place)
    with make(Numbers(place)) as pool:
        report["measured"] = results(
            pool,
            *({"x": x} for x in range(1, 4)),
            *({"x": 1, "does": does} for does in ("does not compile", "dies", "hangs")),
        )
        compared = pool.compare([{"x": 5}, {"x": 4}])
        report["compared"] = [[each.cost, each.count] for each in compared]
    report["search"] = searched(place)
    report["command"] = machines.searched_by_the_command()
    report["built"] = built.read_text().splitlines()
    with make(Numbers(place, is_prepared=False)) as pool:
        report["unprepared"] = error_of(pool)
    report["after a machine died"] = machines.after_a_death()
    machines.kill()
    ray_pool._READY_SECONDS = 5.0  # type: ignore[misc] # Final: waiting longer changes nothing
    with make(Numbers(place)) as pool:
        report["without machines"] = error_of(pool)
    while guards():
        time.sleep(0.05)
    report["is_over"] = True
    ray.shutdown()
    machines.cluster.shutdown()
    return report
