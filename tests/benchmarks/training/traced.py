"""What a traced step saves the host: the same training, lazy and traced, step by step in turn.

    python tests/benchmarks/training/traced.py

Both arms train in one process and take turns, a block of steps each, so that whatever else the
machine does hits both. A block ends when its last loss is on the host. Host time is the processor
time of the training thread in the calls, without that read: what is left to prepare batches in.
"""

import argparse
import gc
import json
import statistics
import time

import torch
import torch_xla
import torch_xla.debug.metrics as xla_metrics
from torch import nn
from torch.nn import functional
from torch_xla.amp import syncfree

from graphstash.training.traced import traced_step

WARM_UP = 5
COUNTED = {
    "executions": "ExecuteTime",
    "reads": "TransferFromDeviceTime",
    "compiles": "CompileTime",
}


class MLP(nn.Sequential):
    """Four layers of 256."""

    def __init__(self):
        layers = [part for _ in range(3) for part in (nn.Linear(256, 256), nn.ReLU())]
        super().__init__(*layers, nn.Linear(256, 10))

    @staticmethod
    def batch():
        return torch.randn(32, 256), torch.randint(10, (32,))


class GPT(nn.Module):
    """Two layers of width 64 over 32 bytes: about 40 parameters' worth of Python per step."""

    def __init__(self, layers=2, width=64, context=32):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        return self.head(x).flatten(0, 1)

    @staticmethod
    def batch():
        tokens = torch.randint(256, (4, 33))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


class Arm:
    """One training, and what it has cost so far."""

    def __init__(self, model_class, *, traced):
        torch.manual_seed(0)
        device = torch_xla.device()
        self.model = model_class().to(device)
        optimizer = syncfree.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

        def train_step(inputs, targets):
            loss = functional.cross_entropy(self.model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        def lazy_step(*batch):
            loss = train_step(*batch)
            torch_xla.sync()
            return loss

        self.step = traced_step(train_step, [self.model, optimizer]) if traced else lazy_step
        self.batches = [[x.to(device) for x in model_class.batch()] for _ in range(4)]
        torch_xla.sync(wait=True)
        self.done = 0
        self.rates = []
        self.host_ms = []
        self.counts = dict.fromkeys(COUNTED, 0)
        before = counts()
        for _ in range(WARM_UP):
            loss = self.step(*self._batch())
        loss.item()
        self.compiles = counts()["compiles"] - before["compiles"]

    def _batch(self):
        self.done += 1
        return self.batches[self.done % len(self.batches)]

    def block(self, steps):
        """Runs a block of steps, pipelined; then counts them."""
        before = counts()
        began = time.perf_counter()
        host_began = time.thread_time()
        for _ in range(steps):
            loss = self.step(*self._batch())
        host = time.thread_time() - host_began
        loss.item()  # one read, taken off below
        self.rates.append(steps / (time.perf_counter() - began))
        self.host_ms.append(1000 * host / steps)
        for name, count in counts().items():
            self.counts[name] += count - before[name]
        self.counts["reads"] -= 1

    def report(self, steps):
        return {
            "steps_per_second": summary(self.rates),
            "host_ms_per_step": summary(self.host_ms),
            **{f"{name}_per_step": count / steps for name, count in self.counts.items()},
            "compiles_in_warm_up": self.compiles,
        }


def counts():
    """Of this process, so far."""
    data = {name: xla_metrics.metric_data(metric) for name, metric in COUNTED.items()}
    return {name: values[0] if values else 0 for name, values in data.items()}


def summary(values):
    return {
        "median": round(statistics.median(values), 3),
        "low": round(min(values), 3),
        "high": round(max(values), 3),
    }


def measure(*, blocks=15, steps=100):
    """Measures both models; a dictionary of plain numbers."""
    results = {}
    for model_class in (MLP, GPT):
        arms = {"lazy": Arm(model_class, traced=False), "traced": Arm(model_class, traced=True)}
        gc.collect()
        for _ in range(blocks):
            for arm in arms.values():
                arm.block(steps)
        reports = {name: arm.report(blocks * steps) for name, arm in arms.items()}
        speed = [reports[name]["steps_per_second"]["median"] for name in ("traced", "lazy")]
        results[model_class.__name__] = reports | {"speed_up": round(speed[0] / speed[1], 2)}
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    print(json.dumps(measure(blocks=options.blocks, steps=options.steps), indent=2))
