"""Training in several processes with and without fused updates: the results are equal, or refused.

Three processes detect more than two, because a third of a gradient is rounded and a half is not.
"""

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from graphstash import training
from graphstash.training.fusion import partial_step
from graphstash.training.fusion.uses import StandIn
from graphstash.training.sharding import local
from support.cases.ranks import error_of

partial_step._UNIT_BYTES = 0  # type: ignore[misc] # or these small parameters were left to step()

STEPS = 10
WIDTH = 12

Step = Callable[[Any, Any, int], bool]
"""Makes a step of a model and an optimizer, and returns whether backward has updated everything."""


class Net(nn.Module):
    """A model that uses some layers only in some steps or processes, and one layer never."""

    def __init__(self, *, chooses: bool = False) -> None:
        super().__init__()
        self.chooses, self.calls = chooses, 0
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.unused = nn.Linear(WIDTH, WIDTH) if chooses else None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        first, *middle, last = self.layers
        x = torch.tanh(first(x))
        for number, layer in enumerate(middle):
            turn = self.calls + number * distributed.get_rank()
            if not self.chooses or turn % (number + 2) == 0:
                x = torch.tanh(layer(x))
        found: Tensor = last(x)
        return found


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + distributed.get_rank())
    x, y = (torch.randn(4, WIDTH, generator=generator) for _ in range(2))
    return nn.functional.mse_loss(model(x), y)


def is_updated(model: nn.Module) -> bool:
    """Return whether backward has updated all parameters, so that no gradient has values."""
    gradients = [parameter.grad for parameter in model.parameters()]
    return all(each is None or isinstance(each, StandIn) for each in gradients)


def one_step(model: Any, optimizer: Any, step: int) -> bool:
    optimizer.zero_grad()
    loss_of(model, step).backward()
    found = is_updated(model)
    optimizer.step()
    return found


def ddp(**settings: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    net = Net(chooses=settings.get("find_unused_parameters", False))
    return DistributedDataParallel(net, bucket_cap_mb=0.0004, **settings)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: training.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: training.AdamW(p, lr=0.05),
    "LAMB": lambda p: training.LAMB(p, lr=0.05),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
}
UNUSED = {"find_unused_parameters": True}
SETTINGS: dict[str, dict[str, bool]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": UNUSED,
    "unused, views": UNUSED | {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
}


def run(model: nn.Module, optimizer: str, when: Any, *, step: Step = one_step) -> list[Tensor]:
    """Train, save and load in the middle, continue without fusion, and return the values."""
    mine = OPTIMIZERS[optimizer](model.parameters())
    with nullcontext() if when is None else training.fuse(model, mine, when):
        in_backward = []
        for number in range(STEPS):
            in_backward.append(step(model, mine, number))
            if number == STEPS // 2:
                saved = copy.deepcopy([model.state_dict(), mine.state_dict()])
                model.load_state_dict(saved[0])
                mine.load_state_dict(saved[1])
    expected = [when == "backward" and number > 0 for number in range(STEPS)]
    assert in_backward == expected, in_backward
    for number in range(STEPS, STEPS + 3):
        step(model, mine, number)
    states = [mine.state.get(parameter, {}) for parameter in model.parameters()]
    numbers = [torch.as_tensor(state[name]) for state in states for name in sorted(state)]
    return [local(each.detach()).clone() for each in (*model.parameters(), *numbers)]


def assert_same(train: Callable[[Any], list[Any]], when: str) -> None:
    """Require that a fused run ends where an unfused one ends, to the bit."""
    alone, fused = train(None), train(when)
    assert len(alone) == len(fused)
    for one, other in zip(alone, fused, strict=True):
        assert torch.equal(one, other)


def replicated(*, when: str, optimizer: str, settings: str) -> None:
    assert_same(lambda when: run(ddp(**SETTINGS[settings]), optimizer, when), when)


def joined_later(*, divides_by_all: bool) -> None:
    """Make another number of steps in each process after the fusion."""

    def train(when: Any) -> list[Tensor]:
        model = ddp()
        values = run(model, "SGD", when)
        optimizer = sgd(model)
        with model.join(divide_by_initial_world_size=divides_by_all):
            for number in range(2 + 2 * distributed.get_rank()):
                one_step(model, optimizer, number)
        return [*values, *model.parameters()]

    assert_same(train, "backward")


def with_own_hook() -> None:
    def train(when: str | None) -> list[Tensor]:
        model = ddp()
        model.register_comm_hook(None, allreduce_hook)
        return run(model, "AdamW", when)

    assert_same(train, "forward")


def fsdp() -> Any:
    torch.manual_seed(0)
    model: Any = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def sharded(*, optimizer: str) -> None:
    assert_same(lambda when: run(fsdp(), optimizer, when), "backward")


def accumulating(model: Any, optimizer: Any, number: int, *, reduces: bool = False) -> bool:
    """Make a step of two micro-batches."""
    optimizer.zero_grad()
    for part in range(2):
        model.set_requires_gradient_sync(reduces or part == 1)
        loss_of(model, 2 * number + part).backward()
    found = is_updated(model)
    optimizer.step()
    return found


def sharded_in_steps(when: str | None, step: Step) -> list[Tensor]:
    return run(fsdp(), "AdamW", when, step=step)


def sharded_and_accumulated() -> None:
    assert_same(lambda when: sharded_in_steps(when, accumulating), "backward")


def tensor_parallel(*, when: str) -> None:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))

    def step(model: Any, optimizer: Any, number: int) -> bool:
        optimizer.zero_grad()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        first, second, *_, last = model.layers
        last(second(torch.tanh(first(x)))).square().mean().backward()
        found = is_updated(model)
        optimizer.step()
        return found

    def train(when: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = Net()
        parallelize_module(model.layers[0], mesh, ColwiseParallel())
        parallelize_module(model.layers[1], mesh, RowwiseParallel())
        return run(model, "AdamW", when, step=step)

    assert_same(train, when)


def by_train(*, when: str) -> None:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))

    def train(when: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        made = training.train(
            model,
            training.AdamW(model.parameters(), lr=0.05),
            training.Batches((inputs,), 4, seed=2, rank=rank, world=world),
            steps=12,
            loss=lambda model, batch: model(batch[0]).square().mean(),
            progress=False,
            fuse=when,
        )
        return [torch.tensor(made.losses), *model.parameters()]

    assert_same(train, when)


# Refused cases, which would not be exact.


def sgd(model: nn.Module) -> training.SGD:
    return training.SGD(model.parameters(), lr=0.1)


def of_own_hook() -> None:
    model = ddp()
    model.register_comm_hook(None, allreduce_hook)
    training.fuse(model, sgd(model))


def of_builtin_hook() -> None:
    model: Any = ddp()
    model._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)
    training.fuse(model, sgd(model))


def of_mixed_precision() -> None:
    model = ddp()
    model.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)  # torch sets it on CUDA
    training.fuse(model, sgd(model), "forward")


def require_unchanged(model: nn.Module, work: Callable[[], object]) -> None:
    """Require that the work does not change the parameters, even if it raises."""
    before = copy.deepcopy(list(model.parameters()))
    try:
        work()
    finally:
        assert all(map(torch.equal, before, model.parameters())), "a parameter has changed"


def of_accumulation(first: int) -> None:
    model = ddp()
    optimizer = sgd(model)

    def accumulate() -> None:
        with model.no_sync():
            loss_of(model, 8).backward()
        loss_of(model, 9).backward()
        optimizer.step()

    with training.fuse(model, optimizer):
        for step in range(first):
            one_step(model, optimizer, step)
        optimizer.zero_grad()
        require_unchanged(model, accumulate)


def of_inner(**settings: Any) -> None:
    model = ddp(**settings)
    optimizer = sgd(model)
    with training.fuse(model.module, optimizer):
        require_unchanged(model, lambda: one_step(model, optimizer, 0))


def of_join() -> None:
    model = ddp()
    optimizer = sgd(model)
    with training.fuse(model, optimizer), model.join():
        for step in range(3):
            one_step(model, optimizer, step)


def of_clipping() -> None:
    model = ddp()
    optimizer = sgd(model)
    with training.fuse(model, optimizer):
        loss_of(model, 0).backward()
        training.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


def of_half_an_update() -> None:
    """A backward that fails in all processes after some buckets."""
    model: Any = ddp()
    optimizer = sgd(model)
    with training.fuse(model, optimizer) as fusion:
        one_step(model, optimizer, 0)
        optimizer.zero_grad()
        updated: list[Any] = []
        update: Any = fusion.partial_step

        def watched(*given: Any, **named: Any) -> None:
            update(*given, **named)
            updated.append(given)

        instead: Any = watched
        fusion.partial_step = instead
        instead.set_units, instead.state_has_changed = update.set_units, update.state_has_changed

        def fail(*_: Any) -> None:
            while not updated:  # other threads update
                os.sched_yield()
            raise ZeroDivisionError

        model.module.layers[1].register_full_backward_pre_hook(fail)
        try:
            loss_of(model, 1).backward()
        except ZeroDivisionError:
            model.state_dict()


def of_offloading() -> None:
    """Parameters on the CPU whose shards are on CUDA, as with CPUOffloadPolicy."""
    world = distributed.get_world_size()
    mesh = DeviceMesh("cuda", torch.arange(world), _init_backend=False)
    whole = TensorMeta(torch.Size([2 * world, 3]), (3, 1), torch.float32)
    spec = DTensorSpec(mesh, (Shard(0),), whole)
    model: Any = nn.Module()
    model.weight = nn.Parameter(DTensor(torch.zeros(2, 3), spec, requires_grad=True))
    training.fuse(model, sgd(model))


def clipping(model: Any, optimizer: Any, number: int) -> bool:
    optimizer.zero_grad()
    loss_of(model, number).backward()
    training.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return False


REFUSALS: dict[str, Callable[[], object]] = {
    "own hook": of_own_hook,
    "built-in hook": of_builtin_hook,
    "mixed precision": of_mixed_precision,
    "accumulated": lambda: of_accumulation(0),
    "accumulated later": lambda: of_accumulation(2),
    "inner": of_inner,
    "inner, views": lambda: of_inner(gradient_as_bucket_view=True),
    "join": of_join,
    "clipped": of_clipping,
    "half updated": of_half_an_update,
    "FSDP, forward": lambda: sharded_in_steps("forward", one_step),
    "FSDP, reduced twice": lambda: sharded_in_steps(
        "backward", partial(accumulating, reduces=True)
    ),
    "FSDP, offloaded": of_offloading,
    "FSDP, clipped": lambda: sharded_in_steps("backward", clipping),
}


def refusal(*, name: str) -> str:
    return error_of(REFUSALS[name])
