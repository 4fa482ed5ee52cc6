"""Trains a small model as one process of several, or as the only one; reports what came of it.

`--on gloo` runs in torch.distributed; `--on torch_xla` records the reduction on the one device that
a CPU has, as if it were one of two.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional

from graphstash import GraphstashError
from graphstash.training.data.batches import Batches
from graphstash.training.loop.parallel import DistributedXla, Parallel
from graphstash.training.optimizers import AdamW
from graphstash.training.optimizers.gradients import LossScale

STEPS = 8
BAD = (2, 5)
BATCH = 12


def on_gloo(options):
    distributed.init_process_group(
        "gloo",
        init_method=options.rendezvous.as_uri(),
        rank=options.rank,
        world_size=options.world,
    )
    parallel = Parallel.current(torch.device("cpu"))
    report = {
        "rank": [parallel.rank, parallel.world, parallel.is_first],
        "kind": type(parallel).__name__,
        "gathered": parallel.gather({"rank": parallel.rank}),
        "with inf": train(parallel, accumulate=1, bad=BAD),
        "accumulated": train(parallel, accumulate=3, bad=()),
    }
    parallel.require_same("steps", STEPS)
    try:
        parallel.require_same("the rank", parallel.rank)
    except GraphstashError as error:
        report["error"] = str(error)
    return report


def train(parallel, *, accumulate, bad):
    torch.manual_seed(parallel.rank)  # the first one's parameters are everybody's
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    wrapped = parallel.wrap(model)
    again = parallel.wrap(wrapped)
    optimizer = AdamW(model.parameters(), lr=0.05)
    scale = LossScale(1024.0, growth_interval=3)
    inputs = torch.randn(240, 8, generator=torch.Generator().manual_seed(0))
    targets = inputs.sum(1, keepdim=True)
    size = BATCH // accumulate // parallel.world
    batches = Batches((inputs, targets), size, rank=parallel.rank, world=parallel.world)
    reductions = []
    if parallel.world > 1:

        def counted(group, bucket):
            reductions.append(bucket.index())
            return allreduce_hook(group, bucket)

        wrapped.register_comm_hook(None, counted)
    scales, found, unchanged = [], [], []
    for step in range(STEPS):
        for number in range(1, accumulate + 1):
            x, y = next(batches)
            with parallel.reducing(wrapped, last=number == accumulate):
                loss = functional.mse_loss(wrapped(x), y) / accumulate
                if step in bad and parallel.rank == parallel.world - 1:
                    loss = loss * float("inf")
                scale.scale(loss).backward()
        parallel.reduce_gradients(model.parameters())
        before = [parameter.clone() for parameter in model.parameters()]
        found.append(float(scale.step(optimizer)))
        scale.update()
        optimizer.zero_grad(set_to_none=True)
        scales.append(scale.get_scale())
        pairs = zip(before, model.parameters(), strict=True)
        unchanged.append(all(torch.equal(*pair) for pair in pairs))
    return {
        "wrapped_twice": again is not wrapped,
        "parameters": [parameter.tolist() for parameter in model.parameters()],
        "state": [tensor.tolist() for tensor in optimizer.device_tensors()],
        "found_inf": found,
        "scales": scales,
        "unchanged": unchanged,
        "reductions": len(reductions),
    }


def on_torch_xla(_):
    os.environ["XLA_ALWAYS_ALLREDUCE"] = "1"  # although there is one device only
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as xla_metrics

    from graphstash.training.device import upload

    device = torch_xla.device()
    alone = type(Parallel.current(device)) is Parallel
    parallel = DistributedXla(0, 2)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    parallel.wrap(model)
    torch_xla.sync()
    parameters = list(model.parameters())

    def count(metric):
        xm.wait_device_ops()
        data = xla_metrics.metric_data(metric)
        return int(data[0]) if data else 0

    counts, ratios, hlo = [], [], ""
    for step in range(4):
        (inputs,) = upload([torch.full((4, 8), float(step + 1))], device)
        before = [count(name) for name in ("CompileTime", "ExecuteTime")]
        for parameter in parameters:
            parameter.grad = None
        model(inputs).mean().backward()
        alone_gradients = [parameter.grad.clone() for parameter in parameters]
        parallel.reduce_gradients(parameters)
        gradients = [parameter.grad for parameter in parameters]
        hlo = hlo or torch_xla._XLAC._get_xla_tensors_hlo(gradients)
        torch_xla.sync()
        after = [count(name) for name in ("CompileTime", "ExecuteTime")]
        counts.append([new - old for new, old in zip(after, before, strict=True)])
        pairs = zip(gradients, alone_gradients, strict=True)
        ratios.append(all(torch.equal(2 * new.cpu(), old.cpu()) for new, old in pairs))
    return {
        "alone": alone,
        "counts": counts,
        "half": ratios,
        "reductions": hlo.count(" all-reduce("),
        "gathered": parallel.gather({"rank": 0}),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("--on", choices=("gloo", "torch_xla"), required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--rendezvous", type=Path)
    options = parser.parse_args()
    run = {"gloo": on_gloo, "torch_xla": on_torch_xla}[options.on]
    options.report.write_text(json.dumps(run(options)))
    if options.on == "gloo":
        distributed.monitored_barrier()  # the first one keeps the store
        os._exit(0)
