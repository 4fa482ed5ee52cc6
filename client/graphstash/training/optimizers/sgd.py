"""SGD: stochastic gradient descent with momentum.

g is the gradient (negated to maximize), and t counts the steps, including this one. Steps that are
skipped because of inf or NaN gradients do not count:

    g <- g + weight_decay * p
    b <- g                                        if t = 1
         momentum * b + (1 - dampening) * g       otherwise
    g <- g + momentum * b  if nesterov, else b
    p <- p - lr * g

This is `torch.optim.SGD`: Sutskever et al., "On the importance of initialization and momentum in
deep learning", 2013, in torch's form.
"""

import math
from collections.abc import Collection
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from graphstash.training.device import TracedOp
from graphstash.training.optimizers.base import Kernel, SyncFreeOptimizer
from graphstash.training.optimizers.cohort import Cohort
from graphstash.training.optimizers.formula import Options, Split, decayed, selecting
from graphstash.training.optimizers.options import Group, TorchOptions, options_in

__all__ = ["SGD"]


def _formula(old: Split, step: Tensor, options: Options) -> tuple[list[Tensor], list[list[Tensor]]]:
    (nesterov,) = options
    lr, weight_decay, momentum, dampening = old.scalars
    gradients = decayed(old.gradients, old.parameters, weight_decay)
    slots: list[list[Tensor]] = []
    if old.slots:
        running = torch._foreach_add(
            torch._foreach_mul(old.slots[0], momentum),
            torch._foreach_mul(gradients, 1 - dampening),
        )
        first = step <= 1
        buffers = [
            torch.where(first, new, kept) for new, kept in zip(gradients, running, strict=True)
        ]
        slots = [buffers]
        ahead = torch._foreach_mul(buffers, momentum)
        gradients = list(torch._foreach_add(gradients, ahead)) if nesterov else buffers
    return list(torch._foreach_sub(old.parameters, torch._foreach_mul(gradients, lr))), slots


class SGD(SyncFreeOptimizer):
    """Sync-free `torch.optim.SGD`; the formula is in the module's docstring.

    Args:
        params: parameters or groups of them, as for torch.optim.
        lr: learning rate, >= 0.
        momentum: decay of the buffer, >= 0; 0 keeps no buffer.
        dampening: share of the gradient that the buffer omits, except at t = 1.
        weight_decay: L2 penalty, >= 0.
        nesterov: use Nesterov's momentum; needs a momentum and no dampening.
        maximize: maximize the loss instead of minimizing it.
        options: see `TorchOptions`.

    Raises:
        ValueError: an argument is out of its range.
    """

    _operation = TracedOp("sgd", selecting(_formula))
    _nonnegative = ("lr", "momentum", "weight_decay")
    _numbers = ("lr", "weight_decay", "momentum", "dampening")
    _constants = ("nesterov",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(params, options_in(locals()), **options)

    def _check(self, group: Group) -> None:
        super()._check(group)
        momentum, dampening = group["momentum"], group["dampening"]
        if math.isnan(dampening):
            raise ValueError("dampening must be a number (got nan)")
        if group["nesterov"] and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"nesterov needs momentum above 0 and dampening 0 (got {momentum} and {dampening})"
            )

    def _slots(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _uses_step(self, group: Group) -> bool:
        del group
        return False  # only the first step differs; torch's SGD saves no step

    def _has_moments(self, group: Group, parameter: Tensor, saved: Collection[str]) -> bool:
        # A state without tensors is complete: it may come from steps without momentum.
        return not saved or super()._has_moments(group, parameter, saved)

    def _fused_kernel(self, group: Group, cohort: Cohort) -> Kernel | None:
        if cohort.slots and group["dampening"] != 0:
            return None  # the host would have to tell the kernel which step is the first
        names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
        return partial(
            torch._fused_sgd_,
            cohort.parameters,
            cohort.gradients,
            cohort.slots[0] if cohort.slots else [],
            # Without dampening, the first step is momentum * 0 + g with a buffer of zeros.
            is_first_step=False,
            **{name: group[name] for name in names},
        )
