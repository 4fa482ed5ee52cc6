"""A small model, trained as one process of several or as the only one."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional

from graphstash.training.data.batches import Batches
from graphstash.training.device import upload
from graphstash.training.loop.parallel import DistributedXla, Parallel
from graphstash.training.loop.trainer import train
from graphstash.training.optimizers import AdamW
from graphstash.training.optimizers.gradients import LossScale
from support.cases.ranks import error_of

STEPS = 8
BATCH = 12
BAD = (2, 5)


def on_gloo() -> dict[str, Any]:
    parallel = Parallel.current(torch.device("cpu"))
    parallel.require_same({"steps": STEPS})
    return {
        "rank": [parallel.rank, parallel.world, parallel.is_first],
        "kind": type(parallel).__name__,
        "gathered": parallel.gather({"rank": parallel.rank}),
        "with inf": trained(parallel, accumulate=1, bad=BAD),
        "accumulated": trained(parallel, accumulate=3, bad=()),
        "error": error_of(lambda: parallel.require_same({"the rank": parallel.rank})),
    }


def trained(parallel: Parallel, *, accumulate: int, bad: tuple[int, ...]) -> dict[str, Any]:
    """Train with an infinite loss in the last rank's bad steps, and return the results."""
    torch.manual_seed(parallel.rank)  # all processes take the parameters of the first
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    module = parallel.wrap(model)
    assert parallel.wrap(module) is module
    wrapped: Any = module
    optimizer = AdamW(model.parameters(), lr=0.05)
    scale = LossScale(1024.0, growth_interval=3)
    inputs = torch.randn(240, 8, generator=torch.Generator().manual_seed(0))
    size = BATCH // accumulate // parallel.world
    data = (inputs, inputs.sum(1, keepdim=True))
    batches = Batches(data, size, rank=parallel.rank, world=parallel.world)
    reductions = []
    if parallel.world > 1:

        def counted(group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            reductions.append(bucket.index())
            return allreduce_hook(group, bucket)

        wrapped.register_comm_hook(None, counted)
    scales, found = [], []
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
        unchanged = all(map(torch.equal, before, model.parameters()))
        assert unchanged == (step in bad)
    assert found == [float(step in bad) for step in range(STEPS)]
    assert len(reductions) == (STEPS if parallel.world > 1 else 0)
    return {
        "parameters": [parameter.tolist() for parameter in model.parameters()],
        "state": [tensor.tolist() for tensor in optimizer.device_tensors()],
        "scales": scales,
    }


def disagreements() -> dict[str, str]:
    """Return by argument why training with another value in each process is refused."""
    return {
        "lr": refusal(lr=(0.1, 0.2)),
        "clip_norm": refusal(clip_norm=(1.0, 2.0)),
        "accumulate": refusal(accumulate=(1, 2)),
        "steps": refusal(steps=(4, 5)),
        "log_every": refusal(log_every=(2, 3)),
        "evaluate_every": refusal(log_every=(2, 2), evaluate_every=(4, 3)),
        "checkpoints": refusal(checkpoints=(None, "checkpoints")),
        "schedule": refusal(step_size=(3, 4)),
        "loss_scale": refusal(growth_interval=(5, 6)),
        # A process that does not evaluate waits for no other one.
        "evaluate on the first": refusal(evaluate=(lambda _: {}, None), log_every=(2, 2)),
    }


def refusal(**by_rank: Sequence[Any]) -> str:
    rank = distributed.get_rank()
    options = {"evaluate": lambda _: {}} | {name: each[rank] for name, each in by_rank.items()}
    model = nn.Linear(8, 1)
    optimizer = AdamW(model.parameters(), lr=options.pop("lr", 0.1))
    step_size, growth_interval = options.pop("step_size", None), options.pop("growth_interval", 9)
    if step_size is not None:
        options["schedule"] = torch.optim.lr_scheduler.StepLR(optimizer, step_size)
    options["loss_scale"] = LossScale(8.0, growth_interval=growth_interval)
    data = Batches((torch.randn(24, 8), torch.randn(24, 1)), 4, rank=rank, world=2)
    error = error_of(
        lambda: train(
            model, optimizer, data, loss=mean_error, progress=False, **{"steps": 4, **options}
        )
    )
    return error.removeprefix("ConfigError: ").partition(";")[0]


def mean_error(model: nn.Module, batch: Any) -> Tensor:
    inputs, outputs = batch
    return functional.mse_loss(model(inputs), outputs)


def on_torch_xla() -> None:
    """Record the reduction as in a world of two devices. A CPU has only one."""
    os.environ["XLA_ALWAYS_ALLREDUCE"] = "1"  # although there is only one device
    import torch_xla

    from support.cases.xla import counts

    device = torch_xla.device()
    assert type(Parallel.current(device)) is Parallel
    parallel = DistributedXla(0, 2)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    parallel.wrap(model)
    torch_xla.sync()
    parameters = list(model.parameters())
    for step in range(4):
        (inputs,) = upload([torch.full((4, 8), float(step + 1))], device)
        before = counts("CompileTime", "ExecuteTime")
        for parameter in parameters:
            parameter.grad = None
        model(inputs).mean().backward()
        alone: list[Any] = [parameter.grad.clone() for parameter in parameters]  # type: ignore[union-attr] # backward set it
        parallel.reduce_gradients(parameters)
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        if step == 0:
            hlo = torch_xla._XLAC._get_xla_tensors_hlo(gradients)
            assert hlo.count(" all-reduce(") == 1
        torch_xla.sync()
        after = counts("CompileTime", "ExecuteTime")
        assert [b - a for a, b in zip(before, after, strict=True)] == [step == 0, 1]
        for reduced, own in zip(gradients, alone, strict=True):
            assert torch.equal(2 * reduced.cpu(), own.cpu())
    assert parallel.gather({"rank": 0}) == [{"rank": 0}]
