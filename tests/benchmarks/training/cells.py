"""Cells of the comparison: a model, an optimizer and a batch size, trained by each arm in turn.

Every arm scales its losses, even in bfloat16, which does not need it, because the arms differ in
this work. The batches are on the device before the measurement.
"""

import time
from dataclasses import dataclass

import torch
from gpt import GPT, draw_batches, read_corpus
from loops import device_counts, make_step
from torch import nn
from torch.nn import functional
from train_digits import CNN, Digits, batches_of

from support.device_reads import Reads

BATCH_SIZES = {"MLP": (32, 256), "CNN": (32, 128), "GPT": (2, 8)}
LEARNING_RATES = {"SGD": 0.01, "Adam": 1e-3, "AdamW": 1e-3}
CONTEXT = 32
WARM_UP = 8  # steps; the first few compile
COUNTED = 5  # steps of a separate run, because counting is expensive


@dataclass(frozen=True)
class Cell:
    model: str
    batch: int
    optimizer: str

    def __str__(self):
        return f"{self.model} {self.batch} {self.optimizer}"

    def make_model(self):
        """Return the model. Its loss is called with a batch."""
        if self.model == "GPT":
            return GPT(layers=2, width=64, heads=4, context=CONTEXT)
        if self.model == "CNN":
            return CNN()
        hidden = [part for _ in range(3) for part in (nn.Linear(256, 256), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(256, 10))

    def batches(self, number):
        if self.model == "GPT":
            drawn = draw_batches(read_corpus(), batch=self.batch, context=CONTEXT, seed=0)
        elif self.model == "CNN":
            drawn = batches_of(Digits(train=True), size=self.batch, seed=0)
        else:
            drawn = noise(self.batch)
        return [next(drawn) for _ in range(number)]


def noise(batch):
    while True:
        yield torch.randn(batch, 256), torch.randint(10, (batch,))


class Run:
    """One arm's training in a cell, after all its compilations.

    Attributes:
        losses: losses of the warm-up.
        compiles: compilations until settled; 0 without a counter.
    """

    def __init__(self, cell, arm, device):
        torch.manual_seed(0)
        self.device = device
        model = cell.make_model().to(device)
        batches = cell.batches(4)
        self._batches = [tuple(part.to(device) for part in batch) for batch in batches]
        loss_of = (
            model
            if cell.model == "GPT"
            else lambda inputs, targets: functional.cross_entropy(model(inputs), targets)
        )
        self.step = make_step(
            arm,
            model,
            loss_of,
            optimizer=cell.optimizer,
            learning_rate=LEARNING_RATES[cell.optimizer],
            precision="fp16" if device.type == "cuda" else "bf16",
            scaled=True,
        )
        self._done = 0
        before = self._counts()
        losses = [self._one_step() for _ in range(WARM_UP)]
        self.compiles = self._counts().get("compiles", 0) - before.get("compiles", 0)
        self.losses = [float(loss) for loss in losses]

    def _one_step(self):
        self._done += 1
        return self.step(*self._batches[self._done % len(self._batches)])

    def _counts(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return device_counts(self.device)  # waits, on torch_xla

    def block(self, steps):
        """Run some steps, from an idle device to an idle device.

        Returns:
            Steps per second, milliseconds of this thread's CPU time per step, counts per step.
        """
        before = self._counts()
        busy, began = time.thread_time(), time.perf_counter()
        for _ in range(steps):
            self._one_step()
        busy = time.thread_time() - busy
        after = self._counts()
        seconds = time.perf_counter() - began
        counts = {name: (after[name] - before[name]) / steps for name in after}
        return steps / seconds, 1000 * busy / steps, counts

    def reads(self):
        """Return device reads per step on plain torch, which has no metric for them."""
        with Reads() as reads:
            for _ in range(COUNTED):
                self._one_step()
        return reads.count / COUNTED
