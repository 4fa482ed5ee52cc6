"""A few torch_xla steps on the PJRT plug-in for the CPU, in the environment `xla-newest`.

The script does not use graphstash, like a user's script. It writes its report as JSON.
"""

# mypy: disallow-untyped-calls=False
# torch is partly typed.

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--path-after-import", action="store_true", help="choose the plug-in late")
parser.add_argument("--late", action="store_true", help="install after the first graph")
parser.add_argument("--shifted", action="store_true", help="run the same step from another line")
options = parser.parse_args()

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.pjrt_plugin import LIBRARY, widen_execute_options

os.environ["PJRT_DEVICE"] = "LIBRARY"
if not options.path_after_import:
    os.environ["PJRT_LIBRARY_PATH"] = str(LIBRARY)

widen_execute_options()
import torch
import torch_xla
import torch_xla.debug.metrics as xla_metrics
from torch import Tensor

os.environ["PJRT_LIBRARY_PATH"] = str(LIBRARY)


def train(step: Callable[[Tensor, Tensor], float], steps: int = 3) -> list[float]:
    torch.manual_seed(0)
    device = torch_xla.device()
    weight = torch.randn(16, 1).to(device).requires_grad_()
    batches = [torch.randn(8, 16) for _ in range(steps)]
    return [step(weight, batch.to(device)) for batch in batches]


def step(weight: Tensor, batch: Tensor) -> float:
    loss = (batch @ weight - batch.sum(1, keepdim=True)).square().mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    weight.data -= 0.1 * gradient
    torch_xla.sync()
    return loss.item()


def shifted(weight: Tensor, batch: Tensor) -> float:
    # The same step on other lines: torch_xla's programs contain no source locations.
    loss = (batch @ weight - batch.sum(1, keepdim=True)).square().mean()
    (gradient,) = torch.autograd.grad(loss, weight)

    weight.data -= 0.1 * gradient
    torch_xla.sync()
    return loss.item()


gc.disable()  # live tensors decide the contents of a lazy step
report: dict[str, Any] = {}
if options.late:
    import graphstash

    report["before"] = torch.ones(3, device="xla").sum().item()
    graphstash.uninstall()
    graphstash.install(hooks=("pjrt",))
losses = train(shifted if options.shifted else step)
data = xla_metrics.metric_data("CompileTime")
report |= {"losses": losses, "compiles": int(data[0]) if data else 0}
options.report.write_text(json.dumps(report))
