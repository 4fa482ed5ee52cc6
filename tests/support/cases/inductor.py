"""Small torch.compile jobs. PRETEND_ISA names the instruction sets that torch detects."""

# mypy: disallow-untyped-calls=False
# torch is partly typed.

import os
import time
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._dynamo.utils import counters
from torch._inductor import config, cpu_vec_isa
from torch._inductor.runtime import autotune_cache

if pretended := os.environ.get("PRETEND_ISA"):
    cpu_vec_isa.x86_isa_checker = pretended.split
    cpu_vec_isa.valid_vec_isa_list.cache_clear()  # filled before the fork of this process


class _Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(24, width)
        self.down = nn.Linear(width, 24)

    def forward(self, x: Tensor) -> Any:
        return self.down(nn.functional.gelu(self.up(x)))


def training(*, install: bool = False, width: int = 40, matmul: bool = False) -> dict[str, Any]:
    """Train two layers for two steps.

    Args:
        install: whether the program calls `graphstash.install()`.
        width: width of the layer between. Default: 40.
        matmul: compile a matrix product instead, which needs no C++ compiler.
    """
    if install:
        import graphstash

        graphstash.install()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    started = time.monotonic()
    model = _Net(width)
    compiled, multiply = torch.compile(model), torch.compile(torch.matmul)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 24)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        y = multiply(x @ model.up.weight.T, model.down.weight.T) if matmul else compiled(x)
        loss = (y**2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return _report(losses) | {"seconds": time.monotonic() - started}


def training_with_bundles() -> dict[str, Any]:
    """Train while torch bundles the autotuning results of each graph, as it does on a GPU."""
    original = autotune_cache.inductor_meta_from_config
    autotune_cache.inductor_meta_from_config = lambda: {**original(), "backend_hash": "a GPU"}
    config.bundled_autotune_remote_cache = True
    return training()


def products(*, sizes: list[int]) -> dict[str, Any]:
    """Call a function of dynamic shapes, whose two branches are one graph with different guards."""

    @torch.compile(dynamic=True)
    def either(x: Tensor, y: Tensor) -> Tensor:
        if x.shape[0] > 16:
            return x @ y
        return x @ y

    def product(size: int) -> float:
        x = torch.arange(float(size * 24)).reshape(size, 24)
        return float(either(x, torch.ones(24, 24)).sum())

    torch.set_num_threads(2)
    return _report([product(size) for size in sizes])


def _report(losses: list[float]) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "losses": losses,
        "fx": _counted("fxgraph_cache"),
        "aot": dict(counters["aot_autograd"]),
    }


def _counted(prefix: str) -> dict[str, int]:
    return {name: n for name, n in counters["inductor"].items() if name.startswith(prefix)}


def rank(*, number: int, size: int, store: str) -> dict[str, Any]:
    """Train a linear model as one of several ranks, which average their gradients.

    A matrix product needs no generated kernel, and therefore no C++ compiler.
    """
    import graphstash
    from support.late_ranks import wait_for_late_ranks

    wait_for_late_ranks()
    distributed.init_process_group("gloo", init_method=store, rank=number, world_size=size)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    weight = torch.randn(16, 1, requires_grad=True)
    product = torch.compile(torch.matmul)
    generator = torch.Generator().manual_seed(number)
    losses = []
    for _ in range(3):
        x = torch.randn(8, 16, generator=generator)
        loss = (product(x, weight) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        assert weight.grad is not None
        distributed.all_reduce(weight.grad)
        with torch.no_grad():
            weight -= 0.01 * weight.grad
        weight.grad = None
        losses.append(float(loss).hex())
    report = {"losses": losses, "found": _counted(""), "stats": asdict(graphstash.stats())}
    graphstash.uninstall()  # uploads
    distributed.monitored_barrier()  # the first rank hosts the store
    return report
