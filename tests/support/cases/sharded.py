"""Sharded models (FSDP2), compared with whole models that get the same gradients."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from graphstash import training
from graphstash.training.sharding import Sums, full, local
from support.cases.ranks import error_of

STEPS = 5
BAD = 2
INPUTS = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: training.SGD(p, lr=0.05),
    "SGD momentum": lambda p: training.SGD(p, lr=0.05, momentum=0.9, fused=False),
    "Adam": lambda p: training.Adam(p, lr=0.05),
    "Adam amsgrad": lambda p: training.Adam(p, lr=0.05, amsgrad=True, fused=False),
    "AdamW": lambda p: training.AdamW(p, lr=0.05, weight_decay=0.1),
    "LAMB": lambda p: training.LAMB(p, lr=0.05),
    "Lion": lambda p: training.Lion(p, lr=0.01),
}
CLIPS: dict[str, Callable[[Any], object]] = {
    "": lambda parameters: None,
    "norm": lambda parameters: training.clip_grad_norm_(parameters, 0.1),
    "value": lambda parameters: training.clip_grad_value_(parameters, 0.01),
}


def new_model(seed: int = 0, *, sharded: bool) -> nn.Sequential:
    """Return a model whose sizes two processes cannot share equally; one bias is on one process."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 1))
    if sharded:
        for layer in (layers[0], layers[2]):
            fully_shard(layer)
        fully_shard(layers)
    return layers


def loss_of(layers: nn.Module, batch: Tensor = INPUTS) -> Tensor:
    loss: Tensor = (layers(batch) - batch.sum(1, keepdim=True)).square().mean()
    return loss


def updates_as_whole(*, name: str, scaled: bool, clip: str) -> None:
    """Require that shards are updated like whole parameters, and that all skip inf in one shard."""
    both = [new_model(sharded=sharded) for sharded in (True, False)]
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in both]
    scales = [training.LossScale(8.0, growth_interval=2, enabled=scaled) for _ in both]
    skipped: list[list[float]] = [[], []]
    for step in range(STEPS):
        scales[0].scale(loss_of(both[0])).backward()
        if scaled:
            scales[1].scale(torch.ones(()))
        gradients: list[Any] = [parameter.grad for parameter in both[0].parameters()]
        if scaled and step == BAD and distributed.get_rank() == 1:
            gradients[0].to_local()[0] = math.inf  # the other process has none
        for parameter, gradient in zip(both[1].parameters(), gradients, strict=True):
            parameter.grad = full(gradient).clone()
        for each, optimizer, scale, bad in zip(both, optimizers, scales, skipped, strict=True):
            if clip:
                scale.unscale_(optimizer)
                CLIPS[clip](each.parameters())
            bad.append(float(scale.step(optimizer)))
            scale.update()
            optimizer.zero_grad()
    for sharded, whole in zip(both[0].parameters(), both[1].parameters(), strict=True):
        torch.testing.assert_close(full(sharded), full(whole), rtol=1e-5, atol=1e-6)
    assert skipped == [[0.0, 0.0, float(scaled), 0.0, 0.0]] * 2, skipped


def trained(directory: Path, steps: int, *, optimizer: Any, seed: int = 0) -> tuple[Any, Any]:
    layers = new_model(seed, sharded=True)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    result = training.train(
        layers,
        optimizer(layers.parameters(), lr=0.05),
        training.Batches((INPUTS,), 4, seed=2, rank=rank, world=world),
        steps=steps,
        loss=lambda layers, batch: loss_of(layers, batch[0]),
        accumulate=2,
        clip_norm=1.0,
        checkpoints=directory,
        progress=False,
    )
    assert type(layers[0].weight).__name__ == "DTensor"
    return result.losses, [full(parameter).tolist() for parameter in layers.parameters()]


def resumes(*, directory: str, ours: bool) -> None:
    """Require that a run resumes to the same bits, and that a whole model loads its checkpoint."""
    optimizer: Any = training.AdamW if ours else torch.optim.AdamW
    at = Path(directory)
    losses, values = trained(at / "whole", 6, optimizer=optimizer)
    trained(at / "parts", 3, optimizer=optimizer)
    rest = trained(at / "parts", 6, seed=9, optimizer=optimizer)
    assert rest == (losses[3:], values)
    with training.Checkpoints(at / "whole") as checkpoints:
        last = checkpoints.load()
    assert last is not None
    layers = new_model(sharded=False)
    layers.load_state_dict(last.state["model"])
    optimizer(layers.parameters()).load_state_dict(last.state["optimizer"])
    assert [parameter.tolist() for parameter in layers.parameters()] == values


def loads_other_shards() -> None:
    """Require that state of other shards, processes or whole tensors trains on to the same bits."""
    world = distributed.get_world_size()
    meshes = [DeviceMesh("cpu", order) for order in (range(world), range(world)[::-1])]
    whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    kinds = [(meshes[0], Shard(0)), (meshes[0], Shard(1)), (meshes[1], Shard(0)), None]

    def made(kind: Any) -> tuple[nn.Parameter, Any]:
        value = whole if kind is None else distribute_tensor(whole, kind[0], [kind[1]])
        parameter = nn.Parameter(value.clone())
        return parameter, training.AdamW([parameter], lr=0.1)

    def make_steps(parameter: nn.Parameter, optimizer: Any, count: int) -> None:
        for _ in range(count):
            parameter.grad = parameter.detach().clone()
            optimizer.step()

    parameter, optimizer = made(None)
    make_steps(parameter, optimizer, 3)
    expected = parameter.detach().clone()
    make_steps(parameter, optimizer, 2)
    for there, here in product(kinds, repeat=2):
        saved, given = made(there)
        make_steps(saved, given, 3)
        loaded, mine = made(here)
        mine.load_state_dict(given.state_dict())
        with torch.no_grad():
            value = expected if here is None else distribute_tensor(expected, here[0], [here[1]])
            loaded.copy_(value)
        make_steps(loaded, mine, 2)
        torch.testing.assert_close(full(loaded.detach()), parameter.detach(), rtol=0, atol=0)


def sums_compile() -> None:
    """Require that sharded sums compile into one graph, and that the graph computes the same."""
    parameters = list(new_model(sharded=True).parameters())
    shards = Sums(parameters)
    numbers = [local(each.detach()).square().sum() for each in parameters]
    compiled = torch.compile(shards.sums, fullgraph=True, backend="eager")
    assert list(map(float, compiled(numbers))) == list(map(float, shards.sums(numbers)))


def refusals(*, directory: str, names: list[str]) -> dict[str, str]:
    """Return the messages of the objects that refuse shards, by object."""

    def parameters(*, matrices: bool) -> list[nn.Parameter]:
        found = new_model(sharded=True).parameters()
        return [each for each in found if each.dim() == 2 or not matrices]

    at = Path(directory) / str(distributed.get_rank())
    messages = {}
    for name in names:
        optimizer, matrices = getattr(training, name), name in {"Muon", "Shampoo", "SOAP"}
        messages[name] = error_of(partial(optimizer, parameters(matrices=matrices)))
    training.Muon([{"params": parameters(matrices=True), "use_muon": False}])
    with training.Checkpoints(at) as checkpoints:
        state = {"model": new_model(sharded=True).state_dict()}
        messages["Checkpoints"] = error_of(lambda: checkpoints.save(1, state))
    return messages
