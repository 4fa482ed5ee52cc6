"""Ranks that train on one GPU, with dense and with sparse gradients."""

# mypy: disallow-untyped-calls=False
# torch is partly typed.

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from graphstash import training
from graphstash.training.loop.parallel import DistributedTorch
from graphstash.training.reduce import AggregatedAllReduce, SparseState, sparse_hook

__all__ = ["ddp", "nccl"]

ROWS = 3000
DEVICE = "cuda"


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(ROWS, 64)
        self.head = nn.Linear(64, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.rows(rows)).square().mean()
        return loss


def _trained(kind: str, rank: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(_Model().to(DEVICE), device_ids=[0])
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
            rows = torch.randint(0, ROWS, (8, 4), generator=generator).to(DEVICE)
            model(rows).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [each.detach().cpu() for each in model.module.parameters()]


def ddp(*, number: int, size: int, store: str) -> dict[str, Any]:
    """Train with each kind of reduction over gloo, whose ranks may share a GPU.

    Return the sums of the parameters, and whether each kind gives the bits of dense gradients.
    """
    distributed.init_process_group("gloo", init_method=store, rank=number, world_size=size)
    dense = _trained("dense", number)
    report: dict[str, Any] = {"sums": _sums(dense)}
    for kind in ("sparse", "aggregated"):
        report[kind] = all(map(torch.equal, _trained(kind, number), dense))
    distributed.barrier()
    return report


def nccl(*, store: str) -> dict[str, Any]:
    """Train DDP plainly and as a captured step, with one rank because NCCL needs a GPU for each."""
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    plain, _ = _trained_by_nccl(traced=False)
    traced, step = _trained_by_nccl(traced=True)
    distributed.destroy_process_group()
    return {"plain": plain, "traced": traced, "mode": step.mode, "reason": step.reason}


def _trained_by_nccl(*, traced: bool) -> tuple[dict[str, Any], Any]:
    """Return losses and sums of parameters, and the step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(DEVICE)
    model = DistributedTorch(torch.device(DEVICE, 0)).wrap(module, is_captured=traced)
    optimizer = training.AdamW(model.parameters(), lr=0.01, fused=False)

    def function(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step: Any = training.traced_step(function, [model, optimizer]) if traced else function
    generator = torch.Generator().manual_seed(0)
    losses = [float(step(torch.randn(16, 32, generator=generator).to(DEVICE))) for _ in range(24)]
    return {"losses": losses, "sums": _sums([*module.parameters()])}, step


def _sums(tensors: Sequence[torch.Tensor]) -> list[str]:
    return [float(each.double().sum()).hex() for each in tensors]
