"""One arm's training in one cell, in a process of its own: time and memory with and without fusion.

    unfused        an optimizer of this package
    backward       the same, fused with backward
    forward        the same, fused with the next forward
    torch foreach  torch.optim with foreach=True
    torch fused    torch.optim with fused=True
    torchtune      one torch.optim with fused=True for each parameter, in hooks: the few lines of
                   torchtune's OptimizerInBackwardWrapper, without installing torchtune

One thread does all the work, and its CPU time is measured.
"""

import itertools
import resource
import time
from dataclasses import dataclass

import torch
from gpt import GPT
from torch import nn
from torch.nn import functional

from benchmarks.costs import peak_bytes, resident_bytes
from graphstash import training

ARMS = ("unfused", "backward", "forward", "torch foreach", "torch fused", "torchtune")
OPTIMIZERS = {"SGD": {"lr": 1e-3, "momentum": 0.9}, "Adam": {"lr": 1e-4}, "AdamW": {"lr": 1e-4}}
WARM_UP = 4  # steps; fusion only observes the first
BYTES = 256
MIB = 1024**2


def mlp(layers, width):
    parts = (part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(*parts)


def cnn():
    channels = (3, 64, 128, 256)
    parts = [
        part
        for few, many in itertools.pairwise(channels)
        for part in (nn.Conv2d(few, many, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(256 * 2 * 2, 512), nn.Linear(512, 10))


class InvertedResidual(nn.Module):
    """MobileNetV2's block (Sandler et al., 2018): wide inside, with a depthwise convolution."""

    def __init__(self, few, many, stride):
        super().__init__()
        inside = 6 * few
        self.is_residual = few == many and stride == 1
        self.body = nn.Sequential(
            *(nn.Conv2d(few, inside, 1, bias=False), nn.BatchNorm2d(inside), nn.ReLU6()),
            nn.Conv2d(inside, inside, 3, stride, padding=1, groups=inside, bias=False),
            *(nn.BatchNorm2d(inside), nn.ReLU6()),
            *(nn.Conv2d(inside, many, 1, bias=False), nn.BatchNorm2d(many)),
        )

    def forward(self, x):
        return x + self.body(x) if self.is_residual else self.body(x)


def mobile_net():
    shapes = [(16, 24, 1), (24, 24, 1), (24, 48, 2), (48, 48, 1), (48, 96, 2), (96, 96, 1)]
    shapes += [(96, 160, 2), (160, 160, 1)]
    blocks = [InvertedResidual(*shape) for shape in shapes]
    ends = nn.Sequential(nn.Conv2d(160, 640, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, ends, nn.Linear(640, 100))


def gpt():
    return GPT(layers=4, width=256, heads=4, context=16)


def noise(*shape):
    return lambda batch: (torch.randn(batch, *shape),)


def text(batch):
    tokens = torch.randint(BYTES, (batch, 17))
    return tokens[:, :-1], tokens[:, 1:]


MODELS = {
    "MLP 12x1024": (lambda: mlp(12, 1024), noise(1024)),
    "CNN": (cnn, noise(3, 16, 16)),
    "MobileNet": (mobile_net, noise(3, 16, 16)),
    "GPT": (gpt, text),
    "MLP 60x64": (lambda: mlp(60, 64), noise(64)),  # many small parameters
    "MLP 25x1024": (lambda: mlp(25, 1024), noise(1024)),  # 100 MiB
}


@dataclass(frozen=True)
class Cell:
    model: str
    optimizer: str
    batch: int

    def __str__(self):
        return f"{self.model} {self.optimizer} {self.batch}"


class Run:
    """A training that a caller can step through."""

    def __init__(self, cell, arm):
        torch.manual_seed(0)
        make_model, draw = MODELS[cell.model]
        self.model = make_model()
        self._batch = draw(cell.batch)
        settings = OPTIMIZERS[cell.optimizer]
        if arm == "torchtune":
            self._step_in_hooks(getattr(torch.optim, cell.optimizer), settings)
            self._optimizer = None
        elif arm.startswith("torch "):
            settings |= {arm.removeprefix("torch "): True}
            self._optimizer = getattr(torch.optim, cell.optimizer)(
                self.model.parameters(), **settings
            )
        else:
            self._optimizer = getattr(training, cell.optimizer)(self.model.parameters(), **settings)
            if arm != "unfused":
                self._fusion = training.fuse(self.model, self._optimizer, when=arm)
        self.losses = [float(self.step()) for _ in range(WARM_UP)]

    def _step_in_hooks(self, make_optimizer, settings):
        own = {each: make_optimizer([each], **settings, fused=True) for each in self.parameters()}

        def step(parameter):
            own[parameter].step()
            own[parameter].zero_grad()

        for each in own:
            each.register_post_accumulate_grad_hook(step)

    def parameters(self):
        return list(self.model.parameters())

    def step(self):
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        loss = self._loss()
        loss.backward()
        if self._optimizer is not None:
            began = time.thread_time()
            self._optimizer.step()
            self.in_step += time.thread_time() - began
        return loss.detach()

    in_step = 0.0  # seconds

    def _loss(self):
        if isinstance(self.model, GPT):
            return self.model(*self._batch)
        output = self.model(*self._batch)
        return functional.mse_loss(output, torch.zeros_like(output))

    def block(self, steps):
        """Make steps; return their CPU and wall ms, CPU ms of `optimizer.step`, and page faults."""
        self.in_step = 0.0
        faults = page_faults()
        busy, began = time.thread_time(), time.perf_counter()
        for _ in range(steps):
            self.step()
        busy, wall = time.thread_time() - busy, time.perf_counter() - began
        times = (1000 * seconds / steps for seconds in (busy, wall, self.in_step))
        return *times, (page_faults() - faults) / steps

    def live_gradients(self):
        """Return the peak bytes of gradients, including the gradient that arrives."""
        most = 0

        def count(arriving):
            nonlocal most
            kept = (each.grad for each in self.parameters() if type(each.grad) is torch.Tensor)
            most = max(most, arriving.nbytes + sum(each.nbytes for each in kept))

        handles = [each.register_hook(count) for each in self.parameters()]
        self.step()
        for handle in handles:
            handle.remove()
        return most


def serve(connection, cell, arm):
    """Answer calls of a `Run` until the connection ends. The first answer has its losses."""
    torch.set_num_threads(1)
    before = resident_bytes()
    run = Run(cell, arm)
    connection.send(run.losses)
    calls = {
        "block": run.block,
        "live gradients": run.live_gradients,
        "peak": lambda: peak_bytes() - before,
    }
    while (call := connection.recv()) is not None:
        name, *arguments = call
        connection.send(calls[name](*arguments))


def page_faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
