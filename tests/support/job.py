"""A training job small enough for tests: a two-layer perceptron, AdamW, a few steps.

The job calls graphstash itself only with `--install`. It writes its report as JSON.
"""

# mypy: disallow-untyped-calls=False
# torch is partly typed.

import argparse
import gc
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--mode", choices=("lazy", "compile", "dynamo", "item"), default="lazy")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--install", action="store_true", help="call graphstash.install()")
parser.add_argument(
    "--initialize-cache", type=Path, help="use this directory for torch_xla's own cache"
)
parser.add_argument("--pretend-version", help="version that torch_xla reports")
parser.add_argument("--pretend-features", help="instruction sets that the CPU reports")
parser.add_argument("--no-gate", action="store_true", help="as on a host without executable memory")
parser.add_argument("--sabotage", action="store_true", help="remove a function that the hook needs")
parser.add_argument("--fork", type=int, default=0, help="number of forked children that train")
parser.add_argument("--thread", action="store_true", help="run a cached graph beside the training")
options = parser.parse_args()

if options.pretend_version:
    import torch_xla

    torch_xla.__version__ = options.pretend_version
if options.no_gate:
    import graphstash.hooks.torch_xla.gate as gate_module

    def refuse() -> NoReturn:
        raise gate_module.GateUnavailable("the kernel grants no executable memory")

    setattr(gate_module, "require_x86_64_linux", refuse)  # noqa: B010 - mypy refuses the assignment
if options.install:
    import graphstash

    for _ in range(2):  # the second call must change nothing
        graphstash.install()

import torch
import torch_xla
import torch_xla.debug.metrics as xla_metrics
import torch_xla.runtime as xr
from torch import nn
from torch.nn import functional

if options.pretend_features:
    from graphstash.hooks import environment
    from graphstash.hooks.torch_xla import fingerprint

    for module in (fingerprint, environment):
        setattr(module, "cpu_features", options.pretend_features.split)  # noqa: B010 - mypy refuses the assignment
if options.sabotage:
    import shutil

    from graphstash._process import session as _session

    def fail(*_: object) -> NoReturn:
        raise ValueError("no StableHLO today")

    torch_xla._XLAC._get_stablehlo = fail
    current: Any = _session._current
    shutil.rmtree(current._hooks["torch_xla"]._directory)
if options.initialize_cache:
    xr.initialize_cache(str(options.initialize_cache))


def count(metric: str) -> int:
    data = xla_metrics.metric_data(metric)
    return int(data[0]) if data else 0


def train() -> tuple[list[float], list[Any]]:
    torch.manual_seed(0)
    device = torch_xla.device()
    layers = nn.Linear(16, options.width), nn.Tanh(), nn.Linear(options.width, 1)
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = [torch.randn(8, 16) for _ in range(options.steps)]
    compiled: Any = torch.compile(model, backend="openxla") if options.mode == "dynamo" else model

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(compiled(batch), batch.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = torch_xla.compile(step) if options.mode == "compile" else step
    losses, counts = [], []
    for batch in batches:
        loss = run(batch.to(device))
        if options.mode in ("lazy", "dynamo"):
            torch_xla.sync()
        losses.append(loss.item())  # in mode `item`, this call runs the step
        if options.mode == "item":
            torch_xla.sync()
        counts.append(cache_counts())
    return losses, counts


def cache_counts() -> list[int] | None:
    """Return the counts of the cache, or None if this process has no cache."""
    if "graphstash._process.session" not in sys.modules:
        return None
    from graphstash import stats

    so_far = stats()
    return [so_far.hits, so_far.misses, sum(so_far.fallbacks.values())]


def train_beside() -> tuple[list[float], int]:
    """Compile a graph in one thread while another thread runs a cached graph in a loop.

    `_run_cached_graph`, below a dynamo graph, holds the interpreter lock while it waits for the
    mutex that the compiling thread holds during its look-up.
    """
    device = torch_xla.device()
    function = torch.compile(lambda x: (x @ x).tanh(), backend="openxla")
    x = torch.ones(4, 4, device=device)
    torch_xla.sync()
    for _ in range(3):
        function(x)
    torch_xla.sync()
    # torch_xla does not support lazy tracing in two threads. Trace the graph here, and only compile
    # it in the other thread.
    missing = (torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)).sin().sum()
    compiled = threading.Event()

    def compile_missing() -> None:
        torch_xla._XLAC._xla_sync_multi([missing], [], wait=True)
        compiled.set()

    thread = threading.Thread(target=compile_missing)
    thread.start()
    runs = 0
    while not compiled.is_set() or runs < 10:
        function(x)
        runs += 1
    thread.join()
    return [missing.item()], runs


def main() -> None:
    # Live tensors decide the contents of a lazy step, so the garbage collector must not run at
    # random.
    gc.disable()
    extra: dict[str, Any] = {}
    if options.thread:
        losses, extra["beside"] = train_beside()
        counts: list[Any] = []
    else:
        losses, counts = train()
    report = {
        "losses": losses,
        "counts": counts,
        "compiles": count("CompileTime"),
        "executions": count("ExecuteTime"),
        "device_reads": count("TransferFromDeviceTime"),
        "environment": os.environ.get("XLA_PERSISTENT_CACHE_PATH"),
        "step_marker": type(torch_xla._XLAC._xla_step_marker).__name__,
        **extra,
    }
    options.report.write_text(json.dumps(report))


if options.fork:
    import multiprocessing

    context = multiprocessing.get_context("fork")
    children = []
    report = options.report
    for number in range(options.fork):
        options.report = report.with_suffix(f".{number}.json")
        children.append(context.Process(target=main))
        children[-1].start()
    for child in children:
        child.join()
    sys.exit(max(abs(child.exitcode or 0) for child in children))
main()
