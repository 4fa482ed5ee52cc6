"""A group of workers, one at each node. Each request goes to all workers."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import environment

WORKER = "benchmarks.reduce.worker"
AGGREGATOR = "graphstash.training.reduce.aggregators"

PATIENCE = 400  # seconds to wait for an answer
AHEAD = 0.03  # seconds for a request to reach all workers before they begin together


class Sample(NamedTuple):
    """One call.

    Attributes:
        seconds: seconds until the last worker had the sum.
        cpu: CPU seconds, mean of the workers.
        payload: bytes of TCP payload that all workers sent; with aggregators, bytes of UDP payload
            that they sent and received.
        datagrams: number of UDP datagrams; 0 without aggregators.
        wire: bytes that all links received, with headers; 0 on loopback.
        packets: number of packets that all links received; 0 on loopback.
        counted: bytes of the code's own counters; 0 without counters.
        exact: whether every worker had the exact sum.
    """

    seconds: float
    cpu: float
    payload: int
    datagrams: int
    wire: int
    packets: int
    counted: int
    exact: bool


class Group(AbstractContextManager):
    """Workers on `links`. The workers end with the group, or with this process."""

    def __init__(self, links, workers, *, aggregators):
        """Start workers, and this number of aggregators, at the nodes after the workers'."""
        self._links = links
        self._folder = tempfile.TemporaryDirectory(prefix="bench-reduce-")
        rendezvous = Path(self._folder.name) / "rendezvous"
        own = environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=links.interface())
        secret = Path(self._folder.name) / "secret"
        secret.write_text(os.urandom(32).hex())  # without white space at either end
        secret.chmod(0o600)
        self._workers, self._aggregators, addresses = [], [], []
        try:
            for node in range(workers, workers + aggregators):
                listen = ("--listen", f"{links.address(node)}:0", "--secret-file", str(secret))
                self._aggregators.append(self._start(node, own, AGGREGATOR, listen))
                found = self._answer(self._aggregators[-1], f"aggregator {node}")
                addresses.append("{}:{}".format(*found["address"]))
            for rank in range(workers):
                arguments = ("--rank", rank, "--workers", workers, "--rendezvous", rendezvous)
                place = ("--address", links.address(rank), "--secret-file", secret)
                command = map(str, (*arguments, *place, "--aggregators", *addresses))
                self._workers.append(self._start(rank, own, WORKER, command))
        except BaseException:
            self.__exit__()
            raise

    def _start(self, node, env, module, arguments):
        return subprocess.Popen(
            [*self._links.command(node), sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=env,
        )

    def sample(self, arm, cell):
        """Prepare and measure one call."""
        self.ask(prepare=arm, cell=asdict(cell))
        before, (payload, datagrams) = self._links.traffic(), self._sent(arm)
        answers = self.ask(call=time.monotonic() + AHEAD)
        moved = self._links.traffic().since(before)
        payload_now, datagrams_now = self._sent(arm)
        return Sample(
            seconds=max(each["seconds"] for each in answers),
            cpu=sum(each["cpu"] for each in answers) / len(answers),
            payload=payload_now - payload,
            datagrams=datagrams_now - datagrams,
            wire=moved.wire_bytes,
            packets=moved.packets,
            counted=sum(each.get("counted", 0) for each in answers),
            exact=all(each["exact"] for each in answers),
        )

    def train(self, model, arm, steps):
        """Return steps per second, CPU seconds and wire bytes of a step, and the losses."""
        self.ask(train=model, arm=arm)
        before = self._links.traffic()
        answers = self.ask(steps=steps)
        moved = self._links.traffic().since(before)
        return self.ask(losses=True)[0] | {
            "steps/s": steps / max(each["seconds"] for each in answers),
            "cpu": sum(each["cpu"] for each in answers) / len(answers) / steps,
            "wire": moved.wire_bytes / len(self._workers) / steps,
        }

    def _sent(self, arm):
        answers = self.ask(sent=arm)
        return [sum(each[name] for each in answers) for name in ("payload", "datagrams")]

    def ask(self, **request):
        """Send a request to all workers, and return their answers."""
        line = json.dumps(request) + "\n"
        for worker in self._workers:
            worker.stdin.write(line)
        answers = enumerate(self._workers)
        return [self._answer(worker, f"worker {rank}") for rank, worker in answers]

    def _answer(self, process, name):
        if not select.select([process.stdout], [], [], PATIENCE)[0]:
            raise RuntimeError(f"{name} has not answered for {PATIENCE} s")
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name} has ended; the reason is above")
        return json.loads(line)

    def __exit__(self, *_):
        processes = [*self._workers, *self._aggregators]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            process.stdin.close()
            process.stdout.close()
        self._folder.cleanup()
