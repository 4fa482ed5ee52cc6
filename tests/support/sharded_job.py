"""Trains sharded models (FSDP2) beside whole ones that get the same gradients; reports both."""

import argparse
import itertools
import json
import math
import os
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from graphstash import ConfigError, training
from graphstash.training.sharding import full

STEPS = 5
BAD = 2

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--on", choices=("gloo",))
parser.add_argument("--rank", type=int)
parser.add_argument("--world", type=int)
parser.add_argument("--rendezvous", type=Path)
options = parser.parse_args()

OPTIMIZERS = {
    "SGD": lambda p: training.SGD(p, lr=0.05),
    "SGD momentum": lambda p: training.SGD(p, lr=0.05, momentum=0.9, fused=False),
    "Adam": lambda p: training.Adam(p, lr=0.05),
    "Adam amsgrad": lambda p: training.Adam(p, lr=0.05, amsgrad=True, fused=False),
    "AdamW": lambda p: training.AdamW(p, lr=0.05, weight_decay=0.1),
    "LAMB": lambda p: training.LAMB(p, lr=0.05),
    "Lion": lambda p: training.Lion(p, lr=0.01),
}
INPUTS = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def model(seed=0, *, sharded):
    """Sizes that two processes cannot share equally; one bias lies in one process alone."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 1))
    if sharded:
        for layer in (layers[0], layers[2]):
            fully_shard(layer)
        fully_shard(layers)
    return layers


def loss_of(layers, batch=INPUTS):
    return (layers(batch) - batch.sum(1, keepdim=True)).square().mean()


def compare(make, *, scaled, clip):
    """The parameters of both, and which steps each has left out."""
    both = [model(sharded=sharded) for sharded in (True, False)]
    optimizers = [make(each.parameters()) for each in both]
    scales = [training.LossScale(8.0, growth_interval=2, enabled=scaled) for _ in both]
    skipped = [[], []]
    for step in range(STEPS):
        scales[0].scale(loss_of(both[0])).backward()
        if scaled:
            scales[1].scale(torch.ones(()))
        gradients = [parameter.grad for parameter in both[0].parameters()]
        if scaled and step == BAD and options.rank == 1:
            gradients[0].to_local()[0] = math.inf  # the other process has none
        for parameter, gradient in zip(both[1].parameters(), gradients, strict=True):
            parameter.grad = full(gradient).clone()
        for each, optimizer, scale, bad in zip(both, optimizers, scales, skipped, strict=True):
            if clip:
                scale.unscale_(optimizer)
                clip(each.parameters())
            bad.append(float(scale.step(optimizer)))
            scale.update()
            optimizer.zero_grad()
    values = [[full(p).tolist() for p in each.parameters()] for each in both]
    return {"sharded": values[0], "whole": values[1], "skipped": skipped}


def train(directory, steps, *, seed=0, optimizer=training.AdamW):
    layers = model(seed, sharded=True)
    result = training.train(
        layers,
        optimizer(layers.parameters(), lr=0.05),
        training.Batches((INPUTS,), 4, seed=2, rank=options.rank, world=options.world),
        steps=steps,
        loss=lambda layers, batch: loss_of(layers, batch[0]),
        accumulate=2,
        clip_norm=1.0,
        checkpoints=directory,
        progress=False,
    )
    values = [full(parameter).tolist() for parameter in layers.parameters()]
    return {"kind": type(layers[0].weight).__name__, "losses": result.losses, "values": values}


def resumed(optimizer):
    """A run that was stopped and goes on, and one that was not."""
    place = options.rendezvous.with_suffix(f".{optimizer.__name__}.{optimizer.__module__}")
    whole = train(place / "whole", 6, optimizer=optimizer)
    train(place / "parts", 3, optimizer=optimizer)
    rest = train(place / "parts", 6, seed=9, optimizer=optimizer)
    with training.Checkpoints(place / "whole") as checkpoints:
        saved = checkpoints.load().state
    layers = model(sharded=False)
    layers.load_state_dict(saved["model"])
    mine = optimizer(layers.parameters())
    mine.load_state_dict(saved["optimizer"])
    return {
        "whole": whole,
        "rest": rest,
        "saved": [parameter.tolist() for parameter in layers.parameters()],
    }


def refused():
    with training.Checkpoints(options.rendezvous.with_suffix(f".{options.rank}")) as checkpoints:
        try:
            checkpoints.save(1, {"model": model(sharded=True).state_dict()})
        except ConfigError as error:
            return str(error)


def refused_by_muon():
    matrices = [p for p in model(sharded=True).parameters() if p.dim() == 2]
    training.Muon([{"params": matrices, "use_muon": False}])
    try:
        training.Muon(matrices)
    except ValueError as error:
        return str(error)


def refused_by(optimizer):
    try:
        optimizer(model(sharded=True).parameters())
    except ValueError as error:
        return str(error)


NOT_SHARDED = (training.Adafactor, training.ScheduleFreeAdamW, training.Adam8bit)


def refused_with_roots():
    matrices = [p for p in model(sharded=True).parameters() if p.dim() == 2]
    messages = []
    for optimizer in (training.Shampoo, training.SOAP):
        try:
            optimizer(matrices)
        except ValueError as error:
            messages.append(str(error))
    return messages


CLIPS = {
    "": None,
    "norm": lambda parameters: training.clip_grad_norm_(parameters, 0.1),
    "value": lambda parameters: training.clip_grad_value_(parameters, 0.01),
}
distributed.init_process_group(
    "gloo",
    init_method=options.rendezvous.as_uri(),
    rank=options.rank,
    world_size=options.world,
)
cases = itertools.product(OPTIMIZERS, (False, True), CLIPS)
report = {
    "cases": {
        f"{name} {scaled} {clip}": compare(OPTIMIZERS[name], scaled=scaled, clip=CLIPS[clip])
        for name, scaled, clip in cases
    },
    "resumed": [resumed(each) for each in (training.AdamW, torch.optim.AdamW)],
    "refused": refused(),
    "refused by Muon": refused_by_muon(),
    "refused by": {each.__name__: refused_by(each) for each in NOT_SHARDED},
    "refused with roots": refused_with_roots(),
}
options.report.write_text(json.dumps(report))
distributed.monitored_barrier()  # the first one keeps the store
os._exit(0)
