"""Ranks that train a linear model with torch.compile and average their gradients.

    ranks_torch_job.py DIRECTORY --size 4 --broken 2 --url URL --namespace NAME --port 29500

Importing torch is most of the work of such a small job, so the ranks are forks of one process that
has done it; each has the disk of a host of its own. A product of matrices needs no kernel of
Inductor's own, and so no C++ compiler. Reports, `<rank>.json` in the directory:
losses, which entries torch found, what the cache counted.
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
parser.add_argument("--broken", default="")
parser.add_argument("--url")
parser.add_argument("--namespace")
parser.add_argument("--port", type=int)
options = parser.parse_args()

# No helper processes before the forks, no probes of the CPU that run the C++ compiler.
os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}

import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.utils import counters

import graphstash


def train(rank):
    host = options.directory / str(rank)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(host / "inductor")
    graphstash.install(
        url="http://127.0.0.1:9" if str(rank) in options.broken.split(",") else options.url,
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


def report(rank):
    losses = train(rank)
    found = {name: number for name, number in counters["inductor"].items() if "cache" in name}
    stats = asdict(graphstash.stats())
    (options.directory / f"{rank}.json").write_text(
        json.dumps({"losses": losses, "found": found, "stats": stats})
    )
    graphstash.uninstall()  # uploads
    dist.monitored_barrier()  # rank 0 keeps the store
    # The end of the group may wait, with the interpreter lock held, for a thread that wants that
    # lock (torch 2.7); so it is left to the end of the process.
    os._exit(0)


children = []
for rank in range(options.size):
    if (child := os.fork()) == 0:
        try:
            report(rank)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
