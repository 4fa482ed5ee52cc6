"""The smallest real training job: a two-layer perceptron on torch_xla with AdamW.

It reads one loss per step, and reports the same times as the GPT example. On request, it also
counts the work of a settled step (`--steady`) and times each look-up (`--trace`). Both options
observe an installed hook, and neither installs one.
"""

import argparse
import functools
import json
import statistics
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch_xla
import torch_xla.debug.metrics as xla_metrics
from torch import nn
from torch.nn import functional

STARTED = time.perf_counter()  # the imports above precede the launch
COUNTED_STEPS = 50
SETTLED_STEP = 3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--steady", action="store_true")
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    look_ups = trace() if options.trace else []
    step = make_step()
    torch_xla.sync(wait=True)
    marks = [time.perf_counter()]
    losses = []
    for _ in range(options.steps):
        losses.append(step())
        marks.append(time.perf_counter())
    compiles, nanoseconds, _ = xla_metrics.metric_data("CompileTime") or (0, 0, ())
    steps = [after - before for before, after in pairwise(marks)]
    report = {
        "first_step_seconds": marks[1] - marks[0],
        "settled_seconds": marks[SETTLED_STEP] - marks[0],
        "step_seconds_median": statistics.median(steps[len(steps) // 2 :]),
        "total_seconds": time.perf_counter() - STARTED,
        "compiles": compiles,
        "compile_seconds": nanoseconds / 1e9,
        "losses": losses,
        "look_ups": look_ups,
    }
    if options.steady:
        report["per_step"] = count_steps(step)
    options.report.write_text(json.dumps(report))


def make_step():
    torch.manual_seed(0)
    device = torch_xla.device()
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step():
        batch = torch.randn(8, 16).to(device)
        optimizer.zero_grad()
        loss = functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        return loss.item()

    return step


def count_steps(step):
    """Count the mean work of one settled step. The job itself reads one loss from the device.

    Calls of graphstash are counted in the training thread. Its other threads wait; the number of
    times that the kernel woke them shows whether they worked.
    """
    before = counters()
    for _ in range(COUNTED_STEPS):
        step()
    after = counters()
    calls = 0

    def watch(frame, event, _argument):
        nonlocal calls
        calls += event == "call" and "/graphstash" in frame.f_code.co_filename

    sys.setprofile(watch)
    for _ in range(COUNTED_STEPS):
        step()
    sys.setprofile(None)
    counted = {name: (after[name] - before[name]) / COUNTED_STEPS for name in before}
    return {**counted, "our Python calls": calls / COUNTED_STEPS}


def counters():
    return {
        "look-ups": gate_requests(),
        "our wake-ups": wake_ups(),
        "device reads": metric("TransferFromDeviceTime"),
        "executions": metric("ExecuteTime"),
        "compiles": metric("CompileTime"),
    }


def metric(name):
    data = xla_metrics.metric_data(name)
    return data[0] if data else 0


def gate_requests():
    """Return the number of torch_xla's file look-ups that reached the hook."""
    session = sys.modules.get("graphstash._process.session")
    if session is None or session._current is None:
        return 0
    return session._current._hooks["torch_xla"]._mode._gate.requests


def wake_ups():
    total = 0
    for thread in threading.enumerate():
        if thread.name.startswith("graphstash"):
            status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
            total += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return total


def trace():
    """Record every look-up: fingerprint, begin and end in the host's time, and hit or miss."""
    from graphstash._compile.cache import CompileCache

    look_ups = []
    original = CompileCache.fetch_or_start

    @functools.wraps(original)
    def fetch_or_start(cache, request, destination):
        began = time.time()
        compilation = original(cache, request, destination)
        look_ups.append(
            {
                "fingerprint": request.key.fingerprint,
                "began": began,
                "ended": time.time(),
                "found": compilation is None,
            }
        )
        return compilation

    CompileCache.fetch_or_start = fetch_or_start
    return look_ups


main()
