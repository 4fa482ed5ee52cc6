"""A small torch.compile job: two layers, forward and backward, two steps.

    inductor_job.py REPORT [options]

`--install` asks for the cache by itself, as a script without `graphstash run` does. The variable
PRETEND_ISA names the instruction sets that torch sees.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--install", action="store_true")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--width", type=int, default=40)
parser.add_argument("--matmul", action="store_true", help="no kernel that needs a C++ compiler")
parser.add_argument("--without", help="a class of remote_cache that this torch does not have")
parser.add_argument("--sizes", type=int, nargs="*", help="a function of dynamic shapes instead")
options = parser.parse_args()

if options.install:
    import graphstash

    graphstash.install()

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import cpu_vec_isa

if pretended := os.environ.get("PRETEND_ISA"):
    cpu_vec_isa.x86_isa_checker = pretended.split

if options.without:
    import torch._inductor.remote_cache

    delattr(torch._inductor.remote_cache, options.without)

torch.set_num_threads(options.threads)
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(24, options.width)
        self.down = nn.Linear(options.width, 24)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


def train(step):
    model = Net()
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 24)
    for _ in range(2):
        optimizer.zero_grad()
        y = multiply(x @ model.up.weight.T, model.down.weight.T) if options.matmul else compiled(x)
        loss = (y**2).sum()
        loss.backward()
        optimizer.step()
        step(loss.item())


@torch.compile
def multiply(x, y):
    return x @ y


@torch.compile(dynamic=True)
def either(x, y):
    """One graph for both branches, with other guards."""
    if x.shape[0] > 16:
        return x @ y
    return x @ y


losses = []
started = time.monotonic()
if options.sizes:
    for size in options.sizes:
        x = torch.arange(float(size * 24)).reshape(size, 24)
        losses.append(either(x, torch.ones(24, 24)).sum().item())
else:
    train(losses.append)
hook = sys.modules.get("graphstash.hooks.inductor")
report = {
    "torch": torch.__version__,
    "seconds": time.monotonic() - started,
    "losses": losses,
    "has_hook": hook is not None,
    "fx": {name: n for name, n in counters["inductor"].items() if name.startswith("fxgraph_cache")},
    "aot": dict(counters["aot_autograd"]),
}
options.report.write_text(json.dumps(report))
