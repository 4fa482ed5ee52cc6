"""Ranks that train on one GPU, with dense and with sparse gradients."""

# mypy: disallow-untyped-calls=False
# torch is typed in part.

import time
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


def _trained(kind: str, rank: int) -> tuple[list[torch.Tensor], dict[str, float], float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(_Model().to(DEVICE), device_ids=[0])
    state = None
    through = AggregatedAllReduce(block_size=64) if kind == "aggregated" else None
    if kind != "dense":
        state = SparseState(through=through)
        model.register_comm_hook(state, sparse_hook)
    optimizer = training.AdamW(model.parameters(), lr=0.01)
    mine = torch.Generator().manual_seed(rank)
    started = 0.0
    for step in range(12):
        if step == 4:
            torch.cuda.synchronize()
            started = time.perf_counter()
        rows = torch.randint(0, ROWS, (8, 4), generator=mine).to(DEVICE)
        model(rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / 8
    values = [each.detach().cpu() for each in model.module.parameters()]
    sent = state.scalars() if state is not None else {}
    if state is not None:
        state.close()
    if through is not None:
        through.close()
    return values, sent, seconds


def ddp(*, number: int, size: int, store: str) -> dict[str, Any]:
    """Train with each kind of reduction over gloo, whose ranks may share a GPU."""
    distributed.init_process_group("gloo", init_method=store, rank=number, world_size=size)
    results = {kind: _trained(kind, number) for kind in ("dense", "sparse", "aggregated")}
    dense = results["dense"][0]
    report: dict[str, Any] = {}
    for kind, (values, sent, seconds) in results.items():
        torch.testing.assert_close(values, dense, rtol=1e-6, atol=1e-6)
        equal = all(map(torch.equal, values, dense))
        report[kind] = {"equal": equal, "seconds": seconds, "sent": sent}
    report["sums"] = [float(each.double().sum()).hex() for each in dense]
    distributed.barrier()
    return report


def nccl(*, store: str) -> dict[str, Any]:
    """Train DDP with NCCL, whose ranks need a GPU each, so with one rank: plainly and captured."""
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    report: dict[str, Any] = {}
    for kind in ("plain", "traced"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(DEVICE)
        parallel = DistributedTorch(torch.device("cuda", 0))
        model = parallel.wrap(module, is_captured=kind == "traced")
        optimizer = training.AdamW(model.parameters(), lr=0.01, fused=False)

        def function(
            x: torch.Tensor, model: nn.Module = model, optimizer: training.AdamW = optimizer
        ) -> torch.Tensor:
            loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step: Any = function
        if kind == "traced":
            step = training.traced_step(function, [model, optimizer])
        generator = torch.Generator().manual_seed(0)
        batches = [torch.randn(16, 32, generator=generator).to(DEVICE) for _ in range(24)]
        losses = [float(step(batch)) for batch in batches]
        sums = [float(each.double().sum()).hex() for each in module.parameters()]
        report[kind] = {"losses": losses, "sums": sums}
        if kind == "traced":
            report["mode"], report["reason"] = step.mode, step.reason
    distributed.destroy_process_group()
    return report
