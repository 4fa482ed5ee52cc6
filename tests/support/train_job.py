"""A training job that a test may kill: a small network with dropout, shuffled data, a schedule.

The job writes each step's exact loss as soon as the host has it: lines of "step loss-in-hex".
"""

import argparse
import json
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("losses", type=Path)
parser.add_argument("--device", default="cpu")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--checkpoints", type=Path)
parser.add_argument("--checkpoint-every", type=int, default=4)
parser.add_argument("--log-every", type=int, default=2)
parser.add_argument("--precision", default="fp32")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--data", choices=("batches", "loader"), default="batches")
parser.add_argument("--ahead", type=int)
parser.add_argument("--traced", action="store_true")
parser.add_argument("--fuse", choices=("backward", "forward"))
parser.add_argument("--no-dropout", action="store_true")
parser.add_argument("--ranks", action="store_true", help="one of several processes of torchrun")
parser.add_argument("--job")
parser.add_argument("--stop-after", type=int)
parser.add_argument("--stop-at", type=int, help="the step whose `on_step` stops the training")
parser.add_argument("--slow", type=float, default=0.0, help="seconds that loading a sample takes")
parser.add_argument("--evaluate-every", type=int, help="evaluations draw numbers on the device")
parser.add_argument(
    "--hold-at", type=int, help="the number of the sample that waits for the file LOSSES.go"
)
options = parser.parse_args()

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from graphstash import training

torch.manual_seed(0)
inputs = torch.randn(50, 8)
targets = inputs.sum(1, keepdim=True)


rank, world = 0, 1
if options.ranks:
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank:
        options.report = Path(f"{options.report}.{rank}")
        options.losses = Path(f"{options.losses}.{rank}")


class Slow(TensorDataset):
    taken = 0

    def __getitem__(self, index):
        time.sleep(options.slow)
        self.taken += 1
        if self.taken == options.hold_at:
            options.losses.with_suffix(".held").touch()
            while not options.losses.with_suffix(".go").exists():
                time.sleep(0.005)
        return super().__getitem__(index)


class Losses(training.Callback):
    def on_log(self, entry):
        with options.losses.open("a") as file:
            for step, loss in enumerate(entry.losses, entry.step - len(entry.losses) + 1):
                file.write(f"{step} {loss.hex()}\n")
        if entry.step == options.stop_after and rank == 0:
            raise training.StopTraining


class Stops(training.Callback):
    def on_step(self, step):
        if step == options.stop_at and rank == 0:
            raise training.StopTraining


def counts():
    if options.device != "xla":
        return None
    from torch_xla.debug import metrics

    values = {}
    for name in ("ExecuteTime", "TransferFromDeviceTime", "CompileTime"):
        data = metrics.metric_data(name)
        values[name] = int(data[0]) if data else 0
    values["UncachedCompile"] = metrics.counter_value("UncachedCompile") or 0
    return values


class Counts(training.Callback):
    """Records torch_xla's counters at each boundary."""

    def __init__(self):
        self.at = {}

    def on_log(self, entry):
        self.at[entry.step] = counts()


if options.device == "xla":
    import torch_xla

    device = torch_xla.device()
else:
    device = torch.device(options.device)
model = nn.Sequential(
    nn.Linear(8, 16), nn.Dropout(0.0 if options.no_dropout else 0.2), nn.Tanh(), nn.Linear(16, 1)
).to(device)
optimizer = training.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=options.steps + 1)
if options.data == "loader":
    data = DataLoader(Slow(inputs, targets), batch_size=options.batch, shuffle=True)
else:
    data = training.Batches(Slow(inputs, targets), options.batch, seed=3, rank=rank, world=world)


def drawn(_):
    return {"drawn": torch.rand(3, device=device).sum().item()}


counted = Counts()
started = counts()
result = training.train(
    model,
    optimizer,
    data,
    steps=options.steps,
    loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    precision=options.precision,
    accumulate=options.accumulate,
    schedule=schedule,
    traced=options.traced,
    ahead=options.ahead,
    log_every=options.log_every,
    evaluate=drawn if options.evaluate_every else None,
    evaluate_every=options.evaluate_every,
    checkpoints=options.checkpoints,
    checkpoint_every=options.checkpoint_every,
    callbacks=[Losses(), counted, *([Stops()] if options.stop_at else [])],
    job=options.job,
    **({"fuse": options.fuse} if options.fuse else {}),  # the previous release lacks the option
)
report = {
    "step": result.step,
    "resumed_from": result.resumed_from,
    "started": started,
    "counts": counted.at,
    "weights": [float(parameter.detach().double().sum()) for parameter in model.parameters()],
}
options.report.write_text(json.dumps(report))
if options.ranks:
    torch.distributed.monitored_barrier()  # the first process hosts the store
    os._exit(0)
