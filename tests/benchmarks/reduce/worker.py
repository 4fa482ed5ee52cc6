"""A worker that executes requests, one JSON line each, until its standard input ends.

    {"prepare": arm, "cell": {...}}        prepares a call of an arm
    {"call": 123.4}                        makes the call at that time of the clock
    {"train": model, "arm": arm}           prepares a training in DDP
    {"steps": 8}                           makes steps of the training
    {"losses": true}                       ends the training
    {"sent": arm}                          counts the payload bytes so far

The answer to each request is a line of JSON.
"""

import argparse
import json
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from benchmarks.reduce.arms import Arms
from benchmarks.reduce.cells import BLOCK, Cell
from benchmarks.reduce.models import Training

TCP_INFO_BYTES_SENT = 200
"""Offset in Linux's struct tcp_info; the count of retransmitted bytes follows."""


def main():
    parser = argparse.ArgumentParser()
    for name in ("rank", "workers"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("rendezvous", "address", "secret-file"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--aggregators", nargs="*")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{options.rendezvous}",
        rank=options.rank,
        world_size=options.workers,
        timeout=timedelta(seconds=300),
    )
    dedicated = {"aggregators": options.aggregators, "secret_file": options.secret_file}
    arms = Arms({"dedicated": dedicated, "colocated": {"listen": options.address}})
    worker = Worker(options.rank, arms)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=answers, flush=True)
    os._exit(0)  # the other ranks may have ended


class Worker:
    def __init__(self, rank, arms):
        self._rank = rank
        self._arms = arms
        self._cell = None
        self._flat = torch.empty(0)

    def answer(self, request):
        match request:
            case {"prepare": arm, "cell": cell}:
                return self._prepare(arm, Cell(**cell))
            case {"call": at}:
                return self._run(at)
            case {"train": model, "arm": arm}:
                self._training = Training(self._rank, self._arms, model=model, arm=arm)
                return {}
            case {"steps": steps}:
                cpu = time.process_time()
                return {"seconds": self._training.run(steps), "cpu": time.process_time() - cpu}
            case {"losses": True}:
                return self._training.close()
            case {"sent": arm}:
                payload, datagrams = self._arms.datagrams(arm) or (tcp_sent(), 0)
                return {"payload": payload, "datagrams": datagrams}

    def _prepare(self, arm, cell):
        if cell != self._cell:
            self._cell = cell
            self._chosen, self._values = cell.chosen(self._rank), cell.values(self._rank)
            self._sums = cell.sums()
            if self._flat.nbytes != cell.size:
                self._flat = torch.empty(cell.size // 4)
        self._flat.view(-1, BLOCK).copy_(self._values[:, None])
        self._call, self._result = self._arms.prepared(arm, self._flat, self._chosen)
        return {}

    def _run(self, at):
        time.sleep(max(0, at - time.monotonic()))
        cpu = time.process_time()
        found = self._call()
        answer = {"seconds": time.monotonic() - at, "cpu": time.process_time() - cpu}
        rows = self._result().view(-1, BLOCK)
        answer["exact"] = bool((rows == self._sums[:, None]).all())
        if found is not None:  # the code counts its bytes
            whole = isinstance(found, int)
            answer["counted"] = found if whole else found.bitmap_bytes + found.block_bytes
        return answer


def tcp_sent():
    """Return the payload bytes of all connections of this process, without retransmissions."""
    total = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if not str(each.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(each.name))) as one:
                if one.family == socket.AF_UNIX or one.type != socket.SOCK_STREAM:
                    continue
                found = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            sent, again = struct.unpack_from("QQ", found, TCP_INFO_BYTES_SENT)
            total += sent - again
    return total


main()
