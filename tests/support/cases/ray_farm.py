"""`graphstash farm` on a real Ray cluster of two hosts, each a node on this host."""
# mypy: disallow-untyped-calls=False
# JAX is partly typed.

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
from ray.cluster_utils import Cluster

import graphstash
from graphstash._artifacts.stash import Stash
from graphstash.config import ClientConfig
from graphstash.hooks.environment import version_of
from graphstash.hooks.jax import compiling, prewarm
from graphstash_schema import LeaseOutcome
from support.jax_prewarm_job import abstract_step

SUPPORT = Path(__file__).parents[1]
TOPOLOGY = "v5e:2x2"
MODULE = "jax_prewarm_job.py"


def publish_as_a_job(url: str, namespace: str, *, libtpu: str = "") -> None:
    """Publish like a job with the topology's devices, because this host has no TPU.

    The hook takes the compile-only devices for real ones, and does not pack the small program.
    `libtpu` is another version that the job seems to have.
    """
    devices = prewarm._topology_devices("tpu", TOPOLOGY)
    program_of = compiling._make_program

    def with_devices(*arguments: Any, **named: Any) -> Any:
        program = program_of(*arguments, **named)
        program.is_compile_only = False
        return program

    def other_version(name: str) -> str:
        return libtpu if libtpu and name == "libtpu" else version_of(name)

    job = {"GRAPHSTASH_URL": url, "GRAPHSTASH_NAMESPACE": namespace}
    with (
        patch.dict(os.environ, job),
        patch.object(compiling, "_make_program", with_devices),
        patch.object(compiling, "is_small", lambda _: False),
        patch("graphstash.hooks.jax.fingerprint.version_of", other_version),
    ):
        jax.clear_caches()
        graphstash.install()
        step, arguments = abstract_step(devices)
        step.lower(*arguments).compile()
        graphstash.uninstall()


class Farm:
    """A cluster of two hosts, beside a head that runs nothing."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        # The hosts inherit these.
        os.environ["FARM_FOLDER"] = str(folder)
        os.environ["GRAPHSTASH_LEASE_SECONDS"] = "5"
        head = {"num_cpus": 0, "include_dashboard": False}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            self.cluster.add_node(num_cpus=1)

    def start(self, namespace: str, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "graphstash", "farm", "--url", self.url, "--json"]
        return subprocess.Popen(
            [*command, "--namespace", namespace, "--ray", self.cluster.address, *words],
            cwd=SUPPORT,
            text=True,
            stdout=subprocess.PIPE,
        )

    def run(self, namespace: str, *words: str) -> list[Any]:
        """Return the status and the outcomes of the command."""
        return result_of(self.start(namespace, *words))


def result_of(started: "subprocess.Popen[str]") -> list[Any]:
    output, _ = started.communicate()
    return [started.returncode, json.loads(output)]


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


def farmed(*, folder: str, url: str) -> dict[str, Any]:
    """Return the results of farms, by what happens to them.

    A job with another libtpu proves nothing, and a job with the same one proves one of two
    topologies. Two farms run at once. The worker of the last farm dies.
    """
    farm = Farm(Path(folder), url)
    words = ("--topology", TOPOLOGY, f"{MODULE}:wider_step")
    publish_as_a_job(url, "other", libtpu="0.0.1")
    report: dict[str, Any] = {"other libtpu": farm.run("other", *words)}
    publish_as_a_job(url, "farm")
    report["several"] = farm.run("farm", *words, "--topology", "v5e:2x4", f"{MODULE}:a_string")
    report["two"] = two_at_once(farm)
    report["after a death"] = after_a_death(farm)
    farm.cluster.shutdown()
    return report


def two_at_once(farm: Farm) -> list[Any]:
    """Return the results of two farms that wait for the same lease."""
    publish_as_a_job(farm.url, "two")
    target = f"{SUPPORT / MODULE}:wider_step"
    elsewhere = ClientConfig.load(url=farm.url, namespace="elsewhere")
    key = prewarm.prewarm(target, topology=TOPOLOGY, platform="tpu", config=elsewhere).key
    with Stash(ClientConfig.load(url=farm.url, namespace="two")) as stash:
        token = stash.server.acquire(key).token or ""
        words = ("--topology", TOPOLOGY, f"{MODULE}:wider_step")
        farms = [farm.start("two", *words) for _ in range(2)]

        def both_wait() -> bool:
            stash.server.renew(key, token)
            return sum(each.waiters for each in stash.server.held_leases().leases) == 2

        wait_for(both_wait)
        stash.server.release(key, token, LeaseOutcome.FAILED)
        return [*map(result_of, farms), str(key)]


def after_a_death(farm: Farm) -> dict[str, Any]:
    """Return the result of a farm whose worker is killed while it compiles."""
    publish_as_a_job(farm.url, "death")
    started = farm.start("death", "--topology", TOPOLOGY, f"{MODULE}:waiting_step")
    waiting = farm.folder / "waiting"

    def tries() -> list[str]:
        """Return the processes that compile or have compiled."""
        assert started.poll() is None, "the farm has ended"
        return waiting.read_text().splitlines() if waiting.exists() else []

    wait_for(lambda: len(tries()) == 1)
    os.kill(int(tries()[0]), signal.SIGKILL)
    wait_for(lambda: len(tries()) == 2)
    (farm.folder / "go on").touch()
    return {"result": result_of(started), "tries": len(waiting.read_text().splitlines())}
