"""Model, batches and comparisons for the tests of Trainer, Accelerate, Lightning and torchtitan."""

import copy
import warnings
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


def framework(name: str) -> ModuleType:
    """Import a framework. This takes about ten seconds, so no test file may do it at collection."""
    with warnings.catch_warnings(action="ignore"):
        return import_module(name)


class Regression(nn.Module):
    """Three layers that learn the sum of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, 1] for [N, WIDTH]."""
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def loss(self, x: Tensor) -> Tensor:
        """Return the mean square error, []."""
        return (self(x) - x.sum(1, keepdim=True)).square().mean()


def batches(count: int) -> list[Tensor]:
    """Return batches of four, each [4, WIDTH], equal at every call."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


def states(model: nn.Module, optimizer: Any) -> list[Any]:
    """Return a copy of the state dictionaries."""
    return copy.deepcopy([model.state_dict(), optimizer.state_dict()])


def is_same(a: Any, b: Any) -> bool:
    """Return whether two nested values are equal, tensors to the bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and _all_same(a, b)
    return bool(a == b)


def _all_same(a: Iterable[Any], b: Iterable[Any]) -> bool:
    return all(is_same(*pair) for pair in zip(a, b, strict=True))
