"""Trains both examples on torch_xla by each of their loops; reports what that took.

Run as a process of its own: torch_xla keeps its graphs per process.
"""

import argparse
import gc
import json
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "client" / "examples"
sys.path.insert(0, str(EXAMPLES))

import loops
import torch
import torch_xla
import train_digits
import train_gpt
from gpt import GPT, draw_batches, read_corpus

WARM_UP, COUNTED = 4, 5
CONTEXT = 16


def digits(arm, report):
    options = ["--loop", arm, "--device", "xla", "--steps", "60", "--log-every", "20"]
    train_digits.main([*options, "--report", str(report)])
    return json.loads(report.read_text())


def gpt(arm):
    device = torch_xla.device()
    torch.manual_seed(0)
    model = GPT(layers=1, width=32, heads=2, context=CONTEXT).to(device)
    drawn = draw_batches(read_corpus(), batch=2, context=CONTEXT, seed=0)
    step = train_gpt.make_step(model, learning_rate=1e-3, mode="lazy", loop=arm)

    def train(steps):
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


def gpt_by_command_line(arguments, report):
    small = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch", "2"]
    train_gpt.main([*small, "--steps", "6", "--report", str(report), *arguments])
    return json.loads(report.read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    options = parser.parse_args()
    gc.disable()  # which tensors are alive decides what a lazy step is
    other = options.report.with_suffix(".example.json")
    results = {
        "digits": {arm: digits(arm, other) for arm in loops.ARMS},
        "gpt": {arm: gpt(arm) for arm in loops.ARMS},
        "gpt_as_ever": gpt_by_command_line([], other),
        "gpt_by_our_loop": gpt_by_command_line(["--loop", "ours"], other),
    }
    options.report.write_text(json.dumps(results))
