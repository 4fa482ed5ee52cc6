"""Updates in the next forward, on any version of torch."""

# mypy: disallow-untyped-calls=False
# torch is partly typed.

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphstash import training
from graphstash.training.fusion import partial_step
from graphstash.training.fusion.forward import ForwardFusion
from graphstash.training.fusion.uses import is_held
from support.held_memory import HOLDERS

partial_step._UNIT_BYTES = 0  # type: ignore[misc] # or these small parameters were left to step()


def _notices(hold: Callable[[Tensor], Tensor], parameter: Tensor) -> bool:
    held = hold(parameter)
    while_held = is_held(parameter)
    del held
    return while_held and not is_held(parameter)


def at_precisions() -> dict[str, str]:
    """Fuse updates under each way to set the precision of float32 matmuls; return the errors. Some
    settings change between backward and the update, and fusion must restore them.
    """
    backends: Any = torch.backends
    ways: dict[str, Callable[[str], None]] = {
        "common": lambda value: torch.set_float32_matmul_precision(
            "high" if value == "tf32" else "highest"
        ),
        "generic": lambda value: setattr(backends, "fp32_precision", value),
        "cuda": lambda value: setattr(backends.cuda.matmul, "fp32_precision", value),
        "mkldnn": lambda value: setattr(backends.mkldnn.matmul, "fp32_precision", value),
    }
    report = {}
    for name, use in ways.items():
        for when in ("backward", "forward"):
            try:
                _train_at(use, when)
                values = [
                    backends.cuda.matmul.fp32_precision,
                    backends.mkldnn.matmul.fp32_precision,
                ]
                report[f"{name} {when}"] = " ".join(values)
            except RuntimeError as error:
                report[f"{name} {when}"] = str(error)
        use("ieee")
        for part in (backends, backends.cuda.matmul, backends.mkldnn.matmul):
            part.fp32_precision = "none"
    return report


def _train_at(use: Callable[[str], None], when: Any) -> None:
    model = nn.Linear(6, 6)
    optimizer = training.SGD(model.parameters(), lr=0.1)
    fusion = training.fuse(model, optimizer, when=when)
    for step in range(3):
        use("tf32" if step % 2 else "ieee")
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        use("tf32")
    fusion.close()


def in_next_forward() -> dict[str, Any]:
    """Train with and without fusion; return the waiting updates after each step, and the bits.

    Also return the ways to hold a parameter's memory that fusion does not detect.
    """
    report: dict[str, Any] = {"torch": torch.__version__, "waiting": []}
    parameter = nn.Parameter(torch.zeros(6))
    report["unnoticed"] = [name for name, hold in HOLDERS.items() if not _notices(hold, parameter)]
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
