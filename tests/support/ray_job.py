"""A job that measures on machines of a Ray cluster: each is a node of its own on this host.

    ray_job.py REPORT

What it tunes is defined here: Ray sends it to the machines.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from threading import Event, Thread

import ray
from ray.cluster_utils import Cluster

from graphstash.tuning.measuring import Budget, MeasuringError, Method, Target, ray_pool
from graphstash.tuning.measuring.ray_pool import RayPool
from graphstash.tuning.search import make_searcher
from graphstash.tuning.spaces import ParameterSpace
from graphstash.tuning.tuner import search

folder = Path(sys.argv[1]).parent
waiting = folder / "waiting"
is_over = Event()  # what the trial that waits was for
METHOD = Method(samples=2, trial_seconds=1e6, timeout_seconds=5.0)
MACHINE = {"resources": {"machine": 1}}


class Numbers(Target):
    """Costs what a configuration says, or does what it says."""

    def __init__(self, folder, *, is_prepared=True):
        self.folder, self.is_prepared = folder, is_prepared

    def describe(self):
        return {"target": "numbers"}

    def prepare(self):
        if not self.is_prepared:
            raise RuntimeError("no such device")

    def build(self, configuration):
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

    def cost(self, kernel, calls):
        return kernel.configuration["x"]


class Kernel:
    def __init__(self, configuration):
        self.configuration = configuration

    def __call__(self):
        pass


def raylet_of(pid):
    """The process of Ray's node, which starts actors; an actor starts the guard with this pid."""
    return parent_of(parent_of(pid))


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def measured(pool, *configurations):
    for configuration in configurations:
        pool.submit(configuration)
    found = []
    while pool.pending:
        found += pool.results()
    return {str(each.configuration): [each.cost, each.failure] for each in found}


def failed(function):
    try:
        function()
    except MeasuringError as error:
        return str(error)
    return None


def kill_the_waiting_machine():
    while not (waiting.exists() and waiting.read_text().endswith("\n")):
        time.sleep(0.01)
    raylet = int(waiting.read_text())
    dying = next(each for each in machines if pid_of(each) == raylet)
    machines.remove(dying)
    cluster.remove_node(dying, allow_graceful=False)
    while len(waiting.read_text().splitlines()) < 2 and not is_over.is_set():
        time.sleep(0.01)
    (folder / "go on").touch()


def pid_of(machine):
    return machine.all_processes["raylet"][0].process.pid


def guards():
    """The guards of this environment's measuring processes."""
    lines = map(read, Path("/proc").glob("[0-9]*/cmdline"))
    return [each for each in lines if b"guard.py" in each and sys.executable.encode() in each]


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def searched_by_the_command():
    """What `graphstash tune search` says of a script that the machines cannot import."""
    kernel = Path(__file__).with_name("tuned_kernel.py")
    command = [sys.executable, "-m", "graphstash", "tune", "search", f"{kernel}:task", "--json"]
    done = subprocess.run(
        [*command, "--trials", "8", "--workers", "2", "--ray", "--ray-gpus", "1"],
        env=os.environ | {"RAY_ADDRESS": cluster.address, "GRAPHSTASH_ENABLED": "false"},
        cwd=folder,
        check=True,
        stdout=subprocess.PIPE,
    )
    return json.loads(done.stdout)


make = partial(RayPool, workers=2, method=METHOD, options=MACHINE)
report = {}
os.environ["RAY_ADDRESS"] = "ray://127.0.0.1:1"
with make(Numbers(folder)) as pool:
    report["without a cluster"] = failed(lambda: measured(pool, {"x": 1}))
del os.environ["RAY_ADDRESS"]
built = folder / "built"
os.environ["BUILT"] = str(built)
logging.basicConfig(level=logging.ERROR)
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
machines = [cluster.add_node(num_cpus=1, num_gpus=1, resources={"machine": 1}) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)

with make(Numbers(folder)) as pool:
    report["measured"] = measured(
        pool,
        *({"x": x} for x in range(1, 4)),
        *({"x": 1, "does": does} for does in ("does not compile", "dies", "hangs")),
    )
    compared = pool.compare([{"x": 5}, {"x": 4}])
    report["compared"] = [[each.cost, each.count] for each in compared]

space = ParameterSpace({"x": list(range(1, 33))})
found = search(
    make_searcher("random", space, seed=0),
    Numbers(folder),
    budget=Budget(measurements=8),
    workers=2,
    finalists=2,
    method=METHOD,
    executor=partial(RayPool, options=MACHINE),
)
report["search"] = {"best": found.best, "measured": len(found.measurements)}

report["command"] = searched_by_the_command()
report["built"] = built.read_text().splitlines()

with make(Numbers(folder, is_prepared=False)) as pool:
    report["unprepared"] = failed(lambda: measured(pool, {"x": 1}))

with make(Numbers(folder), method=Method(samples=1, timeout_seconds=60)) as pool:
    killer = Thread(target=kill_the_waiting_machine)
    killer.start()
    report["after a machine died"] = measured(pool, {"x": 7, "does": "waits"})
    is_over.set()
    killer.join()
    report["machines"] = len({*waiting.read_text().split()})
cluster.remove_node(machines.pop(), allow_graceful=False)
ray_pool._READY_SECONDS = 5.0
with make(Numbers(folder)) as pool:
    report["without machines"] = failed(lambda: measured(pool, {"x": 1}))
while guards():
    time.sleep(0.05)
report["is_over"] = True
ray.shutdown()
cluster.shutdown()
Path(sys.argv[1]).write_text(json.dumps(report))
