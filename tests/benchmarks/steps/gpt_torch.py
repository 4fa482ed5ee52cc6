"""Training steps of a small GPT on torch, through torch.compile or torch_xla.

gpt_torch.py REPORT --backend inductor|xla
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--backend", choices=["inductor", "xla"], required=True)
parser.add_argument("--plugin", action="store_true", help="torch_xla on the CPU's PJRT plug-in")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--steps", type=int, default=3)
options = parser.parse_args()

sys.path.insert(0, str(Path(__file__).parents[3] / "client" / "examples"))
if options.plugin:
    sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
    from pjrt_plugin import LIBRARY, widen_execute_options

    os.environ |= {"PJRT_DEVICE": "LIBRARY", "PJRT_LIBRARY_PATH": str(LIBRARY)}
    widen_execute_options()

import torch
from gpt import GPT, draw_batches, read_corpus

BATCH, CONTEXT, WIDTH, HEADS = 4, 64, 128, 4

torch.manual_seed(0)
model = GPT(layers=options.layers, width=WIDTH, heads=HEADS, context=CONTEXT)
device = "cpu"
if options.backend == "xla":
    import torch_xla

    device = torch_xla.device()
    model = model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_of = torch.compile(model) if options.backend == "inductor" else model
batches = draw_batches(read_corpus(), batch=BATCH, context=CONTEXT, seed=0)

losses, seconds = [], []
for _, (tokens, targets) in zip(range(options.steps), batches, strict=False):
    started = time.monotonic()
    optimizer.zero_grad()
    loss = loss_of(tokens.to(device), targets.to(device))
    loss.backward()
    optimizer.step()
    if options.backend == "xla":
        torch_xla.sync()
    losses.append(loss.item().hex())
    seconds.append(time.monotonic() - started)

options.report.write_text(json.dumps({"losses": losses, "step_seconds": seconds}))
