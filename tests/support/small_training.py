"""A small problem for `training.train`, and a callback that records what a run reports."""

from typing import Any

import torch
from torch import nn

from graphstash import training


class Seen(training.Callback):
    """Record entries of the log, evaluations, checkpoints and the result of a run."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.checkpoints: list[int] = []
        self.ends: list[Any] = []

    def on_log(self, entry: Any) -> None:
        self.entries.append(entry)

    def on_evaluation(self, step: int, metrics: Any) -> None:
        self.evaluations.append((step, dict(metrics)))

    def on_checkpoint(self, step: int, directory: Any) -> None:
        self.checkpoints.append(step)

    def on_end(self, result: Any) -> None:
        self.ends.append(result)


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def problem(*, seed: int = 0) -> tuple[nn.Sequential, training.SGD, training.Batches]:
    """Return a model, its optimizer and its data."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    inputs = torch.randn(24, 4)
    data = training.Batches((inputs, inputs.sum(1, keepdim=True)), 4, seed=1)
    return model, training.SGD(model.parameters(), lr=0.02, momentum=0.9), data


def run(
    steps: int = 5, *, loss: Any = mse, of: Any = None, **options: Any
) -> tuple[training.TrainingResult, nn.Module]:
    """Train a new model, or `of` (model, optimizer, data); return the result and the model."""
    model, optimizer, data = of or problem()
    options = {"progress": False} | options
    return training.train(model, optimizer, data, steps=steps, loss=loss, **options), model
