"""Adafactor: steps scaled by the gradient's mean square, stored as means of rows and columns.

G is the gradient (negated to maximize), t the number of steps including this one, RMS the root of a
tensor's mean square, and W a parameter of two or more dimensions:

    b <- t^beta2_decay
    R <- (1 - b) * R + b * mean(G^2 over each row)                   row_var
    C <- (1 - b) * C + b * mean(G^2 over each column)                col_var
    V <- R C / max(mean(R), eps1)
    U <- G / sqrt(max(V, eps1^2))
    W <- W - lr * weight_decay * W
    W <- W - max(eps2, RMS(W)) * min(lr, 1 / sqrt(t)) / max(1, RMS(U) / d) * U

RMS(W) is that of W before the step. A parameter with fewer dimensions stores V itself, as
`variance`, and updates it with b * G^2. A matrix of A rows and B columns has A + B numbers of
state; Adam has 2 A B.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018, arXiv
1804.04235. The same as `torch.optim.Adafactor`, whose documentation lists the differences from the
paper, except for three cases in which torch's parameters become NaN. If squares of G overflow, this
class changes neither the parameter nor its state. If a row of G is zero and the square of eps1
underflows, the row keeps its parameters. If RMS(W) is infinite or NaN, it counts as eps2.

With the default lr, 0.01, step lengths equal those of Hugging Face's Adafactor with its defaults,
`relative_step` and `scale_parameter`, except that Hugging Face adds eps1 to G^2. Steps of a fixed
length, which Hugging Face's Trainer uses (both options False), are not supported.
"""

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from graphstash.training.device import TracedOp
from graphstash.training.optimizers.base import SyncFreeOptimizer
from graphstash.training.optimizers.formula import Options, Split, can_be_squared, selecting
from graphstash.training.optimizers.options import (
    Group,
    TorchOptions,
    at_least,
    options_in,
    require_count,
)

__all__ = ["Adafactor"]


def _formula(old: Split, step: Tensor, options: Options) -> tuple[list[Tensor], list[list[Tensor]]]:
    eps1, eps2, d = options
    lr, weight_decay, beta2_decay = old.scalars
    step = step.to(lr.dtype)
    rest2 = step.pow(beta2_decay)
    longest = torch.minimum(lr, step.rsqrt())
    least = torch.finfo(old.dtype).eps if eps1 is None else eps1
    tiny = torch.finfo(lr.dtype).tiny
    parameters: list[Tensor] = []
    slots: list[list[Tensor]] = [[] for _ in old.slots]
    for inputs in zip(old.parameters, old.gradients, *old.slots, strict=True):
        # Compute in the type of the scalars: squares of float16 overflow easily.
        value, gradient, *before = (each.to(lr.dtype) for each in inputs)
        if len(before) == 1:
            means = [before[0].lerp(gradient * gradient, rest2)]
            square = means[0]
        else:
            pairs = zip(before, (-1, -2), strict=True)
            means = [mean.lerp(_mean_square(gradient, dim), rest2) for mean, dim in pairs]
            rows, columns = means
            square = rows * columns / rows.mean(dim=-2, keepdim=True).clamp(min=max(least, tiny))
        # The square of eps1 underflows below 1e-19 in float32, and 0 * rsqrt(0) is NaN.
        update = gradient * square.clamp(min=max(least * least, tiny)).rsqrt()
        size = _rms(value)
        size = torch.where(size.isfinite(), size, 0.0).clamp(min=eps2)
        length = size * longest / (_rms(update) / d).clamp(min=1.0)
        changed = value * (1 - lr * weight_decay) - length * update
        fits = can_be_squared(gradient)
        parameters.append(torch.where(fits, changed, value))
        for slot, mean, kept in zip(slots, means, before, strict=True):
            slot.append(torch.where(fits, mean, kept))
    return parameters, slots


def _mean_square(tensor: Tensor, dim: int) -> Tensor:
    """Return the mean square over one dimension, without a tensor of all squares."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=dim, keepdim=True)
    return norm.square() / tensor.shape[dim]


def _rms(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm / math.sqrt(max(1, tensor.numel()))


class Adafactor(SyncFreeOptimizer):
    """Sync-free `torch.optim.Adafactor`; the formula is in the module's docstring.

    Args:
        params: parameters or groups of them, as for torch.optim.
        lr: largest RMS of a step relative to that of the parameter; also scales the weight decay;
            >= 0.
        beta2_decay: exponent with which the newest gradient's share of the mean square falls, <= 0.
        eps: eps1, lower bound for the root of a mean square, >= 0, or None for the machine epsilon
            of the parameter's type; and eps2, lower bound for the parameter's RMS, >= 0. Part of
            the graph.
        d: largest RMS of U, to which a larger update is scaled down, >= 1; part of the graph.
        weight_decay: decoupled weight decay, >= 0.
        maximize: maximize the loss instead of minimizing it.
        options: see `TorchOptions`. There is no fused kernel.

    Raises:
        ValueError: an argument is out of its range, or a parameter is sharded.
    """

    _operation = TracedOp("adafactor", selecting(_formula))
    _nonnegative = ("lr", "weight_decay")
    _numbers = ("lr", "weight_decay", "beta2_decay")
    _moments = ("row_var", "col_var")
    _refuses_shards = "needs whole rows and columns, and a parameter is sharded: use AdamW"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(params, options_in(locals()), **options)

    def _check(self, group: Group) -> None:
        super()._check(group)
        at_least(group, 1, "d")
        if not group["beta2_decay"] <= 0:
            raise ValueError(f"beta2_decay must be at most 0 (got {group['beta2_decay']})")
        require_count(group, 2, "eps")
        eps1, eps2 = group["eps"]
        at_least({"eps[0]": 0 if eps1 is None else eps1, "eps[1]": eps2}, 0, "eps[0]", "eps[1]")

    def _options(self, group: Group) -> Options:
        return (*group["eps"], group["d"])

    def _slots_of(self, group: Group, parameter: Tensor) -> tuple[str, ...]:
        return self._slots(group) if parameter.dim() > 1 else ("variance",)

    def _beginning(self, group: Group, parameter: Tensor, name: str) -> Tensor:
        if name == "variance":
            return super()._beginning(group, parameter, name)
        dim = {"row_var": -1, "col_var": -2}[name]
        dtype = torch.float32 if group["master_weights"] else parameter.dtype
        shape = list(parameter.shape)
        shape[dim] = 1
        return parameter.new_zeros(shape, dtype=dtype)
