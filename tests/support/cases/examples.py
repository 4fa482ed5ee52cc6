"""Both examples on torch_xla, in each of their loops: the cost of each step, and the losses."""

import gc
import json
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch_xla

sys.path.insert(0, str(Path(__file__).parents[3] / "client" / "examples"))

loops, gpt_model, train_digits, train_gpt = (
    import_module(name) for name in ("loops", "gpt", "train_digits", "train_gpt")
)

WARM_UP, COUNTED = 4, 5
CONTEXT = 16


def report_of(example: Any, *options: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        example.main([*options, "--report", str(report)])
        found: dict[str, Any] = json.loads(report.read_text())
        return found


def digits(arm: str) -> dict[str, Any]:
    device = ("--device", "xla", "--steps", "60", "--log-every", "20")
    return report_of(train_digits, "--loop", arm, *device)


def gpt(arm: str) -> dict[str, Any]:
    device = torch_xla.device()
    torch.manual_seed(0)
    model = gpt_model.GPT(layers=1, width=32, heads=2, context=CONTEXT).to(device)
    drawn = gpt_model.draw_batches(gpt_model.read_corpus(), batch=2, context=CONTEXT, seed=0)
    step = train_gpt.make_step(model, learning_rate=1e-3, mode="lazy", loop=arm)

    def train(steps: int) -> list[Any]:
        return [step(*(part.to(device) for part in next(drawn))) for _ in range(steps)]

    losses = train(WARM_UP)
    before = loops.device_counts(device)
    losses += train(COUNTED)
    after = loops.device_counts(device)
    return {
        "losses": [float(loss) for loss in losses],
        "per_step": {name: (after[name] - before[name]) / COUNTED for name in after},
        "reason": getattr(step, "reason", None),
    }


def gpt_by_command_line(*options: str) -> list[float]:
    small = ("--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch", "2")
    losses: list[float] = report_of(train_gpt, *small, "--steps", "6", *options)["losses"]
    return losses


def on_torch_xla() -> dict[str, Any]:
    gc.disable()  # live tensors decide the contents of a lazy step
    return {
        "digits": {arm: digits(arm) for arm in ("plain", "ours-traced")},
        "gpt": {arm: gpt(arm) for arm in loops.ARMS},
        "gpt_as_ever": gpt_by_command_line(),
        "gpt_by_our_loop": gpt_by_command_line("--loop", "ours"),
    }
