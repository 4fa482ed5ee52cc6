"""Common models under torch.compile, trained for two steps."""

# mypy: disallow-untyped-calls=False
# torch is partly typed.

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters


def llama() -> dict[str, Any]:
    """Hugging Face's Llama: rotary embeddings, RMS norm, grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=64, **settings, **layers)
    tokens = torch.arange(64).reshape(4, 16)

    def loss(model: Callable[..., Any]) -> Tensor:
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return _trained(lambda: LlamaForCausalLM(config), loss)


def convolutions() -> dict[str, Any]:
    """Convolutions with batch normalization and pooling."""

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * 64, 10),
        )

    return _trained(make, lambda model: model(torch.ones(4, 3, 16, 16)).square().mean())


def quantized() -> dict[str, Any]:
    """Run a layer of bitsandbytes, beside tensordict, which replaces functions of torch."""
    import tensordict  # type: ignore[import-not-found,unused-ignore] # in an environment of its own
    from bitsandbytes.nn import Linear4bit  # type: ignore[import-not-found,unused-ignore] # as above

    assert torch._functorch.vmap._create_batched_inputs.__globals__["__package__"].startswith(
        tensordict.__name__
    )
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model = torch.compile(Linear4bit(64, 64, compute_dtype=torch.float32).to("cpu"))
    with torch.no_grad():
        return _report([model(torch.full((2, 64), float(step))).sum().item() for step in range(2)])


def predicting(*, context: str = "grad") -> dict[str, Any]:
    """Run only forward passes of a layer, with gradients as usual or in another context."""
    contexts = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model = torch.compile(nn.Linear(8, 8))
    with contexts[context]():
        outputs = [float(model(torch.full((4, 8), float(step))).sum()) for step in range(2)]
    return _report(outputs)


def tensor_parallel() -> dict[str, Any]:
    """Train layers in shards, as DTensors of a process group with one rank."""
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined] # written in C++
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def make() -> nn.Module:
        layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        return parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    try:
        return _trained(make, lambda model: model(torch.ones(4, 8)).square().mean())
    finally:
        dist.destroy_process_group()


def _trained(
    make: Callable[[], nn.Module], loss_of: Callable[[Callable[..., Any]], Tensor]
) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model = make()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(compiled)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return _report(losses)


def _report(losses: list[float]) -> dict[str, Any]:
    return {
        "losses": losses,
        "compiles": counters["inductor"]["fxgraph_cache_miss"],
        "bypassed": counters["aot_autograd"]["autograd_cache_bypass"],
        "bypasses": counters["inductor"]["fxgraph_cache_bypass"],
    }
