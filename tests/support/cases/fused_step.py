"""Updates in the next forward, on any version of torch."""

# mypy: disallow-untyped-calls=False
# torch is typed in part.

from typing import Any

import torch
from torch import nn

from graphstash import training
from graphstash.training.fusion import partial_step
from graphstash.training.fusion.forward import ForwardFusion

__all__ = ["in_next_forward"]

partial_step._UNIT_BYTES = 0  # type: ignore[misc] # or these small parameters were left to step()


def in_next_forward() -> dict[str, Any]:
    """Train with and without fusion; return how many updates wait after each step, and the bits."""
    report: dict[str, Any] = {"torch": torch.__version__, "waiting": []}
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        optimizer = training.AdamW(model.parameters(), lr=0.05)
        fusion = training.fuse(model, optimizer, when="forward") if fused else None
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            if isinstance(fusion, ForwardFusion):
                report["waiting"].append(len(fusion._waiting))
        if fusion is not None:
            fusion.close()
        name = "fused" if fused else "alone"
        report[name] = [float(each.double().sum()).hex() for each in model.parameters()]
    return report
