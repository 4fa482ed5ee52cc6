"""Ranks that train a linear model with torch.compile and average their gradients.

    ranks_torch_job.py DIRECTORY --size 3 --port 29500 --url URL --namespace NAME --runs a= b=0,2

Importing torch is most of the work of such a small job, so the ranks of all runs, one run after the
other, are forks of one process that has done it; each has the disk of a host of its own. The cache
is out of reach for the ranks after `=`. A product of matrices needs no kernel of Inductor's own,
and so no C++ compiler. Reports, `<run>/<rank>.json` in the directory: losses, which entries torch
found, what the cache counted.
"""

import argparse
import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--size", type=int)
parser.add_argument("--runs", nargs="+")
parser.add_argument("--url")
parser.add_argument("--namespace")
parser.add_argument("--port", type=int)
options = parser.parse_args()

# No helper processes before the forks, no probes of the CPU that run the C++ compiler.
os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}

import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed as dist
from torch._dynamo.utils import counters

import graphstash


def train(directory, rank, broken):
    host = directory / str(rank)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(host / "inductor")
    graphstash.install(
        url="http://127.0.0.1:9" if str(rank) in broken else options.url,
        namespace=options.namespace,
        cache_dir=host / "tier",
        hooks=("inductor",),
    )
    store = f"tcp://127.0.0.1:{options.port}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.size)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    weight = torch.randn(16, 1, requires_grad=True)
    product = torch.compile(lambda x, weight: x @ weight)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(3):
        x = torch.randn(8, 16, generator=generator)
        loss = (product(x, weight) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        dist.all_reduce(weight.grad)
        with torch.no_grad():
            weight -= 0.01 * weight.grad
        weight.grad = None
        losses.append(loss.item().hex())
    return losses


def report(directory, rank, broken):
    losses = train(directory, rank, broken)
    found = {name: number for name, number in counters["inductor"].items() if "cache" in name}
    stats = asdict(graphstash.stats())
    (directory / f"{rank}.json").write_text(
        json.dumps({"losses": losses, "found": found, "stats": stats})
    )
    graphstash.uninstall()  # uploads
    dist.monitored_barrier()  # rank 0 keeps the store
    # The end of the group may wait, with the interpreter lock held, for a thread that wants that
    # lock (torch 2.7); so it is left to the end of the process.
    os._exit(0)


def run(name, broken):
    """Whether a rank has failed."""
    directory = options.directory / name
    directory.mkdir()
    children = []
    for rank in range(options.size):
        if (child := os.fork()) == 0:
            try:
                report(directory, rank, broken.split(","))
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return any(statuses)


sys.exit(any(run(*each.split("=")) for each in options.runs))
