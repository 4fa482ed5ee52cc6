"""Ranks that train on one device, with dense and with sparse gradients."""

# mypy: disallow-untyped-calls=False
# torch is partly typed.

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from graphstash import training
from graphstash.training.loop.parallel import DistributedTorch
from graphstash.training.reduce import AggregatedAllReduce, SparseState, sparse_hook

ROWS = 3000


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(ROWS, 64)
        self.head = nn.Linear(64, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.rows(rows)).square().mean()
        return loss


def _in_ddp(module: nn.Module, device: str) -> DistributedDataParallel:
    return DistributedDataParallel(module.to(device), device_ids=[0] if device == "cuda" else None)


def _trained(kind: str, rank: int, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = _in_ddp(_Model(), device)
    with ExitStack() as stack:
        if kind != "dense":
            through = None
            if kind == "aggregated":
                through = stack.enter_context(AggregatedAllReduce(block_size=64))
            state = stack.enter_context(SparseState(through=through))
            model.register_comm_hook(state, sparse_hook)
        optimizer = training.AdamW(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(12):
            rows = torch.randint(0, ROWS, (8, 4), generator=generator).to(device)
            model(rows).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [each.detach().cpu() for each in model.module.parameters()]


def ddp(*, number: int, size: int, store: str, device: str) -> dict[str, Any]:
    """Train with each kind of reduction over gloo, whose ranks may share a GPU.

    Return the sums of the parameters, and whether each kind gives the bits of dense gradients.
    """
    distributed.init_process_group("gloo", init_method=store, rank=number, world_size=size)
    dense = _trained("dense", number, device)
    report: dict[str, Any] = {"sums": _sums(dense)}
    for kind in ("sparse", "aggregated"):
        report[kind] = all(map(torch.equal, _trained(kind, number, device), dense))
    distributed.barrier()
    return report


def one_rank(*, store: str, device: str) -> dict[str, Any]:
    """Train DDP plainly, as a captured step, with sparse gradients and with fused updates.

    With one rank, because NCCL needs a GPU for each. On a CPU, through gloo.
    """
    if device == "cuda":
        torch.cuda.set_device(0)
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    plain, _ = _trained_steps(device, traced=False)
    traced, step = _trained_steps(device, traced=True)
    dense = _trained("dense", 0, device)
    report = {
        "plain": plain,
        "traced": traced,
        "mode": step.mode,
        "reason": step.reason,
        "sparse": all(map(torch.equal, _trained("sparse", 0, device), dense)),
        "fused": _trained_with_schedule(device, fused=True),
        "unfused": _trained_with_schedule(device, fused=False),
    }
    distributed.destroy_process_group()
    return report


def _trained_with_schedule(device: str, *, fused: bool) -> list[str]:
    """Train with a learning rate that changes in each step, in several buckets of DDP."""
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512) for _ in range(8)]
    module = nn.Sequential(*layers).to(device)
    model = DistributedDataParallel(
        module, device_ids=[0] if device == "cuda" else None, bucket_cap_mb=1
    )
    optimizer = training.Lion(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=32)
    generator = torch.Generator().manual_seed(0)
    with training.fuse(model, optimizer, when="backward") if fused else nullcontext():
        for _ in range(24):
            model(torch.randn(64, 512, generator=generator).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return _sums([*module.parameters()])


def _trained_steps(device: str, *, traced: bool) -> tuple[dict[str, Any], Any]:
    """Return losses and sums of parameters, and the step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    model = DistributedTorch(torch.device(device, 0)).wrap(module, is_captured=traced)
    optimizer = training.AdamW(model.parameters(), lr=0.01, fused=False)

    def function(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step: Any = training.traced_step(function, [model, optimizer]) if traced else function
    generator = torch.Generator().manual_seed(0)
    losses = [float(step(torch.randn(16, 32, generator=generator).to(device))) for _ in range(24)]
    return {"losses": losses, "sums": _sums([*module.parameters()])}, step


def _sums(tensors: Sequence[torch.Tensor]) -> list[str]:
    return [float(each.double().sum()).hex() for each in tensors]
