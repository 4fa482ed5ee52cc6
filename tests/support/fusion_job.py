"""Trains in several processes with fused updates and without; reports whether both end alike."""

import argparse
import copy
import json
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from graphstash import training
from graphstash.training.fusion import partial_step
from graphstash.training.sharding import local

SHORT = 10
WIDTH = 12

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--on", choices=("gloo",))
parser.add_argument("--rank", type=int)
parser.add_argument("--world", type=int)
parser.add_argument("--rendezvous", type=Path)
options = parser.parse_args()
STEPS = 12 if options.world == 2 else 50


class Net(nn.Module):
    """Some of its layers are used in some steps only, and by some processes only; one by none."""

    def __init__(self, *, chooses=False):
        super().__init__()
        self.chooses = chooses
        self.calls = 0
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.unused = nn.Linear(WIDTH, WIDTH) if chooses else None

    def forward(self, x):
        self.calls += 1
        first, *middle, last = self.layers
        x = torch.tanh(first(x))
        for number, layer in enumerate(middle):
            if not self.chooses or (self.calls + number * options.rank) % (number + 2) == 0:
                x = torch.tanh(layer(x))
        return last(x)


def batch(step):
    generator = torch.Generator().manual_seed(100 * step + options.rank)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def loss_of(model, step):
    x, y = batch(step)
    return nn.functional.mse_loss(model(x), y)


def one_step(model, optimizer, step):
    """Whether backward has updated all that it gave gradients."""
    before = [local(each.detach()).clone() for each in model.parameters()]
    optimizer.zero_grad()
    loss_of(model, step).backward()
    left = any(parameter.grad is not None for parameter in model.parameters())
    moved = not all(map(torch.equal, before, (local(each.detach()) for each in model.parameters())))
    optimizer.step()
    return moved and not left


def result(model, optimizer):
    states = [optimizer.state.get(parameter, {}) for parameter in model.parameters()]
    numbers = [torch.as_tensor(state[name]) for state in states for name in sorted(state)]
    return [each.detach().clone() for each in (*model.parameters(), *numbers)]


def ddp(**settings):
    torch.manual_seed(0)
    net = Net(chooses=settings.get("find_unused_parameters", False))
    return DistributedDataParallel(net, bucket_cap_mb=0.0004, **settings)


BOTH = ("backward", "forward")
OPTIMIZERS = {
    "SGD": lambda p: training.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: training.AdamW(p, lr=0.05),
    "LAMB": lambda p: training.LAMB(p, lr=0.05),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
}
UNUSED = {"find_unused_parameters": True}
SETTINGS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": UNUSED,
    "unused, views": UNUSED | {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
}


def run(model, make, when, *, steps=STEPS, step=one_step):
    """Parameters and state afterwards, of a DTensor this process's shard."""
    optimizer = make(model.parameters())
    with nullcontext() if when is None else training.fuse(model, optimizer, when):
        in_backward = []
        for number in range(steps):
            in_backward.append(step(model, optimizer, number))
            if number == steps // 2:
                saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
    assert in_backward == [when == "backward" and number > 0 for number in range(steps)]
    for number in range(steps, steps + 3):  # without fusion again
        step(model, optimizer, number)
    return [local(each) for each in result(model, optimizer)]


def is_same(train, when):
    """Whether a fused run ends where one without fusion ends."""
    alone, fused = train(None), train(when)
    return len(alone) == len(fused) and all(map(torch.equal, alone, fused))


def replicated(when, optimizer, settings, steps):
    make, settings = OPTIMIZERS[optimizer], SETTINGS[settings]
    return is_same(lambda when: run(ddp(**settings), make, when, steps=steps), when)


def refusal(function):
    """What is said, and whether the parameters are what they were."""
    try:
        function()
    except training.FusionError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def own_hook():
    model = ddp()
    model.register_comm_hook(None, allreduce_hook)
    training.fuse(model, training.SGD(model.parameters(), lr=0.1))


def builtin_hook():
    model = ddp()
    model._register_builtin_comm_hook(distributed.BuiltinCommHookType.ALLREDUCE)
    training.fuse(model, training.SGD(model.parameters(), lr=0.1))


def mixed():
    model = ddp()
    model.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)  # torch makes it on CUDA
    training.fuse(model, training.SGD(model.parameters(), lr=0.1), "forward")


def with_own_hook(when):
    model = ddp()
    model.register_comm_hook(None, allreduce_hook)
    return run(model, OPTIMIZERS["AdamW"], when, steps=SHORT)


def accumulated(first):
    model = ddp()
    optimizer = training.SGD(model.parameters(), lr=0.1)
    with training.fuse(model, optimizer):
        for step in range(first):
            one_step(model, optimizer, step)
        optimizer.zero_grad()
        before = copy.deepcopy(list(model.parameters()))
        try:
            with model.no_sync():
                loss_of(model, 8).backward()
            loss_of(model, 9).backward()
            optimizer.step()
        finally:
            assert all(map(torch.equal, before, model.parameters()))


def inner(**settings):
    model = ddp(**settings)
    optimizer = training.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(list(model.parameters()))
    with training.fuse(model.module, optimizer):
        try:
            one_step(model, optimizer, 0)
        finally:
            assert all(map(torch.equal, before, model.parameters()))


def joined():
    model = ddp()
    optimizer = training.SGD(model.parameters(), lr=0.1)
    with training.fuse(model, optimizer), model.join():
        for step in range(3):
            one_step(model, optimizer, step)


def clipped():
    model = ddp()
    optimizer = training.SGD(model.parameters(), lr=0.1)
    with training.fuse(model, optimizer):
        loss_of(model, 0).backward()
        training.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


def half_updated():
    """A backward that fails in all processes after some buckets."""
    model = ddp()
    optimizer = training.SGD(model.parameters(), lr=0.1)
    with training.fuse(model, optimizer) as fusion:
        one_step(model, optimizer, 0)
        optimizer.zero_grad()
        updated = []
        update = fusion.partial_step

        def watched(*given, **named):
            update(*given, **named)
            updated.append(given)

        fusion.partial_step = watched
        watched.set_units, watched.state_has_changed = update.set_units, update.state_has_changed

        def fail(*_):
            while not updated:  # other threads do that
                os.sched_yield()
            raise ZeroDivisionError

        model.module.layers[1].register_full_backward_pre_hook(fail)
        try:
            loss_of(model, 1).backward()
        except ZeroDivisionError:
            model.state_dict()


SHARDED = OPTIMIZERS | {"Lion": lambda p: training.Lion(p, lr=0.01)}


def fsdp(**settings):
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return model


def sharded(when, name, steps):
    return is_same(lambda when: run(fsdp(), SHARDED[name], when, steps=steps), when)


def accumulating(model, optimizer, number, *, reduces=False):
    """A step of two micro-batches."""
    optimizer.zero_grad()
    for part in range(2):
        model.set_requires_gradient_sync(reduces or part == 1)
        loss_of(model, 2 * number + part).backward()
    left = any(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    return not left


def clipping(model, optimizer, number):
    optimizer.zero_grad()
    loss_of(model, number).backward()
    training.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def sharded_in_steps(when, step):
    return run(fsdp(), SHARDED["AdamW"], when, steps=SHORT, step=step)


def offloaded():
    """As with CPUOffloadPolicy: the parameters are here, and processes share them on CUDA."""
    mesh = DeviceMesh("cuda", torch.arange(options.world), _init_backend=False)
    whole = TensorMeta(torch.Size([2 * options.world, 3]), (3, 1), torch.float32)
    model = nn.Module()
    shard = DTensor(torch.zeros(2, 3), DTensorSpec(mesh, (Shard(0),), whole), requires_grad=True)
    model.weight = nn.Parameter(shard)
    training.fuse(model, training.SGD(model.parameters(), lr=0.1))


def tensor_parallel(when):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (options.world,))
    model = Net()
    parallelize_module(model.layers[0], mesh, ColwiseParallel())
    parallelize_module(model.layers[1], mesh, RowwiseParallel())

    def step(model, optimizer, number):
        optimizer.zero_grad()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        first, second, *_, last = model.layers
        last(second(torch.tanh(first(x)))).square().mean().backward()
        left = any(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        return not left

    return run(model, OPTIMIZERS["AdamW"], when, steps=SHORT, step=step)


def by_train(fuse):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = training.AdamW(model.parameters(), lr=0.05)
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    data = training.Batches((inputs,), 4, seed=2, rank=options.rank, world=options.world)
    made = training.train(
        model,
        optimizer,
        data,
        steps=12,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        progress=False,
        fuse=fuse,
    )
    return [*made.losses, *(each.tolist() for each in model.parameters())]


partial_step._UNIT_BYTES = 0
distributed.init_process_group(
    "gloo",
    init_method=options.rendezvous.as_uri(),
    rank=options.rank,
    world_size=options.world,
)
ddp_cases = [
    *(("backward", "AdamW", name, STEPS) for name in SETTINGS),
    *(("forward", "AdamW", name, STEPS) for name in ("plain", "unused, views")),
    *(("backward", name, "unused", SHORT) for name in OPTIMIZERS if name != "AdamW"),
]
sharded_cases = [("backward", name, STEPS if name == "AdamW" else SHORT) for name in SHARDED]
alone = by_train(None)
report = {
    "equal": {
        **{f"DDP {case}": replicated(*case) for case in ddp_cases},
        "DDP, own hook": is_same(with_own_hook, "forward"),
        **{f"FSDP {case}": sharded(*case) for case in sharded_cases},
        "FSDP, accumulated": is_same(lambda when: sharded_in_steps(when, accumulating), "backward"),
        **{f"tensor parallel, {when}": is_same(tensor_parallel, when) for when in BOTH},
        **{f"train, {when}": by_train(when) == alone for when in BOTH},
    },
    "refused": {
        "own hook": refusal(own_hook),
        "built-in hook": refusal(builtin_hook),
        "mixed precision": refusal(mixed),
        "accumulated": refusal(lambda: accumulated(0)),
        "accumulated later": refusal(lambda: accumulated(2)),
        "inner": refusal(inner),
        "inner, views": refusal(lambda: inner(gradient_as_bucket_view=True)),
        "join": refusal(joined),
        "clipped": refusal(clipped),
        "half updated": refusal(half_updated),
        "FSDP, forward": refusal(lambda: sharded_in_steps("forward", one_step)),
        "FSDP, reduced twice": refusal(
            lambda: sharded_in_steps("backward", partial(accumulating, reduces=True))
        ),
        "FSDP, offloaded": refusal(offloaded),
        "FSDP, clipped": refusal(lambda: sharded_in_steps("backward", clipping)),
    },
}
options.report.write_text(json.dumps(report))
distributed.monitored_barrier()  # the first one keeps the store
os._exit(0)
