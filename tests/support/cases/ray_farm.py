"""`graphstash farm` on a real Ray cluster of two hosts, each a node on this host."""
# mypy: disallow-untyped-calls=False
# JAX is partly typed.

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from graphstash._artifacts.stash import Stash
from graphstash.config import ClientConfig
from graphstash.hooks.jax import prewarm
from graphstash.hooks.jax.compiling import Program
from graphstash.hooks.jax.fingerprint import device_key, request_of
from graphstash.hooks.jax.program_text import settings
from graphstash.hooks.jax.seam import Seam
from graphstash_schema import ArtifactKey, ArtifactMetadata, LeaseOutcome
from graphstash_schema.explanation import described
from support.ports import reserved_port

SUPPORT = Path(__file__).parents[1]
TOPOLOGY = "v5e:2x2"
MODULE = "jax_prewarm_job.py"


class _FoundError(Exception):
    """Ends JAX's look-up, with its key and the program."""


def publish_as_a_job(url: str, namespace: str, **other: str) -> None:
    """Publish what a job on the topology publishes, because this host has no TPU: an artifact
    whose description has the parts of this environment, except the `other` parts.
    """
    from support.jax_prewarm_job import abstract_step

    def stop(jax_key: str, program: Program) -> None:
        if program.is_compile_only:
            raise _FoundError(jax_key, program)

    devices = prewarm._devices("tpu", TOPOLOGY)
    step, arguments = abstract_step(devices)
    seam = Seam(_Nothing(), on_key=stop)
    try:
        step.lower(*arguments).compile()
    except _FoundError as found:
        jax_key, program = found.args
    finally:
        seam.close()
    request = request_of(jax_key, program)
    parts = settings() | dict(request.parts) | {"device_key": device_key(program)} | other
    with Stash(ClientConfig.load(url=url, namespace=namespace)) as stash:
        metadata = ArtifactMetadata(compile_seconds=1.0, raw_size_bytes=4)
        stash.put(request.key, b"step", metadata)
        stash.server.describe([described(request.key, request.label, parts)])


class _Nothing:
    """A keeper that finds and stores nothing."""

    def get(self, *_: object) -> None: ...

    def put(self, *_: object) -> None: ...

    def wants(self, *_: object) -> bool:
        return False

    def ended(self) -> None: ...

    def record_fallback(self, error: Exception) -> None: ...


class Farm:
    """A cluster of two hosts, beside a head that runs nothing."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        # The hosts inherit these.
        os.environ["FARM_FOLDER"] = str(folder)
        os.environ["GRAPHSTASH_LEASE_SECONDS"] = "5"
        port = reserved_port()
        head = {"num_cpus": 0, "include_dashboard": False, "ray_client_server_port": port}
        # A process that joins the cluster directly may belong to a host that dies.
        self.outside = f"ray://127.0.0.1:{port}"
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.hosts = [self.cluster.add_node(num_cpus=1) for _ in range(2)]

    def start(
        self, namespace: str, *words: str, address: str | None = None
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "graphstash", "farm", "--url", self.url, "--json"]
        address = address or self.cluster.address
        return subprocess.Popen(
            [*command, "--namespace", namespace, "--ray", address, *words],
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
    """Return the outcomes of farms: without a proof, with one, two at once, and with a death."""
    report: dict[str, Any] = {}
    place = Path(folder)
    farm = Farm(place, url)
    words = ("--topology", TOPOLOGY)
    wider = f"{MODULE}:wider_step"
    report["without a job"] = farm.run("unproved", *words, wider)
    publish_as_a_job(url, "other", libtpu="0.0.1")
    report["other libtpu"] = farm.run("other", *words, wider)
    publish_as_a_job(url, "farm")
    report["several"] = farm.run(
        "farm", *words, "--topology", "v5e:3x5", wider, f"{MODULE}:a_string"
    )
    report["again"] = farm.run("farm", *words, wider)
    report["two"] = two_at_once(farm, report["several"][1])
    report["after a death"] = after_a_death(farm)
    farm.cluster.shutdown()
    return report


def two_at_once(farm: Farm, outcomes: list[Any]) -> list[Any]:
    """Return the results of two farms that wait for the same lease."""
    publish_as_a_job(farm.url, "two")
    (name,) = (each["key"] for each in outcomes if each["key"])
    key = ArtifactKey.parse(*name.split("/"))
    with Stash(ClientConfig.load(url=farm.url, namespace="two")) as stash:
        token = stash.server.acquire(key).token or ""
        words = ("--topology", TOPOLOGY, f"{MODULE}:wider_step")
        farms = [farm.start("two", *words) for _ in range(2)]

        def both_wait() -> bool:
            stash.server.renew(key, token)
            return sum(each.waiters for each in stash.server.held_leases().leases) == 2

        wait_for(both_wait)
        stash.server.release(key, token, LeaseOutcome.FAILED)
        return [result_of(each) for each in farms]


def after_a_death(farm: Farm) -> dict[str, Any]:
    """Return the result of a farm whose host dies while it compiles."""
    publish_as_a_job(farm.url, "death")
    words = ("--topology", TOPOLOGY, f"{MODULE}:waiting_step")
    started = farm.start("death", *words, address=farm.outside)
    waiting = farm.folder / "waiting"
    wait_for(lambda: waiting.exists() and waiting.read_text().endswith("\n"))
    raylet = parent_of(int(waiting.read_text()))
    raylets = [each.all_processes["raylet"][0].process.pid for each in farm.hosts]
    farm.cluster.remove_node(farm.hosts[raylets.index(raylet)], allow_graceful=False)
    wait_for(lambda: len(waiting.read_text().splitlines()) == 2)
    (farm.folder / "go on").touch()
    return {"result": result_of(started), "tries": len(waiting.read_text().splitlines())}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
